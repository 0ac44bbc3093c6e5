"""Mends what the scanner finds, where that can be done without guessing. Reading order:

    run.py         from paths to rewritten files, diffs
    texts.py       one text of any language: rounds of scanning and editing
    python.py  statements.py  imports.py  sequences.py     Python, by libcst
    files.py       atomic writes; what git could not bring back

What to change, and where, is the scanner's to say (`Finding.edit`), so `scan` and `fix` can't disagree.
"""

from legacy_compat.fix.run import Change, DirtyTree, FixReport, NeedsLibcst, diff_of, fix
from legacy_compat.fix.texts import Allowed, Refused

__all__ = ["Allowed", "Change", "DirtyTree", "FixReport", "NeedsLibcst", "Refused", "diff_of", "fix"]
