"""One file that is not Python, under examination: line by line, with what its language calls a comment."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from legacy_compat.registry import Removal, Severity
from legacy_compat.scan.files import Language
from legacy_compat.scan.finding import Edit, Finding, Span
from legacy_compat.scan.mentions import Mention
from legacy_compat.scan.rules import ROOT, Rules
from legacy_compat.scan.text import Places
from legacy_compat.scan.wording import sentence

HASH = ("shell", "docker", "yaml", "toml", "config")


@dataclass(slots=True)
class Page:
    """A text, its language, and the findings so far."""

    path: str
    text: str
    language: Language
    rules: Rules
    places: Places = field(init=False)
    mentions_sglang: bool = field(init=False)
    findings: dict[tuple[Span, str], Finding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = Places(self.text)
        self.mentions_sglang = bool(re.search(ROOT, self.text, re.IGNORECASE))

    def line_bounds(self, offset: int) -> tuple[int, int]:
        """Start and end of the line around an offset, without its newline."""
        line, _ = self.places.at(offset)
        start = self.places.starts[line - 1]
        return start, start + len(self.places.line(line))

    def whole_line(self, offset: int) -> tuple[int, int]:
        """The same with its newline."""
        line, _ = self.places.at(offset)
        after = self.places.starts[line] if line < len(self.places.starts) else len(self.text)
        return self.places.starts[line - 1], after

    def is_comment(self, offset: int) -> bool:
        """Whether a place lies in a comment of its line."""
        start, _ = self.line_bounds(offset)
        before = self.text[start:offset]
        if self.language in HASH:
            return _hash_outside_quotes(before)
        if self.language == "json":
            return before.lstrip().startswith(("//", "/*", "*"))
        return False

    def quotes(self, offset: int) -> str:
        """The quote that is open at a place of its line, or an empty string."""
        start, _ = self.line_bounds(offset)
        return open_quote(self.text[start:offset])

    def emit(
        self,
        found: Mention,
        shape: str,
        *,
        message: str = "",
        severity: Severity | None = None,
        note: str = "",
        edit: Edit | None = None,
    ) -> None:
        span = self.places.span(found.start, found.end)
        row: Removal = found.row
        name = found.name + found.rest
        finding = Finding(
            self.path,
            span,
            row.code,
            severity or row.severity,
            shape,
            name,
            message or sentence(row, shape, name),
            row,
            edit,
            note,
            self.places.line(span.line),
        )
        self.findings.setdefault((span, row.code), finding)


def open_quote(text: str) -> str:
    """The quote character left open at the end of a piece of shell, YAML or the like."""
    quote = ""
    escaped = False
    for char in text:
        if escaped:
            escaped = False
        elif char == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
    return quote


def _hash_outside_quotes(before: str) -> bool:
    marks = re.finditer(r"(?:^|\s)#", before)
    return any(not open_quote(before[: found.end() - 1]) for found in marks)
