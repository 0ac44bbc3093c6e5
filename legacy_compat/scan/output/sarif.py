"""SARIF 2.1.0, which code-scanning services read."""

from __future__ import annotations

import json
import os
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

from legacy_compat.registry import by_code
from legacy_compat.scan.finding import NOTES, Finding, Report
from legacy_compat.scan.suppress import fingerprint
from legacy_compat.scan.text import printable

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS = {"error": "error", "warning": "warning", "info": "note"}
BASE = "SRCROOT"


def as_sarif(report: Report) -> str:
    """One run. Paths below the working folder are relative to SRCROOT, all others are file URIs."""
    codes = sorted({found.code for found in report.findings})
    index = {code: place for place, code in enumerate(codes)}
    run = {
        "tool": {
            "driver": {
                "name": "legacy_compat",
                "version": _version(),
                "rules": [_rule(code) for code in codes],
            }
        },
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {BASE: {"uri": _folder_uri(Path.cwd())}},
        "invocations": [_invocation(report)],
        "results": _results(report.findings, index),
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _version() -> str:
    try:
        return metadata.version("spec-v2")
    except metadata.PackageNotFoundError:
        return "0.0.0"


def _rule(code: str) -> dict[str, Any]:
    if code in NOTES:
        short, full = NOTES[code]
        level = "note"
    else:
        row = by_code(code)
        now = row.sglang_replacement or "nothing"
        short = f"{row.old_path}: {row.category} in SGLang {row.removed_in}; replaced by {now}."
        full = row.changes
        level = LEVELS[row.severity]
    return {
        "id": code,
        "shortDescription": {"text": short},
        "fullDescription": {"text": full},
        "help": {"text": f"{short}\n{full}\nMore: python -m legacy_compat explain {code}"},
        "defaultConfiguration": {"level": level},
    }


def _results(findings: list[Finding], index: dict[str, int]) -> list[dict[str, Any]]:
    seen: Counter[str] = Counter()
    results = []
    for found in findings:
        key = fingerprint(found)
        seen[key] += 1  # the same line twice in one file
        results.append(_result(found, index, f"{key}:{seen[key]}"))
    return results


def _result(found: Finding, index: dict[str, int], key: str) -> dict[str, Any]:
    note = f" ({found.note})" if found.note else ""
    cell = f" (cell {found.cell}, line {found.span.line})" if found.cell is not None else ""
    physical: dict[str, Any] = {"artifactLocation": _artifact(found.path)}
    if found.cell is None:
        physical["region"] = _region(found)
        if found.source and found.span.line == found.span.end_line:
            line = {"text": printable(found.source)}
            physical["contextRegion"] = {
                "startLine": found.span.line,
                "endLine": found.span.line,
                "snippet": line,
            }
    result: dict[str, Any] = {
        "ruleId": found.code,
        "ruleIndex": index[found.code],
        "level": LEVELS[found.severity],
        "message": {"text": printable(f"{found.message}{note}{cell}")},
        "locations": [{"physicalLocation": physical}],
        "partialFingerprints": {"legacyCompat/v1": key},
        "properties": {"shape": found.shape, "fix": found.fixable},
    }
    if fixes := _fixes(found):
        result["fixes"] = fixes
    return result


def _region(found: Finding) -> dict[str, Any]:
    span = found.span
    return {
        "startLine": span.line,
        "startColumn": span.column,
        "endLine": span.end_line,
        "endColumn": span.end_column,
    }


def _fixes(found: Finding) -> list[dict[str, Any]]:
    """Only what is safe and a plain exchange of the very characters that are marked."""
    edit = found.edit
    if edit is None or edit.safety != "safe" or edit.kind != "text" or found.cell is not None:
        return []
    if len(edit.ranges) != 1 or not edit.new or edit.ranges[0][2] != edit.new:
        return []
    change = {
        "artifactLocation": _artifact(found.path),
        "replacements": [{"deletedRegion": _region(found), "insertedContent": {"text": edit.new}}],
    }
    return [{"description": {"text": f"Replace by {edit.new}"}, "artifactChanges": [change]}]


def _artifact(path: str) -> dict[str, str]:
    whole = Path(os.path.normpath(Path(path).absolute()))
    if whole.is_relative_to(Path.cwd()):
        return {"uri": _quoted(whole.relative_to(Path.cwd()).as_posix()), "uriBaseId": BASE}
    return {"uri": "file://" + _quoted(whole.as_posix())}


def _folder_uri(folder: Path) -> str:
    return f"file://{_quoted(folder.as_posix())}/"


def _quoted(path: str) -> str:
    """A path as part of a URI; bytes that are no text are escaped as they are."""
    return quote(os.fsencode(path), safe="/")


def _invocation(report: Report) -> dict[str, Any]:
    invocation: dict[str, Any] = {"executionSuccessful": not report.failed}
    if report.failed:
        invocation["toolExecutionNotifications"] = [
            {"level": "error", "message": {"text": printable(line)}} for line in report.failed
        ]
    return invocation
