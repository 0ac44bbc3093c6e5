"""Which strings an expression can give, as far as the source alone says it."""

from __future__ import annotations

import ast
import itertools
from dataclasses import dataclass

from legacy_compat.scan.python.names import Names
from legacy_compat.scan.python.tree import Collection

LIMIT = 64  # strings of one expression
DEPTH = 8  # of names that stand for names
HOLE = "\0"  # stands in a text for a part that only a run would tell


@dataclass(frozen=True, slots=True)
class Text:
    """A string, and the literal that makes it what it is: where a finding about it points."""

    value: str
    node: ast.AST

    @property
    def complete(self) -> bool:
        return HOLE not in self.value


def strings(names: Names, node: ast.AST, depth: int = 0) -> list[Text]:
    """All strings that `node` can give; a part that is not known is a HOLE. [] if nothing is known."""
    if depth > DEPTH:
        return []
    match node:
        case ast.Constant(value=str(value)):
            return [Text(value, node)]
        case ast.JoinedStr(values=parts):
            return _joined(names, node, parts, depth)
        case ast.FormattedValue(value=value, format_spec=None, conversion=-1):
            return strings(names, value, depth + 1)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _joined(names, node, [left, right], depth) if _stringy(names, left, right, depth) else []
        case ast.BinOp(left=ast.Constant(value=str(form)), op=ast.Mod(), right=right):
            arguments = right.elts if isinstance(right, ast.Tuple) else [right]
            return _filled(names, node, form.split("%s"), arguments, depth)
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(form)), attr="format"), args=arguments):
            return _filled(names, node, form.split("{}"), arguments, depth)
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(glue)), attr="join"), args=[parts]):
            return _glued(names, node, glue, parts, depth)
        case ast.IfExp(body=body, orelse=other):
            return strings(names, body, depth + 1) + strings(names, other, depth + 1)
        case ast.Name(id=name):
            return _named(names, node, name, depth)
    return []


def elements(names: Names, node: ast.AST, depth: int = 0) -> list[ast.AST]:
    """The expressions that a loop over `node` goes through, if it is a literal or a name for one."""
    if depth > DEPTH:
        return []
    match node:
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            return list(parts)
        case ast.Dict(keys=keys):
            return [key for key in keys if key is not None]
        case ast.Call(
            func=ast.Attribute(value=ast.Dict() as table, attr="values" | "items" as which), args=[]
        ):
            return list(table.values) if which == "values" else _items(table)
        case ast.Name(id=name):
            found = [item.node for item in names.bindings(name, node) if item.how == "value"]
            return [part for value in found for part in elements(names, value, depth + 1)]
    return []


def _items(table: ast.Dict) -> list[ast.AST]:
    pairs = [(key, value) for key, value in zip(table.keys, table.values, strict=True) if key is not None]
    return [ast.Tuple(elts=[key, value], ctx=ast.Load()) for key, value in pairs]


def _named(names: Names, node: ast.AST, name: str, depth: int) -> list[Text]:
    found: list[Text] = []
    for item in names.bindings(name, node):
        if item.how == "value" and not isinstance(item.node, Collection):
            found += strings(names, item.node, depth + 1)
        elif item.how == "each":
            for part in elements(names, item.node):
                for place in item.index:
                    inside = part.elts if isinstance(part, (ast.Tuple, ast.List)) else []
                    part = inside[place] if place < len(inside) else ast.Constant(value=None)
                found += strings(names, part, depth + 1)
    return found[:LIMIT]


def _stringy(names: Names, left: ast.AST, right: ast.AST, depth: int) -> bool:
    """Whether a sum is one of strings: at least one side is known to be one."""
    return bool(strings(names, left, depth + 1) or strings(names, right, depth + 1))


def _joined(names: Names, whole: ast.AST, parts: list[ast.expr], depth: int) -> list[Text]:
    """All combinations. The literal pointed at is the one that came in from outside, if there is one."""
    options = [strings(names, part, depth + 1) or [Text(HOLE, part)] for part in parts]
    found = []
    for chosen in itertools.islice(itertools.product(*options), LIMIT):
        outside = [
            text.node
            for text, part in zip(chosen, parts, strict=True)
            if text.complete and not _within(part, text.node)
        ]
        found.append(Text("".join(text.value for text in chosen), outside[-1] if outside else whole))
    return found


def _filled(
    names: Names, whole: ast.AST, form: list[str], arguments: list[ast.expr], depth: int
) -> list[Text]:
    if len(form) != len(arguments) + 1:
        return []
    parts: list[ast.expr] = [ast.Constant(value=form[0])]
    for argument, rest in zip(arguments, form[1:], strict=True):
        parts += [argument, ast.Constant(value=rest)]
    return _joined(names, whole, parts, depth)


def _glued(names: Names, whole: ast.AST, glue: str, parts: ast.AST, depth: int) -> list[Text]:
    literal = elements(names, parts)
    if not literal:
        return []
    mixed = [literal[0]]
    for part in literal[1:]:
        mixed += [ast.Constant(value=glue), part]
    return _joined(names, whole, mixed, depth)  # type: ignore[arg-type]


def _within(part: ast.AST, node: ast.AST) -> bool:
    """Whether a literal stands in the expression itself rather than where a name got its value."""
    return any(inner is node for inner in ast.walk(part))
