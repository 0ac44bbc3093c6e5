"""Finds code, scripts and settings that still use what the removal of V1 took away. Reading order:

    finding.py     what a finding is
    rules.py       the registry's table, indexed
    files.py       which files, and what each of them is
    text.py        bytes to text and back, places in a text
    mentions.py    removed names in any text
    python/        Python: names are followed to where they were imported from
    plain/         everything else
    parts.py  notebook.py     code inside Markdown and notebooks
    suppress.py    comments that silence a finding; the baseline
    run.py         from paths to findings
    output/        how findings are shown

Scanned code is only ever read.
"""

from legacy_compat.scan.finding import NOTES, Edit, Finding, Report, Span
from legacy_compat.scan.run import Options, scan

__all__ = ["NOTES", "Edit", "Finding", "Options", "Report", "Span", "scan"]
