"""For programs. `schema` is raised when a field changes its meaning or goes; new fields may come without it."""

from __future__ import annotations

import json
from typing import Any

from legacy_compat.scan.finding import Finding, Report
from legacy_compat.scan.text import printable

SCHEMA = 1


def as_json(report: Report) -> str:
    """One object. Lines and columns count from 1, columns in characters; the end is exclusive."""
    whole = {
        "tool": "legacy_compat",
        "schema": SCHEMA,
        "summary": {
            "files_scanned": report.scanned,
            "files_with_findings": len(report.files()),
            "errors": report.count("error"),
            "warnings": report.count("warning"),
            "infos": report.count("info"),
            "suppressed": report.suppressed,
            "baselined": report.baselined,
            "skipped": report.skipped,
            "failed": [printable(line) for line in report.failed],
            "seconds": round(report.seconds, 3),
        },
        "findings": [_finding(found) for found in report.findings],
    }
    return json.dumps(whole, indent=2) + "\n"  # ASCII: a pipe may be in any encoding


def _finding(found: Finding) -> dict[str, Any]:
    row = found.row
    return {
        "path": printable(found.path),
        "cell": found.cell,
        "line": found.span.line,
        "column": found.span.column,
        "end_line": found.span.end_line,
        "end_column": found.span.end_column,
        "code": found.code,
        "severity": found.severity,
        "shape": found.shape,
        "name": found.name,
        "message": printable(found.message),
        "note": found.note,
        "fix": found.fixable,
        "removed_in": row.removed_in if row else None,
        "replacement": row.sglang_replacement if row else None,
        "spec_v2_replacement": row.spec_v2_replacement if row else None,
        "source": printable(found.source),
    }
