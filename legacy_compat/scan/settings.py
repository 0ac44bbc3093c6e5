"""Environment variables and flags: what a value means, whatever the language it is written in."""

from __future__ import annotations

import re

from legacy_compat.registry import Removal, Severity

TRUE = {"1", "true", "yes", "on", "y", "t"}
FALSE = {"0", "false", "no", "off", "n", "f", ""}


def truth(value: object) -> bool | None:
    """Whether SGLang read a value as on or off; None for what only a run would tell."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return {0: False, 1: True}.get(value)
    if isinstance(value, str):
        word = value.strip().strip("\"'").lower()
        return True if word in TRUE else False if word in FALSE else None
    return None


def word(name: str) -> re.Pattern[str]:
    """Matches a name or a flag that isn't part of a longer one."""
    return re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")


def severity_of(row: Removal, state: bool | None) -> Severity:
    """What was on stays on, and what only a run would tell most likely was: a leftover. What was off is on now."""
    return "warning" if state is not False and row.severity == "error" else row.severity
