"""A syntax tree that knows what stands around each node."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeVar

Scoped = (
    ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef,
    ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
)  # fmt: skip
Comprehension = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
Function = (ast.FunctionDef, ast.AsyncFunctionDef)
Collection = (ast.Tuple, ast.List, ast.Set, ast.Dict)
_SHARED = (ast.expr_context, ast.operator, ast.boolop, ast.unaryop, ast.cmpop)  # one object for all places


N = TypeVar("N", bound=ast.AST)


class Tree:
    """Nodes in source order, each with its parent and the field of the parent that holds it."""

    def __init__(self, root: ast.Module) -> None:
        self.root = root
        self.nodes: list[ast.AST] = []
        self.parents: dict[ast.AST, tuple[ast.AST, str]] = {}
        self._kinds: dict[type[ast.AST], list[ast.AST]] = {}
        stack: list[ast.AST] = [root]
        while stack:  # not recursive: generated code nests deeper than Python's stack
            node = stack.pop()
            self.nodes.append(node)
            self._kinds.setdefault(type(node), []).append(node)
            children = []
            for field in node._fields:
                value = getattr(node, field, None)
                for child in value if isinstance(value, list) else (value,):
                    if isinstance(child, ast.AST) and not isinstance(child, _SHARED):
                        self.parents[child] = (node, field)
                        children.append(child)
            stack.extend(reversed(children))

    def of(self, *kinds: type[N]) -> Iterator[N]:
        """All nodes of these types, one type after the other, each in source order."""
        for kind in kinds:
            yield from self._kinds.get(kind, ())  # type: ignore[misc]

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self.parents[node][0] if node in self.parents else None

    def field(self, node: ast.AST) -> str:
        return self.parents[node][1] if node in self.parents else ""

    def above(self, node: ast.AST) -> Iterator[tuple[ast.AST, str, ast.AST]]:
        """From the inside out: (ancestor, its field that leads to `node`, the child in that field)."""
        while node in self.parents:
            parent, field = self.parents[node]
            yield parent, field, node
            node = parent

    def scope(self, node: ast.AST) -> ast.AST:
        """The module, function, class or comprehension in which the names at this node are looked up."""
        for parent, field, _ in self.above(node):
            if isinstance(parent, Comprehension) or (isinstance(parent, Scoped) and field == "body"):
                return parent
        return self.root

    def enclosing(self, node: ast.AST, *kinds: type[ast.AST]) -> ast.AST | None:
        return next((parent for parent, _, _ in self.above(node) if isinstance(parent, kinds)), None)

    def statement(self, node: ast.AST) -> ast.AST:
        """The statement that a node is part of, or is."""
        while not isinstance(node, ast.stmt) and node in self.parents:
            node = self.parents[node][0]
        return node

    def block(self, statement: ast.AST) -> list[ast.stmt]:
        """The statements among which a statement stands."""
        parent, field = self.parents[statement]
        found = getattr(parent, field)
        return found if isinstance(found, list) else [found]

    def class_of(self, function: ast.AST) -> ast.ClassDef | None:
        """The class that a function is a method of."""
        parent = self.parent(function)
        return parent if isinstance(parent, ast.ClassDef) else None


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a chain of names, or an empty string for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def first_argument(function: ast.AST) -> str:
    """The name of a method's first parameter, usually `self`."""
    if not isinstance(function, Function):
        return ""
    arguments = [*function.args.posonlyargs, *function.args.args]
    return arguments[0].arg if arguments else ""


def decorators(function: ast.AST) -> set[str]:
    if not isinstance(function, (*Function, ast.ClassDef)):
        return set()
    plain = (item.func if isinstance(item, ast.Call) else item for item in function.decorator_list)
    return {dotted(item).rpartition(".")[2] for item in plain}
