"""From paths to rewritten files: what `python -m legacy_compat fix` does."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from legacy_compat.fix.files import uncommitted, write_atomically
from legacy_compat.fix.texts import Allowed, Fixer, Refused
from legacy_compat.scan.files import Walk, language_of
from legacy_compat.scan.finding import Finding, Report
from legacy_compat.scan.rules import Rules
from legacy_compat.scan.run import Options, scan_bytes
from legacy_compat.scan.text import Decoded, decode, decode_python

NEEDS_LIBCST = "fixing Python code needs libcst: pip install spec-v2[migrate]"


class NeedsLibcst(ImportError):
    """There is Python code to fix and libcst is not installed."""


class DirtyTree(Exception):
    """Files to be changed hold work that is not committed."""


@dataclass(frozen=True, slots=True)
class Change:
    """One file before and after, and the findings that are mended in it."""

    path: Path
    before: bytes
    after: bytes
    made: tuple[Finding, ...]


@dataclass(slots=True)
class FixReport:
    """All of one run."""

    changes: list[Change] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)  # path, reason
    left: Report = field(default_factory=Report)  # a scan of the files as they are afterwards

    @property
    def made(self) -> int:
        return sum(len(change.made) for change in self.changes)


def fix(
    paths: Iterable[Path], options: Options, allowed: Allowed, *, write: bool, allow_dirty: bool
) -> FixReport:
    """Plans all changes, then writes them. Nothing is written if any of them meets uncommitted work.

    Raises DirtyTree, or NeedsLibcst, before the first file is touched.
    """
    report = FixReport()
    rules = Rules(options.target, options.ignore)
    walk = Walk(paths, options.exclude)
    for file in walk:
        report.left.scanned += 1
        if file.size > options.max_size:
            report.left.skipped += 1
            continue
        try:
            data = file.path.read_bytes()
        except OSError as error:
            report.left.failed.append(f"{file.path}: {error.strerror}")
            continue
        _plan(file.path, data, rules, options, allowed, report)
    report.left.skipped += walk.skipped
    report.left.failed += walk.failed
    if write and report.changes:
        if not allow_dirty and (dirty := uncommitted(change.path for change in report.changes)):
            raise DirtyTree(", ".join(dirty[:5]) + (f" and {len(dirty) - 5} more" if len(dirty) > 5 else ""))
        for change in report.changes:
            write_atomically(change.path, change.after)
    return report


def _plan(
    path: Path, data: bytes, rules: Rules, options: Options, allowed: Allowed, report: FixReport
) -> None:
    """Adds what would change in one file, and what would be left in it."""
    shown = path.as_posix()
    kept, parsed = scan_bytes(shown, data, rules, options)
    report.left.parsed += parsed
    after: bytes = data
    made: tuple[Finding, ...] = ()
    if any(map(allowed, kept.kept)):
        try:
            after, made = fix_bytes(shown, data, rules, options, allowed)
        except Refused as error:
            report.refused.append((shown, str(error)))
        except ImportError as error:
            if error.name != "libcst":
                raise
            raise NeedsLibcst(NEEDS_LIBCST) from None
    if after != data:
        report.changes.append(Change(path, data, after, made))
        kept, _ = scan_bytes(shown, after, rules, options)
    report.left.findings += kept.kept
    report.left.suppressed += kept.suppressed


def fix_bytes(
    path: str, data: bytes, rules: Rules, options: Options, allowed: Allowed
) -> tuple[bytes, tuple[Finding, ...]]:
    """A file's new bytes, in its own encoding and with its own newlines. Raises Refused or ImportError."""
    decoded = decode(data)
    if decoded is None:
        return data, ()
    language = language_of(Path(path), decoded.text)
    if language == "python":
        try:
            decoded = decode_python(data)
        except (SyntaxError, UnicodeError, LookupError) as error:
            raise Refused(f"it can't be decoded: {error}") from None
    fixer = Fixer(rules, options, allowed)
    new = fixer.fix(path, decoded.text, language)
    after = _encoded(decoded, new)
    return (after, tuple(fixer.made)) if after != data else (data, ())


def _encoded(decoded: Decoded, text: str) -> bytes:
    try:
        return decoded.encode(text)
    except UnicodeEncodeError as error:
        raise Refused(f"the result can't be written as {decoded.encoding}: {error.reason}") from None


def has_libcst() -> bool:
    return importlib.util.find_spec("libcst") is not None


# --- diffs ---


def diff_of(change: Change) -> str:
    """A unified diff that `patch -p1` and `git apply` take."""
    name = change.path.as_posix().lstrip("/")
    before, after = (_lines(data) for data in (change.before, change.after))
    made = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in made
    )


def _lines(data: bytes) -> list[str]:
    """Lines with their ends, as they are: a diff of CRLF files keeps the CR."""
    return re.findall(r"[^\n]*\n|[^\n]+", data.decode("utf-8", "surrogateescape"))
