"""For people. One block for each finding, or one line, and a summary that also says what is left to do by hand."""

from __future__ import annotations

from collections import Counter

from legacy_compat.registry import Safety, Severity
from legacy_compat.scan.finding import Finding, Report

COLOURS = {"error": "31;1", "warning": "33;1", "info": "36"}
WIDTH = 110  # of a source line shown


def as_text(report: Report, *, colour: bool = False, concise: bool = False) -> str:
    """All findings, grouped by file in the order of the scan."""
    blocks = [_concise(found, colour) if concise else _block(found, colour) for found in report.findings]
    return "".join(f"{block}\n" for block in blocks)


def _concise(found: Finding, colour: bool) -> str:
    return f"{place(found)}: {_label(found, colour)} {found.message}"


def _block(found: Finding, colour: bool) -> str:
    lines = [_concise(found, colour)]
    if found.source.strip() and found.shape != "remark":
        lines += _excerpt(found)
    if found.note:
        lines.append(f"    note: {found.note}")
    if found.row and found.severity != "info":
        lines.append(f"    {found.row.changes}")
        lines.append(f"    {remedy(found)}")
    return "\n".join(lines) + "\n"


def place(found: Finding) -> str:
    """`path:line:column`; in a notebook `path:cell 3:line:column`."""
    cell = f"cell {found.cell}:" if found.cell is not None else ""
    return f"{found.path}:{cell}{found.span.line}:{found.span.column}"


def remedy(found: Finding) -> str:
    match found.fixable:
        case "safe":
            return "`fix` mends this"
        case "unsafe":
            drop = found.edit is not None and found.edit.kind == "drop-fallback"
            return (
                "`fix --drop-legacy` mends this"
                if drop
                else "`fix --unsafe` mends this; look over what it did"
            )
    return f"by hand; `explain {found.code}` says more"


def _label(found: Finding, colour: bool) -> str:
    label = f"{found.severity} {found.code}"
    return f"\x1b[{COLOURS[found.severity]}m{label}\x1b[0m" if colour else label


def _excerpt(found: Finding) -> list[str]:
    """The source line with the place marked; a long line is cut around it."""
    text = found.source.expandtabs(1)
    start = found.span.column - 1
    end = found.span.end_column - 1 if found.span.end_line == found.span.line else len(text)
    shift = max(0, end - WIDTH + 10) if len(text) > WIDTH else 0
    shift = min(shift, start)
    shown = "".join(char if char.isprintable() else "?" for char in text[shift : shift + WIDTH])
    marks = " " * (start - shift) + "^" * max(1, min(end, shift + WIDTH) - start)
    lead = len(shown) - len(shown.lstrip())
    return [f"    {shown[lead:].rstrip()}", f"    {marks[lead:]}"]


def summary(report: Report, *, shown: int | None = None) -> str:
    """What was looked at, what was found, and who has to mend it."""
    files = counted(report.scanned, "file")
    scanned = f"{files} scanned in {report.seconds:.1f} s"
    lines = []
    if not report.findings:
        lines.append(f"{scanned}, 0 matched.")
    else:
        kinds = [counted(report.count(kind), name) for kind, name in _KINDS if report.count(kind)]
        lines.append(f"{scanned}: {', '.join(kinds)} in {counted(len(report.files()), 'file')}.")
        lines += _work_left(report)
    if shown is not None and shown < len(report.findings):
        lines.append(f"{counted(len(report.findings) - shown, 'finding')} below --show not shown.")
    quiet = {"silenced by comments": report.suppressed, "known from the baseline": report.baselined}
    lines += [f"{counted(number, 'finding')} {why}." for why, number in quiet.items() if number]
    if report.skipped:
        lines.append(f"{counted(report.skipped, 'file')} skipped: binary, too large, or not a regular file.")
    lines += [f"could not do: {line}" for line in report.failed]
    return "\n".join(lines) + "\n"


_KINDS: tuple[tuple[Severity, str], ...] = (("error", "error"), ("warning", "warning"), ("info", "note"))


def _work_left(report: Report) -> list[str]:
    """Who mends errors and warnings."""
    left = Counter(found.fixable for found in report.at_least("warning"))
    said: dict[Safety, str] = {
        "safe": f"{left['safe']} by `fix`",
        "unsafe": f"{left['unsafe']}{' more' if left['safe'] else ''} by `fix --unsafe`",
        "manual": f"{left['manual']} by hand",
    }
    told = [text for kind, text in said.items() if left[kind]]
    return [f"To be mended: {', '.join(told)}."] if told else []


def counted(number: int, noun: str) -> str:
    """`1 file`, `2,000 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
