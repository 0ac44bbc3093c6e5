"""Taking parts out of a comma-separated list, with the layout of the others kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import libcst as cst


def without(parts: Sequence[Any], is_doomed: Callable[[Any], bool]) -> list[Any]:
    """The parts that stay. The last of them ends the way the last one of all did, so that closing brackets stand
    where they stood.
    """
    kept = [part for part in parts if not is_doomed(part)]
    if not kept or kept[-1] is parts[-1]:
        return kept
    last, ended = kept[-1], parts[-1]
    changes: dict[str, Any] = {"comma": ended.comma}
    if isinstance(ended.comma, cst.Comma) and isinstance(last.comma, cst.Comma):
        changes["comma"] = last.comma.with_changes(
            whitespace_after=_ending(last.comma.whitespace_after, ended.comma.whitespace_after)
        )
    if isinstance(ended, cst.Arg):
        changes["whitespace_after_arg"] = ended.whitespace_after_arg
    return [*kept[:-1], last.with_changes(**changes)]


def _ending(own: cst.BaseParenthesizableWhitespace, ended: cst.BaseParenthesizableWhitespace) -> Any:
    """The new last part's own comment, before the line break and the indent that the bracket stands on."""
    if isinstance(own, cst.ParenthesizedWhitespace) and isinstance(ended, cst.ParenthesizedWhitespace):
        return ended.with_changes(first_line=own.first_line)
    return ended
