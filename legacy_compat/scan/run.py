"""From paths to findings: what `python -m legacy_compat scan` does."""

from __future__ import annotations

import mmap
import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from legacy_compat.registry import version_key
from legacy_compat.scan import notebook
from legacy_compat.scan.files import File, Language, Walk, language_of
from legacy_compat.scan.finding import NOTES, Finding, Report, Span
from legacy_compat.scan.parts import code_blocks
from legacy_compat.scan.plain import scan_plain
from legacy_compat.scan.python import module_path, scan_python
from legacy_compat.scan.rules import ROOT, Rules
from legacy_compat.scan.suppress import Suppressions, without_known
from legacy_compat.scan.text import BOMS, Decoded, Places, decode, decode_python

OWN = '"tool": "legacy_compat"'  # begins our own reports and baselines, which name all that was found
PIN = re.compile(rf"\b{ROOT}(?:\[[^\]\n]*\])?\s*(?:==|~=|<=|:)\s*v?(?P<version>\d+(?:\.\d+)+(?:\.post\d+)?)")


@dataclass(frozen=True, slots=True)
class Options:
    """What a scan may be told."""

    target: str | None = None  # SGLang release that the code is to run on; None: the newest
    ignore: tuple[str, ...] = ()  # codes
    exclude: tuple[str, ...] = ()  # glob patterns
    package_root: str | None = None
    strict_results: bool = False
    max_size: int = 8 * 2**20  # bytes of one file


def scan(paths: Iterable[Path], options: Options = Options(), known: Counter[str] | None = None) -> Report:
    """Looks at everything below `paths`. Runs and imports nothing of it."""
    started = time.perf_counter()
    report = Report()
    rules = Rules(options.target, options.ignore)
    walk = Walk(paths, options.exclude)
    for file in walk:
        report.scanned += 1
        _file(file, rules, options, report)
    report.skipped += walk.skipped
    report.failed += walk.failed
    if known:
        fresh = without_known(report.findings, known)
        report.baselined = len(report.findings) - len(fresh)
        report.findings = fresh
    report.seconds = time.perf_counter() - started
    return report


def _file(file: File, rules: Rules, options: Options, report: Report) -> None:
    path = file.path.as_posix()
    try:
        if file.size > options.max_size:
            if _large_file_matters(file.path, rules):
                report.findings.append(
                    _remark(path, "SV902", "info", f"{file.size / 2**20:.0f} MiB; not analysed")
                )
            report.skipped += 1
            return
        data = file.path.read_bytes()
    except OSError as error:
        report.findings.append(_remark(path, "SV901", "warning", f"{error.strerror}"))
        report.failed.append(f"{path}: {error.strerror}")
        return
    found, parsed = scan_bytes(path, data, rules, options)
    report.parsed += parsed
    report.findings += found.kept
    report.suppressed += found.suppressed


@dataclass(slots=True)
class Kept:
    """Findings of one file after its comments were asked."""

    kept: list[Finding]
    suppressed: int = 0


def scan_bytes(path: str, data: bytes, rules: Rules, options: Options) -> tuple[Kept, bool]:
    """(findings, whether the file had anything to analyse and could be analysed)."""
    if any(data.startswith(mark) for mark, encoding in BOMS if encoding != "utf-8"):
        wide = decode(data)
        needle = wide.text.encode("utf-8", "replace") if wide else b""
    else:
        needle = data
    if not (rules.may_concern(needle) or _concerns_anyway(path, needle, rules, options)):
        return Kept([]), False
    decoded = decode(data)
    if decoded is None or OWN in decoded.text[:200]:
        return Kept([]), False
    language = language_of(Path(path), decoded.text)
    findings, parsed = scan_decoded(path, data, decoded, language, rules, options)
    silent = Suppressions(decoded.text)
    kept = findings
    if silent and language != "notebook":  # a notebook's lines are its cells' and are asked there
        kept = [one for one in findings if not silent.cover(one.span.line, one.span.end_line, one.code)]
    return Kept(kept, len(findings) - len(kept)), parsed


def _concerns_anyway(path: str, data: bytes, rules: Rules, options: Options) -> bool:
    """Files that hold no removed name and still matter: a removed module itself, fields of results."""
    if options.strict_results and any(name.encode() in data for name in rules.results):
        return True
    return f"/{ROOT}/" in f"/{path}" and module_path(path, options.package_root) in rules.modules


def scan_decoded(
    path: str, data: bytes, decoded: Decoded, language: Language, rules: Rules, options: Options
) -> tuple[list[Finding], bool]:
    """One text of a known language, by the scanner of that language."""
    if language == "python":
        try:
            text = decode_python(data).text
            return scan_source(path, text, rules, options), True
        except (SyntaxError, UnicodeError, LookupError) as error:
            return _unparsed(path, decoded.text, error, rules), False
    if language == "notebook":
        try:
            return scan_notebook(path, decoded.text, rules, options), True
        except ValueError as error:
            return _unparsed(path, decoded.text, error, rules), False
    if language == "markdown":
        return scan_markdown(path, decoded.text, rules, options), True
    return _with_pins(path, decoded.text, language, scan_plain(path, decoded.text, language, rules)), True


def scan_source(path: str, text: str, rules: Rules, options: Options, hidden: str = "") -> list[Finding]:
    return scan_python(
        path,
        text,
        rules,
        package_root=options.package_root,
        strict_results=options.strict_results,
        hidden=hidden,
    )


def _unparsed(path: str, text: str, error: Exception, rules: Rules) -> list[Finding]:
    """What can be said of a file that its parser refuses: what its lines mention, as warnings at most."""
    line = getattr(error, "lineno", None) or 1
    what = getattr(error, "msg", None) or str(error)
    note = _remark(path, "SV900", "warning", f"{what}; read as plain text", Span(line, 1, line, 1))
    note = replace(note, source=Places(text).line(line))
    found = scan_plain(path, text, "config", rules)
    lower = [
        replace(one, severity="warning" if one.severity == "error" else one.severity, edit=None)
        for one in found
    ]
    return [note, *lower]


# --- texts in texts ---


def scan_markdown(path: str, text: str, rules: Rules, options: Options) -> list[Finding]:
    """Prose is told about; code blocks are scanned, and are warnings at most: nothing runs them here."""
    blocks = code_blocks(text)
    found: list[Finding] = []
    prose = list(text)
    for block in blocks:
        prose[block.start : block.end] = [
            char if char in "\r\n" else " " for char in text[block.start : block.end]
        ]
        try:
            if block.language == "python":
                inner = scan_source(path, block.text, rules, options)
            else:
                inner = scan_plain(path, block.text, block.language, rules)
        except SyntaxError:
            inner = [replace(one, edit=None) for one in scan_plain(path, block.text, "prose", rules)]
        for one in inner:
            lower = "warning" if one.severity == "error" else one.severity
            moved = _moved(one.span, block.first_line - 1, len(block.indent))
            found.append(replace(one, span=moved, severity=lower))
    found += scan_plain(path, "".join(prose), "prose", rules)
    return sorted(found, key=lambda one: (one.span.line, one.span.column, one.code))


def _moved(span: Span, lines: int, columns: int = 0) -> Span:
    return Span(span.line + lines, span.column + columns, span.end_line + lines, span.end_column + columns)


def scan_notebook(path: str, text: str, rules: Rules, options: Options) -> list[Finding]:
    """Places count within a cell. Raises ValueError if the file is not a notebook."""
    cells = notebook.cells_of(text)
    code = [cell for cell in cells if cell.kind == "code"]
    masked = [notebook.as_python(cell) for cell in code]
    texts = [python for python, _ in masked]
    joined = notebook.join_cells(code, texts)
    found = []
    for one in scan_source(path, joined, rules, options, notebook.hidden(masked)):
        cell, first = _cell_at(code, texts, one.span.line)
        found.append(replace(one, span=_moved(one.span, -first), cell=cell.number))
    for cell in cells:
        inner = scan_plain(path, cell.shell, "shell", rules) if cell.shell else []
        if cell.kind == "markdown":
            inner = scan_markdown(path, cell.text, rules, options)
        elif cell.broken and rules.may_concern(cell.text.encode("utf-8", "replace")):
            inner = [_remark(path, "SV900", "warning", f"cell {cell.number} does not parse"), *inner]
        found += [replace(one, cell=cell.number) for one in inner]
    found = [one for one in found if not _silenced(cells, one)]
    found += _pins(path, found, [(cell.number, cell.text) for cell in code], "warning")
    return sorted(found, key=lambda one: (one.cell or 0, one.span.line, one.span.column, one.code))


def _cell_at(cells: list[notebook.Cell], texts: list[str], line: int) -> tuple[notebook.Cell, int]:
    """The cell that a line of the joined source lies in, and the lines before the cell's own first one."""
    first = 1
    for cell, text in zip(cells, texts, strict=True):
        after = first + text.count("\n") + 1
        if line <= after:
            return cell, first
        first = after + 1
    return cells[-1], first


def _silenced(cells: list[notebook.Cell], found: Finding) -> bool:
    text = next((cell.text for cell in cells if cell.number == found.cell), "")
    return Suppressions(text).cover(found.span.line, found.span.end_line, found.code)


# --- remarks ---


def _with_pins(path: str, text: str, language: Language, found: list[Finding]) -> list[Finding]:
    if language not in ("shell", "docker", "yaml", "config") or not found:
        return found
    found = [*found, *_pins(path, found, [(None, text)], "info")]
    return sorted(found, key=lambda one: (one.span.line, one.span.column, one.code))


def _pins(
    path: str, found: list[Finding], texts: list[tuple[int | None, str]], severity: str
) -> list[Finding]:
    """An older SGLang, pinned in the same file as code that is to be changed for a newer one."""
    needed = [version_key(one.row.removed_in) for one in found if one.row and one.severity != "info"]
    pins = []
    for cell, text in texts:
        for match in PIN.finditer(text) if needed else ():
            if version_key(match["version"]) < max(needed):
                places = Places(text)
                span = places.span(*match.span())
                note = _remark(path, "SV905", severity, f"pins SGLang {match['version']}", span)
                pins.append(replace(note, cell=cell, source=places.line(span.line)))
    return pins


def _remark(path: str, code: str, severity: str, detail: str, span: Span = Span(1, 1, 1, 1)) -> Finding:  # noqa: B008
    message = f"{NOTES[code][0].rstrip('.')}: {detail}"
    return Finding(path, span, code, severity, "remark", "", message)  # type: ignore[arg-type]


def _large_file_matters(path: Path, rules: Rules) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        return any(held.find(word) >= 0 for word in rules.triggers[0])
