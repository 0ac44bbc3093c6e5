"""What a scan finds: a place, what is wrong there, and what `fix` could do about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from legacy_compat.registry import Removal, Safety, Severity

SEVERITIES: tuple[Severity, ...] = ("info", "warning", "error")

EditKind = Literal[
    "import-name",  # from old import Name            new: the dotted path that replaces it
    "import-module",  # import old                    new: the dotted path that replaces it
    "attribute",  # owner.old                         new: the name that replaces it
    "rewrite",  # owner.old, owner.old(args)          new: the row's template
    "drop-argument",  # f(old=1)
    "rename-argument",  # f(old=1)                    new: the keyword that replaces it
    "drop-statement",  # os.environ["OLD"] = "1"       uses: where the statement begins
    "drop-entry",  # {"OLD": "1"}
    "drop-item",  # one item of a `with` statement
    "drop-element",  # one element of a list
    "drop-fallback",  # a try of which one branch is V1's        new: which stays; uses: where the try begins
    "text",  # characters, as in `ranges`: the only kind outside Python code
]


@dataclass(frozen=True, slots=True)
class Span:
    """Where: lines and columns from 1, columns in characters, the end exclusive."""

    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True, slots=True)
class Edit:
    """What `fix` would do at a finding. No `Edit` means that a person has to."""

    kind: EditKind
    safety: Safety
    new: str = ""
    uses: tuple[tuple[int, int], ...] = ()  # (line, column) of what is changed with it
    ranges: tuple[tuple[int, int, str], ...] = ()  # "text": (start, end, new) by offset


@dataclass(frozen=True, slots=True)
class Finding:
    """One use of something that V1's removal took away, or one thing to say about a file (SV9..)."""

    path: str
    span: Span
    code: str
    severity: Severity
    shape: str  # how it is used: "import", "base", "string", "setting", ...
    name: str  # what is used, as a dotted path where there is one
    message: str
    row: Removal | None = None
    edit: Edit | None = None
    note: str = ""  # why the severity is not the row's, or what makes this place special
    source: str = ""  # the line it stands on
    cell: int | None = None  # notebooks: number of the cell, from 1; lines then count within it

    @property
    def fixable(self) -> Safety:
        return self.edit.safety if self.edit else "manual"


@dataclass(slots=True)
class Report:
    """All of one scan."""

    findings: list[Finding] = field(default_factory=list)
    scanned: int = 0  # files looked at
    parsed: int = 0  # of these, how many held anything to analyse and could be analysed
    skipped: int = 0  # not regular, binary, too large
    suppressed: int = 0  # by a comment
    baselined: int = 0  # known from the baseline file
    failed: list[str] = field(default_factory=list)  # what could not be done, one line each
    seconds: float = 0.0

    def at_least(self, severity: Severity) -> list[Finding]:
        floor = SEVERITIES.index(severity)
        return [found for found in self.findings if SEVERITIES.index(found.severity) >= floor]

    def count(self, severity: Severity) -> int:
        return sum(found.severity == severity for found in self.findings)

    def files(self) -> set[str]:
        return {found.path for found in self.findings}


# What the scanner says about files; the registry's rows keep clear of SV9.
NOTES: dict[str, tuple[str, str]] = {
    "SV900": (
        "This file could not be parsed.",
        "It was read as plain text instead, so some uses may be missed. Mend its syntax and scan again.",
    ),
    "SV901": (
        "This file could not be read.",
        "Check its permissions. Nothing is known about it.",
    ),
    "SV902": (
        "This file is larger than --max-file-size and mentions a removed name.",
        "Raise --max-file-size to analyse it, or leave it out with --exclude.",
    ),
    "SV903": (
        "A module path of SGLang is put together while the program runs.",
        "The scanner never runs code, so it can't tell which module that is. Check it against `list`.",
    ),
    "SV904": (
        "This is a patch: it belongs to the version that it was cut from.",
        "Patches are reported once and never edited. Cut it again from the SGLang release you move to.",
    ),
    "SV905": (
        "This pins an SGLang release that still has V1.",
        "Code written for the new names needs a newer release: raise the pin together with the fix.",
    ),
}
