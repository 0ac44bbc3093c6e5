"""For the log of a GitHub Actions run, which turns these lines into annotations of the change."""

from __future__ import annotations

from legacy_compat.scan.finding import Finding, Report

LEVELS = {"error": "error", "warning": "warning", "info": "notice"}


def as_github(report: Report) -> str:
    return "".join(_line(found) + "\n" for found in report.findings)


def _line(found: Finding) -> str:
    span = found.span
    where = {"file": found.path, "line": span.line, "endLine": span.end_line}
    if span.line == span.end_line:  # GitHub refuses columns that span lines
        where |= {"col": span.column, "endColumn": span.end_column}
    cell = f" (cell {found.cell}, line {span.line})" if found.cell is not None else ""
    if found.cell is not None:  # its lines are the cell's, not the file's
        where = {"file": found.path}
    properties = ",".join(f"{name}={_property(str(value))}" for name, value in where.items())
    note = f" ({found.note})" if found.note else ""
    title = _property(f"{found.code} {found.shape}")
    return f"::{LEVELS[found.severity]} {properties},title={title}::{_data(found.message + note + cell)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
