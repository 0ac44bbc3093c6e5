"""Rewriting `from old import A, B`: in place if all names go to one module, else split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import libcst as cst

from legacy_compat.fix.sequences import without_in_brackets


def dotted(path: str) -> cst.Name | cst.Attribute:
    """The expression for a dotted path."""
    found = cst.parse_expression(path)
    assert isinstance(found, (cst.Name, cst.Attribute))
    return found


def rewrite(
    line: cst.SimpleStatementLine, node: cst.ImportFrom, new: Mapping[cst.ImportAlias, str]
) -> list[cst.SimpleStatementLine]:
    """The lines that take the place of a line whose only statement is `node`. `new` is by alias: "module.Name"."""
    assert not isinstance(node.names, cst.ImportStar)
    modules = {_module(new[alias]) for alias in node.names if alias in new}
    if len(modules) == 1 and all(alias in new for alias in node.names):
        names = [_renamed(alias, new[alias]) for alias in node.names]
        changed = node.with_changes(module=dotted(modules.pop()), names=names)
        return [line.with_changes(body=[changed])]
    added = _new_lines(node, new)
    left, rpar = without_in_brackets(node.names, node.rpar, lambda alias: alias in new)
    if left:
        return [line.with_changes(body=[node.with_changes(names=left, rpar=rpar)]), *added]
    added[0] = added[0].with_changes(leading_lines=line.leading_lines)
    if line.trailing_whitespace.comment and not added[-1].trailing_whitespace.comment:
        added[-1] = added[-1].with_changes(trailing_whitespace=line.trailing_whitespace)
    return added


def _module(path: str) -> str:
    return path.split(" as ")[0].rpartition(".")[0]


def _renamed(alias: cst.ImportAlias, path: str) -> cst.ImportAlias:
    name, _, local = path.split(" as ")[0].rpartition(".")[2], "", path.partition(" as ")[2]
    changes: dict[str, Any] = {"name": cst.Name(name)}
    if local and alias.asname is None:
        changes["asname"] = cst.AsName(name=cst.Name(local))
    return alias.with_changes(**changes)


def _new_lines(node: cst.ImportFrom, new: Mapping[cst.ImportAlias, str]) -> list[cst.SimpleStatementLine]:
    """One statement for each new module, in the order of the names; a name's comment comes along."""
    assert not isinstance(node.names, cst.ImportStar)
    by_module: dict[str, list[cst.ImportAlias]] = {}
    for alias in node.names:
        if alias in new:
            by_module.setdefault(_module(new[alias]), []).append(alias)
    lines = []
    for module, aliases in by_module.items():
        names = [
            _renamed(alias, new[alias]).with_changes(comma=cst.MaybeSentinel.DEFAULT) for alias in aliases
        ]
        comments = [comment for alias in aliases if (comment := _comment(node, alias))]
        trailing = cst.TrailingWhitespace()
        if comments:
            text = "  ".join(comment.value for comment in comments)
            trailing = cst.TrailingWhitespace(
                whitespace=cst.SimpleWhitespace("  "), comment=cst.Comment(text)
            )
        statement = cst.ImportFrom(module=dotted(module), names=names)
        lines.append(cst.SimpleStatementLine(body=[statement], trailing_whitespace=trailing))
    return lines


def _comment(node: cst.ImportFrom, alias: cst.ImportAlias) -> cst.Comment | None:
    """The comment behind a name, on its line."""
    assert not isinstance(node.names, cst.ImportStar)
    space: Any = None
    if isinstance(alias.comma, cst.Comma):
        space = alias.comma.whitespace_after
    elif alias is node.names[-1] and node.rpar:
        space = node.rpar.whitespace_before
    return space.first_line.comment if isinstance(space, cst.ParenthesizedWhitespace) else None
