"""From an expression to the dotted paths that it may stand for."""

from __future__ import annotations

import ast

from legacy_compat.scan.python.names import DEPTH, Binding, Local, Meaning, Names, Ref
from legacy_compat.scan.python.tree import Function
from legacy_compat.scan.python.values import strings

IMPORTERS = ("importlib.import_module", "__import__", "pkgutil.resolve_name", "pytest.importorskip")
WRAPPERS = {"Optional", "Union", "Annotated", "Final", "ClassVar", "Type", "type"}


class Resolver:
    """Asks `Names` step by step. An empty answer means: not known, so not SGLang's."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self._known: dict[ast.AST, tuple[Meaning, ...]] = {}

    def __call__(self, node: ast.AST, depth: int = 0) -> tuple[Meaning, ...]:
        if depth > DEPTH:
            return ()
        if node not in self._known:
            self._known[node] = ()  # a name that stands for itself ends here
            self._known[node] = tuple(dict.fromkeys(self._resolve(node, depth + 1)))
        return self._known[node]

    def paths(self, node: ast.AST) -> list[str]:
        """The dotted paths alone, members of objects included."""
        return [found.path for found in self(node) if isinstance(found, Ref)]

    def _resolve(self, node: ast.AST, depth: int) -> list[Meaning]:
        match node:
            case ast.Name(id=name):
                return self._name(name, node, depth)
            case ast.Attribute(value=value, attr=name):
                return [found for owner in self(value, depth) for found in self.member(owner, name, depth)]
            case ast.Call():
                return self._call(node, depth)
            case ast.Subscript(value=value, slice=key) if self._is(value, "sys.modules", depth):
                return [Ref(text.value) for text in strings(self.names, key) if text.complete]
            case ast.IfExp(body=one, orelse=other):
                return [*self(one, depth), *self(other, depth)]
            case ast.BoolOp(values=values):
                return [found for value in values for found in self(value, depth)]
            case ast.NamedExpr(value=value) | ast.Await(value=value) | ast.Starred(value=value):
                return list(self(value, depth))
        return []

    def _name(self, name: str, node: ast.AST, depth: int) -> list[Meaning]:
        bound = self.names.bindings(name, node)
        if not bound:
            return [Ref(path) for star in self.names.stars if self.names.known(path := f"{star}.{name}")]
        return [found for item in bound for found in self._binding(item, depth)]

    def _binding(self, item: Binding, depth: int) -> list[Meaning]:
        match item.how, item.node:
            case "import", _:
                return [Ref(item.path)]
            case "value", node:
                return list(self(node, depth))
            case "annotation", node:
                return self.annotation(node, depth)
            case "self", ast.ClassDef() as klass:
                return [Local(klass, instance=item.path != "cls")]
            case "class", ast.ClassDef() as klass:
                return [Local(klass)]
        return []

    def annotation(self, node: ast.AST | None, depth: int = 0) -> list[Meaning]:
        """What an annotated name holds: an object of the class, or the class itself for `type[...]`."""
        match node:
            case ast.Constant(value=str(text)):
                try:
                    inner = ast.parse(text, mode="eval").body
                except (SyntaxError, ValueError):
                    return []
                for part in ast.walk(inner):  # names inside are looked up where the text stands
                    self.names.tree.parents.setdefault(part, (node, "value"))
                return self.annotation(inner, depth + 1) if depth < DEPTH else []
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self.annotation(left, depth + 1) + self.annotation(right, depth + 1)
            case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=inner) if (
                name in WRAPPERS
            ):
                parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
                found = [item for part in parts for item in self.annotation(part, depth + 1)]
                return [_as(item, instance=name.lower() != "type") for item in found]
            case ast.Name() | ast.Attribute():
                return [_as(item, instance=True) for item in self(node, depth + 1)]
        return []

    def member(self, owner: Meaning, name: str, depth: int = 0) -> list[Meaning]:
        """What `owner.name` may be. A member of an object is named by its class's path."""
        if isinstance(owner, Ref):
            if _is_enum_member(owner.path, name):
                return [Ref(owner.path, instance=True)]
            return [Ref(f"{owner.path}.{name}")]
        values = self.names.own_attribute(owner.node, name)
        if values is not None:
            return [found for value in values for found in self(value, depth + 1)]
        return [
            found for base in self.bases(owner.node, depth) for found in self.member(base, name, depth + 1)
        ]

    def bases(self, klass: ast.ClassDef, depth: int = 0) -> list[Meaning]:
        if depth > DEPTH:
            return []
        found = [item for base in klass.bases for item in self(base, depth + 1)]
        return [item for item in found if not (isinstance(item, Local) and item.node is klass)]

    def _call(self, node: ast.Call, depth: int) -> list[Meaning]:
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            klass = self._class_around(node)
            return [_as(base, instance=True) for base in self.bases(klass, depth)] if klass else []
        first = node.args[0] if node.args else None
        match node.func, node.args:
            case ast.Name(id="getattr"), [owner, key, *_]:
                names = [text.value for text in strings(self.names, key) if text.complete]
                return [
                    m for item in self(owner, depth) for name in names for m in self.member(item, name, depth)
                ]
            case ast.Name(id="cast") | ast.Attribute(attr="cast"), [wanted, _]:
                return self.annotation(wanted, depth)
            case ast.Name(id="type"), [value]:
                return [_as(item, instance=False) for item in self(value, depth)]
        if first is not None and self.is_importer(node.func):
            return [Ref(text.value) for text in strings(self.names, first) if text.complete]
        return [made for func in self(node.func, depth) for made in self._made(func)] or self._returned(
            node, depth
        )

    def is_importer(self, func: ast.AST) -> bool:
        """Whether calling this gives the module that a string names."""
        if isinstance(func, ast.Name) and func.id == "__import__":
            return True
        if isinstance(func, ast.Attribute) and func.attr == "get" and self._is(func.value, "sys.modules", 0):
            return True
        return any(path in IMPORTERS for path in self.paths(func))

    def _made(self, func: Meaning) -> list[Meaning]:
        """The object that calling a class makes. A class is known by its capital, as everywhere in SGLang."""
        if isinstance(func, Local):
            return [] if func.instance else [_as(func, instance=True)]
        if func.instance:
            return []
        owner, _, name = func.path.rpartition(".")
        if name.startswith("from_"):  # an alternative constructor, by Python's custom
            owner, name = owner.rpartition(".")[0], owner.rpartition(".")[2]
            return [Ref(f"{owner}.{name}", instance=True)] if name[:1].isupper() else []
        return [Ref(func.path, instance=True)] if name[:1].isupper() else []

    def _returned(self, node: ast.Call, depth: int) -> list[Meaning]:
        """What a function of the file says that it returns."""
        if not isinstance(node.func, ast.Name):
            return []
        bound = self.names.bindings(node.func.id, node)
        functions = [
            item.node for item in bound if item.how == "function" and isinstance(item.node, Function)
        ]
        return [found for function in functions for found in self.annotation(function.returns, depth + 1)]

    def _is(self, node: ast.AST, path: str, depth: int) -> bool:
        return any(isinstance(found, Ref) and found.path == path for found in self(node, depth))

    def _class_around(self, node: ast.AST) -> ast.ClassDef | None:
        found = self.names.tree.enclosing(node, ast.ClassDef)
        return found if isinstance(found, ast.ClassDef) else None


def _is_enum_member(owner: str, name: str) -> bool:
    """`SpeculativeAlgorithm.EAGLE`: an object of its class."""
    return name.isupper() and len(name) > 1 and owner.rpartition(".")[2][:1].isupper()


def _as(found: Meaning, *, instance: bool) -> Meaning:
    if isinstance(found, Ref):
        return Ref(found.path, instance)
    return Local(found.node, instance)
