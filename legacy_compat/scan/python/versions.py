"""Conditions on SGLang's version: whether a branch only runs where a removed name still exists."""

from __future__ import annotations

import ast
import re

from legacy_compat.registry import version_key
from legacy_compat.scan.python.names import Names
from legacy_compat.scan.python.tree import dotted

DEPTH = 6  # of names that stand for names
RELEASE = re.compile(r"\d+(\.\d+)+(\.?(post|rc|dev)\d*)?$")
MIRRORED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.LtE: ast.GtE,
    ast.Gt: ast.Lt,
    ast.GtE: ast.LtE,
    ast.Eq: ast.Eq,
}
NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.NotEq: ast.Eq,
}


def is_guarded_by_version(names: Names, test: ast.AST, holds: bool, removed_in: str, depth: int = 0) -> bool:
    """Whether a branch that runs when `test` is `holds` runs only on releases before `removed_in`."""

    def ask(inner: ast.AST, holds: bool) -> bool:
        return depth < DEPTH and is_guarded_by_version(names, inner, holds, removed_in, depth + 1)

    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return ask(inner, not holds)
        case ast.BoolOp(op=op, values=values):
            each = [ask(value, holds) for value in values]
            return any(each) if isinstance(op, ast.And) == holds else all(each)
        case ast.Name(id=name):
            bound = [item.node for item in names.bindings(name, test) if item.how == "value"]
            return any(ask(value, holds) for value in bound)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _compares(names, left, type(op), right, holds, removed_in)
    return False


def _compares(
    names: Names, left: ast.AST, op: type[ast.cmpop], right: ast.AST, holds: bool, removed_in: str
) -> bool:
    limit = _release(names, right)
    asked = left
    if limit is None:
        limit, asked, op = _release(names, left), right, MIRRORED.get(op, op)
    if limit is None or not _asks_version(names, asked):
        return False
    effective = op if holds else NEGATED.get(op, op)
    removed = version_key(removed_in)
    if effective is ast.Lt:
        return limit <= removed
    return effective in (ast.LtE, ast.Eq) and limit < removed


def _release(names: Names, node: ast.AST, depth: int = 0) -> tuple[int, ...] | None:
    """The release that an expression spells: "0.5.13", Version("0.5.13"), parse("0.5.13"), (0, 5, 13)."""
    if depth > DEPTH:
        return None
    match node:
        case ast.Constant(value=str(text)) if RELEASE.match(text):
            digits = re.match(r"[\d.]*\d", text)
            post = re.search(r"post(\d+)", text)
            key = tuple(int(part) for part in (digits[0] if digits else "0").split("."))
            return (*key, int(post[1])) if post else key
        case ast.Tuple(elts=parts) if parts and all(isinstance(part, ast.Constant) for part in parts):
            numbers = [part.value for part in parts if isinstance(part, ast.Constant)]
            whole = tuple(number for number in numbers if isinstance(number, int))
            return whole if len(whole) == len(numbers) else None
        case ast.Call(args=[only]):
            return _release(names, only, depth + 1)
        case ast.Name(id=name):
            values = [item.node for item in names.bindings(name, node) if item.how == "value"]
            return _release(names, values[0], depth + 1) if len(values) == 1 else None
    return None


def _asks_version(names: Names, node: ast.AST) -> bool:
    """Whether an expression is about a version: its own words say so, or those of what it is a name for."""
    words = [ast.unparse(node)]
    for name in {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}:
        words += [ast.unparse(item.node) for item in names.bindings(name, node) if item.how == "value"]
    return any("version" in text.lower() for text in words) or dotted(node).endswith(("_VER", "_ver"))
