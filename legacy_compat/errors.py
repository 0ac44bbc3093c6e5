"""What somebody sees who asks for a removed name: what became of it, and what to type instead.

A module `__getattr__` cannot satisfy everybody with one exception. `from m import Old` needs an ImportError, or
Python replaces the message by its own; `hasattr(m, "Old")`, `getattr(m, "Old", None)` and mock need an
AttributeError, or they fail. No class can be both (their memory layouts conflict). So `error_for` looks at what
the caller is doing and takes the one that fits.
"""

from __future__ import annotations

import opcode
import textwrap
from types import FrameType
from typing import Any

from legacy_compat.registry import Removal, by_code

WIDTH = 100
SCAN = "python -m legacy_compat scan ."
PAGE = "docs/migration.md"
KINDS = {"env": "environment variable"}  # where the table's word is no word for people
LAST = {"unreleased": "it was on the development branch only", "unknown": "or an earlier release did"}


def explain(row: Removal) -> str:
    """Eight lines at most: what happened, the replacements, what changes, and three ways on."""
    changes = textwrap.wrap(
        f"Change:  {row.changes}", WIDTH, subsequent_indent=" " * 9, break_on_hyphens=False
    )
    lines = [
        f"{row.code}: {what_happened(row)}.",
        f"SGLang:  {row.sglang_replacement or 'nothing takes its place'}",
        f"spec_v2: {row.spec_v2_replacement or 'nothing like it in this release'}",
        *changes,
        f"Find it: {SCAN}",
    ]
    if is_released(row):
        lines.append(f'Or stay: pip install "sglang=={row.last_version}"')
    return "\n".join([*lines, f"More:    {anchor(row)}, or python -m legacy_compat explain {row.code}"])


def what_happened(row: Removal) -> str:
    """The fact with its versions, such as `SGLang 0.5.13 removed the class X (last in 0.5.12.post1)`."""
    if row.kind == "behaviour":
        return f"SGLang {row.removed_in} changed this: {row.old_path} (up to {row.last_version} as before)"
    what = f"the {KINDS.get(row.kind, row.kind)} {row.old_path}"
    if row.category == "semantics":
        return f"SGLang {row.removed_in} changed {what} (up to {row.last_version} as before)"
    return f"SGLang {row.removed_in} removed {what} ({LAST.get(row.last_version, f'last in {row.last_version}')})"


def is_released(row: Removal) -> bool:
    """Whether a release is known that still has it, so that one can stay there."""
    return row.last_version not in ("unreleased", "unknown")


def anchor(row: Removal) -> str:
    """Where the documentation speaks of it."""
    return f"{PAGE}#{row.code.lower()}"


class RemovedV1Error(Exception):
    """A name, module, argument or variable of V1 was used. Raised as one of the classes below.

    `code` is stable (SV101), `removed` the old path, `replacement` what to use in its place (None if nothing),
    `hint` what changes for the caller; `removal` is the whole row of the table.
    """

    def __init__(self, removal: Removal, **context: Any) -> None:
        super().__init__(explain(removal), **context)
        self.removal = removal
        self._context = context

    @property
    def code(self) -> str:
        return self.removal.code

    @property
    def removed(self) -> str:
        return self.removal.old_path

    @property
    def replacement(self) -> str | None:
        return self.removal.sglang_replacement or self.removal.spec_v2_replacement

    @property
    def hint(self) -> str:
        return self.removal.changes

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions travel between processes; the default would call the class with the message.
        return _rebuild, (type(self), self.code, self._context)


def _rebuild(kind: type[RemovedV1Error], code: str, context: dict[str, Any]) -> RemovedV1Error:
    return kind(by_code(code), **context)


class RemovedV1ImportError(RemovedV1Error, ImportError):
    """For `from module import Old`. `name` is the module, as Python has it."""


class RemovedV1ModuleNotFoundError(RemovedV1ImportError, ModuleNotFoundError):
    """For `import old.module`; `except ModuleNotFoundError` goes on working. `name` is the old module."""


class RemovedV1AttributeError(RemovedV1Error, AttributeError):
    """For `module.Old`, so that hasattr, getattr with a default, inspect and mock go on working."""

    def __init__(self, removal: Removal, **context: Any) -> None:
        # Given a name, Python adds no module of its own, in which it would look for similar names to suggest.
        super().__init__(removal, **{"name": removal.name, **context})


class RemovedV1UsageError(RemovedV1Error, RuntimeError):
    """For a call, a subclass or an assignment that only made sense with V1."""


class RemovedV1Warning(FutureWarning):
    """For a setting of V1 that is silently without effect."""


def error_for(row: Removal, caller: FrameType, module: str) -> RemovedV1Error:
    """The error that fits what `caller`, the frame that asked `module` for the name, is doing."""
    if imports_from(caller):
        return RemovedV1ImportError(row, name=module)
    return RemovedV1AttributeError(row)


def imports_from(frame: FrameType) -> bool:
    """Whether the frame is in the middle of `from module import name`.

    For a package, importlib looks for the name first; for a plain module, the statement's own instruction does.
    An interpreter in which neither can be seen gets the AttributeError.
    """
    code = frame.f_code
    if code.co_name == "_handle_fromlist" and code.co_filename.startswith("<frozen importlib"):
        return True
    return (
        0 <= frame.f_lasti < len(code.co_code) and code.co_code[frame.f_lasti] == opcode.opmap["IMPORT_FROM"]
    )
