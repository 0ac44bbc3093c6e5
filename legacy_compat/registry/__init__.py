"""The table of all that the removal of V1 took away: `removals.json`, as Python objects.

Errors, import shims, scanner, codemod and `docs/migration.md` are made from it. Codes by their first digit:

    SV1  workers: modules, classes, constructor parameters, members
    SV2  data classes: draft, verify and extend inputs, and what came back
    SV3  scheduler, batches, requests, algorithm
    SV4  forward modes and graph runners
    SV5  helper functions, and modules that moved
    SV6  environment variables and flags
    SV7  behaviours that changed under the same name
    SV8  older renames that the same files tend to contain
    SV9  not rows: what the scanner says about files (it could not read one, ...)
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from legacy_compat.registry.schema import check

FOLDER = Path(__file__).parent

Kind = Literal["module", "class", "function", "method", "attribute", "parameter", "env", "flag", "behaviour"]
Category = Literal["moved", "renamed", "removed", "semantics"]
Safety = Literal["safe", "unsafe", "manual"]
Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Removal:
    """One row: something that code written for V1 may use and that is no longer there, or no longer the same.

    `schema.json` says what each field may hold.
    """

    code: str
    kind: Kind
    old_path: str
    last_version: str
    removed_in: str
    sglang_replacement: str | None
    spec_v2_replacement: str | None
    category: Category
    safety: Safety
    severity: Severity
    changes: str
    source_pr: str
    aliases: tuple[str, ...] = ()
    distinctive: bool = False
    evidence: Literal["sglang", "name"] = "sglang"
    rewrite: str | None = None
    arity: tuple[int, int] | None = None
    position: int | None = None
    trigger: Literal["passed", "not true"] = "passed"

    @property
    def name(self) -> str:
        """The last part of the path: what a caller's code spells."""
        if self.kind == "parameter":
            return self.old_path.partition("(")[2].rstrip(")")
        if self.kind in ("env", "flag", "behaviour"):
            return self.old_path
        return self.old_path.rpartition(".")[2]

    @property
    def paths(self) -> tuple[str, ...]:
        """`old_path` and the aliases."""
        return (self.old_path, *self.aliases)

    def concerns(self, sglang_version: str) -> bool:
        """Whether code that is to run on this SGLang release is affected."""
        return version_key(sglang_version) >= version_key(self.removed_in)


def version_key(version: str) -> tuple[int, ...]:
    """Orders releases: 0.5.12 < 0.5.12.post1 < 0.5.13. Raises ValueError for what is not a release."""
    try:
        return tuple(int(part.removeprefix("post")) for part in version.split("."))
    except ValueError:
        raise ValueError(
            f"version is {version!r}; expected a release such as 0.5.13 or 0.5.12.post1"
        ) from None


@functools.cache
def load() -> tuple[Removal, ...]:
    """All rows, ordered by code. Raises ValueError, naming row and field, if the table breaks its schema."""
    rows: list[dict[str, Any]] = json.loads((FOLDER / "removals.json").read_text(encoding="utf-8"))
    check(rows, json.loads((FOLDER / "schema.json").read_text(encoding="utf-8")), "removals.json")
    return tuple(map(_removal, rows))


def _removal(row: dict[str, Any]) -> Removal:
    hashable: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in row.items()}
    return Removal(**hashable)


def by_code(code: str) -> Removal:
    """The row with this code, in any case. Raises KeyError for a code that no row has."""
    return _codes()[code.upper()]


def by_path(dotted: str) -> Removal | None:
    """The row whose `old_path` or alias is exactly `dotted`, or None."""
    return _paths().get(dotted)


def nearest(dotted: str) -> Removal | None:
    """The row of `dotted` or of the closest thing around it: a member's class, a class's module; or None."""
    while dotted:
        if found := by_path(dotted):
            return found
        dotted = dotted.rpartition(".")[0]
    return None


@functools.cache
def _codes() -> dict[str, Removal]:
    return {row.code: row for row in load()}


@functools.cache
def _paths() -> dict[str, Removal]:
    return {path: row for row in load() for path in row.paths}
