"""Taking parts out of a comma-separated list, with the layout of the others kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import libcst as cst

Space = cst.BaseParenthesizableWhitespace


def without(parts: Sequence[Any], is_doomed: Callable[[Any], bool]) -> list[Any]:
    """The parts that stay. The last of them ends the way the last one of all did, so that a closing bracket stands
    where it stood.
    """
    kept = [part for part in parts if not is_doomed(part)]
    if not kept or kept[-1] is parts[-1]:
        return kept
    last, ended = kept[-1], parts[-1]
    changes: dict[str, Any] = {"comma": ended.comma}
    if isinstance(ended.comma, cst.Comma) and isinstance(last.comma, cst.Comma):
        after = _ending(last.comma.whitespace_after, ended.comma.whitespace_after)
        changes["comma"] = last.comma.with_changes(whitespace_after=after)
    if isinstance(ended, cst.Arg):
        changes["whitespace_after_arg"] = ended.whitespace_after_arg
    return [*kept[:-1], last.with_changes(**changes)]


def without_in_brackets(
    parts: Sequence[Any], bracket: Any, is_doomed: Callable[[Any], bool]
) -> tuple[list[Any], Any]:
    """The same where the closing bracket is a node that holds the space before it: (parts, bracket)."""
    kept = without(parts, is_doomed)
    if not kept or not any(is_doomed(part) for part in parts[-1:]) or bracket is None:
        return kept, bracket
    own = [part for part in parts if not is_doomed(part)][-1]
    space = own.comma.whitespace_after if isinstance(own.comma, cst.Comma) else None
    before = bracket.whitespace_before
    if not isinstance(space, cst.ParenthesizedWhitespace) or not isinstance(
        before, cst.ParenthesizedWhitespace
    ):
        return kept, bracket
    last = own.with_changes(comma=own.comma.with_changes(whitespace_after=cst.SimpleWhitespace("")))
    closing = bracket.with_changes(whitespace_before=before.with_changes(first_line=space.first_line))
    return [*kept[:-1], last], closing


def _ending(own: Space, ended: Space) -> Space:
    """The new last part's own comment, before the line break and the indent that the bracket stands on."""
    if isinstance(own, cst.ParenthesizedWhitespace) and isinstance(ended, cst.ParenthesizedWhitespace):
        return ended.with_changes(first_line=own.first_line)
    return ended
