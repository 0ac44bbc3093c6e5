"""Mutants of a source file: each is the file with one small mistake in it, of a kind that people make."""

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FLIPPED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    """`key` says what was changed and outlives edits elsewhere in the file: it holds no line number."""

    key: str
    line: int
    path: Path
    place: "_Place"
    change: Callable[[Any], Any]

    @property
    def source(self) -> str:
        """The file with the mistake in it."""
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        _put(tree, self.place, self.change(copy.deepcopy(self.place.node)))
        return ast.unparse(ast.fix_missing_locations(tree))


def make_mutants(path: Path, name: str, only: frozenset[str] = frozenset()) -> list[Mutant]:
    """All mutants of the functions in `path`, in the order of the file.

    `name`: what keys call the file. `only`: qualified names of the functions to change, all where it is empty. Left
    alone is what no test should pin down: docstrings, annotations, decorators, assertions, and the texts of errors
    and of log lines.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    seen: Counter[str] = Counter()
    found = []
    for place in list(_places(tree, only)):
        for change in _changes(place.node):
            before = _quoted(tree, place)
            _put(tree, place, change(copy.deepcopy(place.node)))
            after = _quoted(tree, place)
            _put(tree, place, place.node)
            key = f"{name}::{place.function}: {_short(before)} -> {_short(after)}"
            seen[key] += 1
            if seen[key] > 1:
                key += f" (no. {seen[key]})"
            found.append(Mutant(key, place.node.lineno, path, place, change))
    return found


Step = tuple[str, int | None]
"""From a node to one of its children: the field, and the index where the field is a list."""


@dataclass(frozen=True, slots=True)
class _Place:
    node: Any
    path: tuple[Step, ...]
    function: str


def _places(tree: ast.Module, only: frozenset[str]) -> Iterator[_Place]:
    """Every node inside the functions, with the way to it from the root."""

    def walk(node: Any, path: tuple[Step, ...], names: tuple[str, ...], inside: bool) -> Iterator[_Place]:
        for field, index, child in _children(node):
            if _is_left_alone(node, field, child):
                continue
            way = (*path, (field, index))
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                own = (*names, child.name)
                chosen = inside or (
                    isinstance(child, ast.FunctionDef) and (not only or ".".join(own) in only)
                )
                yield from walk(child, way, own, chosen)
                continue
            if inside and hasattr(child, "lineno"):
                yield _Place(child, way, ".".join(names))
            yield from walk(child, way, names, inside)

    yield from walk(tree, (), (), False)


def _children(node: Any) -> Iterator[tuple[str, int | None, Any]]:
    for field, value in ast.iter_fields(node):
        if isinstance(value, list):
            yield from ((field, i, item) for i, item in enumerate(value) if isinstance(item, ast.AST))
        elif isinstance(value, ast.AST):
            yield field, None, value


def _is_left_alone(parent: Any, field: str, child: Any) -> bool:
    if field in ("annotation", "returns", "decorator_list", "type_params", "bases", "exc", "msg"):
        return True
    if isinstance(child, ast.Assert | ast.JoinedStr):
        return True
    if isinstance(child, ast.Expr):
        called = child.value.func if isinstance(child.value, ast.Call) else child.value
        return isinstance(called, ast.Constant) or ast.unparse(called).startswith("_LOG.")
    return False


def _changes(node: Any) -> list[Callable[[Any], Any]]:
    """What can be done to a node."""
    changes: list[Callable[[Any], Any]] = []
    match node:
        case ast.Constant(value=bool()):
            changes = [lambda n: ast.Constant(not n.value)]
        case ast.Constant(value=int()):
            changes = [lambda n: ast.Constant(n.value + 1), lambda n: ast.Constant(n.value - 1)]
        case ast.Compare(ops=[one]) if type(one) in FLIPPED:
            changes = [lambda n: ast.Compare(n.left, [FLIPPED[type(n.ops[0])]()], n.comparators)]
        case ast.BinOp(op=op) if type(op) in FLIPPED:
            changes = [lambda n: ast.BinOp(n.left, FLIPPED[type(n.op)](), n.right)]
        case ast.BoolOp():
            changes = [lambda n: ast.BoolOp(FLIPPED[type(n.op)](), n.values)]
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            changes = [lambda n: n.operand]
        case ast.IfExp():
            changes = [lambda n: ast.IfExp(n.test, n.orelse, n.body)]
        case ast.Call(args=[ast.expr() as first, ast.expr() as second, *_]):
            if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                changes = [lambda n: ast.Call(n.func, [n.args[1], n.args[0], *n.args[2:]], n.keywords)]
        case ast.AugAssign(op=op):
            changes = [lambda n: ast.Pass()]
            if type(op) in FLIPPED:
                changes.append(lambda n: ast.AugAssign(n.target, FLIPPED[type(n.op)](), n.value))
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Continue() | ast.Break():
            changes = [lambda n: ast.Pass()]
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            changes = [lambda n: ast.Pass()]
        case ast.If():
            changes = [lambda n: ast.If(ast.UnaryOp(ast.Not(), n.test), n.body, n.orelse)]
    return changes


def _follow(node: Any, path: tuple[Step, ...]) -> Any:
    for field, index in path:
        node = getattr(node, field) if index is None else getattr(node, field)[index]
    return node


def _put(tree: ast.Module, place: _Place, value: Any) -> None:
    holder, (field, index) = _follow(tree, place.path[:-1]), place.path[-1]
    if index is None:
        setattr(holder, field, value)
    else:
        getattr(holder, field)[index] = value


def _quoted(tree: ast.Module, place: _Place) -> str:
    """The part of the file that a key quotes: enough to be recognised by."""
    path = place.path
    small = (ast.Constant, ast.UnaryOp, ast.Name, ast.keyword, ast.Slice, ast.Tuple)
    while isinstance(_follow(tree, path), small):
        path = path[:-1]
    quoted = _follow(tree, path)
    return ast.unparse(quoted.test if isinstance(quoted, ast.If) else quoted)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 120 else f"{text[:70]} ... {text[-46:]}"
