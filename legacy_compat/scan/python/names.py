"""What each name of a module stands for: the dotted path it was imported from, or a class of the file.

A name counts as SGLang's only if an import says so. That is what keeps another project's `EAGLEWorker` out.
The order of statements is not followed: a name stands for everything that its scope ever binds it to.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from legacy_compat.scan.python.tree import Function, Tree, decorators, dotted, first_argument

BINDING: tuple[type[ast.AST], ...] = (
    ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Assign,
    ast.AnnAssign, ast.NamedExpr, ast.For, ast.AsyncFor, ast.comprehension, ast.withitem, ast.ExceptHandler,
    ast.AugAssign,
)  # fmt: skip
DEPTH = 12  # of names that stand for names


@dataclass(frozen=True, slots=True)
class Ref:
    """Something imported, by its dotted path; `instance`: an object of that class, not the class itself."""

    path: str
    instance: bool = False


@dataclass(frozen=True, slots=True)
class Local:
    """A class of this file, or an object of it."""

    node: ast.ClassDef
    instance: bool = False


@dataclass(frozen=True, slots=True)
class Binding:
    """One way in which a scope binds a name."""

    how: Literal["import", "value", "each", "annotation", "self", "class", "function", "unknown"]
    node: ast.AST
    path: str = ""
    index: tuple[int, ...] = ()  # "each": which part of an element


Meaning = Ref | Local


class Names:
    """All bindings of a module."""

    def __init__(self, tree: Tree, package: str, known: Callable[[str], bool]) -> None:
        self.tree = tree
        self.package = package  # what a relative import starts from; empty if unknown
        self.known = known  # whether the registry has a path: all that a star import can tell us
        self.stars: list[str] = []
        self.scopes: dict[ast.AST, dict[str, list[Binding]]] = {}
        self.attributes: dict[tuple[ast.ClassDef, str], list[ast.AST]] = {}  # self.name = value
        self._globals = {
            (tree.scope(node), name): isinstance(node, ast.Global)
            for kind in (ast.Global, ast.Nonlocal)
            for node in tree.of(kind)
            for name in node.names  # type: ignore[attr-defined]
        }
        for node in tree.of(*BINDING):
            self._bind(node)

    # --- what binds a name ---

    def _add(self, node: ast.AST, name: str, binding: Binding) -> None:
        scope = self.tree.scope(node)
        if self._globals.get((scope, name)):
            scope = self.tree.root
        self.scopes.setdefault(scope, {}).setdefault(name, []).append(binding)

    def _bind(self, node: ast.AST) -> None:
        match node:
            case ast.Import():
                for alias in node.names:
                    path = alias.name if alias.asname else alias.name.partition(".")[0]
                    self._add(node, alias.asname or path, Binding("import", alias, path))
            case ast.ImportFrom():
                module = self.module_of(node)
                for alias in node.names:
                    if alias.name == "*":
                        self.stars.append(module)
                    else:
                        path = f"{module}.{alias.name}"
                        self._add(node, alias.asname or alias.name, Binding("import", alias, path))
            case ast.ClassDef():
                self._add(node, node.name, Binding("class", node))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._add(node, node.name, Binding("function", node))
                self._bind_arguments(node)
            case ast.Lambda():
                self._bind_arguments(node)
            case ast.Assign():
                for target in node.targets:
                    self._bind_target(target, node.value)
            case ast.AnnAssign():
                how: Literal["annotation"] = "annotation"
                self._bind_annotated(node.target, Binding(how, node.annotation), node.value)
            case ast.NamedExpr():
                self._bind_target(node.target, node.value)
            case ast.For() | ast.AsyncFor() | ast.comprehension():
                self._bind_each(node.target, node.iter, ())
            case ast.withitem(optional_vars=ast.Name(id=name)):
                self._add(node, name, Binding("unknown", node))
            case ast.ExceptHandler(name=str(name)):
                self._add(node, name, Binding("unknown", node))
            case ast.AugAssign(target=ast.Name(id=name)):
                self._add(node, name, Binding("unknown", node))

    def _bind_target(self, target: ast.AST, value: ast.AST) -> None:
        match target:
            case ast.Name():
                self._add(target, target.id, Binding("value", value))
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                if klass := self._method_class(target, owner):
                    self.attributes.setdefault((klass, name), []).append(value)
            case ast.Tuple() | ast.List():
                pairs = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
                for place, part in enumerate(target.elts):
                    if pairs:
                        self._bind_target(part, value.elts[place])  # type: ignore[attr-defined]
                    elif isinstance(part, ast.Name):
                        self._add(part, part.id, Binding("unknown", target))

    def _bind_annotated(self, target: ast.AST, binding: Binding, value: ast.AST | None) -> None:
        if isinstance(target, ast.Name):
            self._add(target, target.id, binding)
        if value is not None:
            self._bind_target(target, value)

    def _bind_each(self, target: ast.AST, source: ast.AST, index: tuple[int, ...]) -> None:
        if isinstance(target, ast.Name):
            self._add(target, target.id, Binding("each", source, index=index))
        elif isinstance(target, (ast.Tuple, ast.List)):
            for place, part in enumerate(target.elts):
                self._bind_each(part, source, (*index, place))

    def _bind_arguments(self, function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        names = self.scopes.setdefault(function, {})
        spec = function.args
        plain = [*spec.posonlyargs, *spec.args]
        for argument in [*plain, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]:
            how = (
                Binding("annotation", argument.annotation)
                if argument.annotation
                else Binding("unknown", argument)
            )
            names.setdefault(argument.arg, []).append(how)
        defaults = [*zip(plain[::-1], spec.defaults[::-1], strict=False)]
        keyword_defaults = [*zip(spec.kwonlyargs, spec.kw_defaults, strict=True)]
        for argument, default in (*defaults, *keyword_defaults):
            if default is not None:
                names[argument.arg].append(Binding("value", default))
        klass = self.tree.class_of(function)
        if klass and plain and "staticmethod" not in decorators(function):
            path = "cls" if "classmethod" in decorators(function) else ""
            names[plain[0].arg] = [Binding("self", klass, path)]

    def _method_class(self, node: ast.AST, owner: str) -> ast.ClassDef | None:
        for function, _, _ in self.tree.above(node):
            if isinstance(function, Function) and first_argument(function) == owner:
                return self.tree.class_of(function)
        return None

    def module_of(self, node: ast.ImportFrom) -> str:
        """The module that `from` names, relative ones by the file's own place; empty if that isn't known."""
        if not node.level:
            return node.module or ""
        above = self.package.split(".") if self.package else []
        if node.level > len(above):
            return ""
        kept = above[: len(above) - node.level + 1]
        return ".".join([*kept, *filter(None, [node.module])])

    # --- what a name stands for ---

    def bindings(self, name: str, node: ast.AST) -> list[Binding]:
        """Of a name as seen from a node."""
        scope: ast.AST | None = self.tree.scope(node)
        nearest = True
        while scope is not None:
            skipped = isinstance(scope, ast.ClassDef) and not nearest  # methods don't see the class's names
            if not skipped and name in self.scopes.get(scope, {}):
                return self.scopes[scope][name]
            scope = self.tree.scope(scope) if scope is not self.tree.root else None
            nearest = False
        return []

    def own_attribute(self, klass: ast.ClassDef, name: str) -> list[ast.AST] | None:
        """The values that a class gives a member; [] for a method; None if it doesn't define it."""
        bound = self.scopes.get(klass, {}).get(name)
        if bound is None and (klass, name) not in self.attributes:
            return None
        values = [item.node for item in bound or () if item.how == "value"]
        return values + self.attributes.get((klass, name), [])

    def uses(self, alias: ast.alias, name: str) -> Iterator[ast.Name]:
        """The nodes that read what an import bound."""
        for node in self.tree.of(ast.Name):
            if node.id == name and any(item.node is alias for item in self.bindings(name, node)):
                yield node

    def bound_once(self, alias: ast.alias, name: str) -> bool:
        """Whether an import is all that binds its name, in any scope of the file."""
        found = [item for scope in self.scopes.values() for item in scope.get(name, ())]
        return len(found) == 1 and found[0].node is alias

    def is_import_root(self, node: ast.AST) -> bool:
        """Whether a chain starts at a name that an import binds."""
        root = dotted(node).partition(".")[0]
        return bool(root) and any(item.how == "import" for item in self.bindings(root, node))
