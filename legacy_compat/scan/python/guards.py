"""Code around a use that makes it harmless, or makes its failure silent.

A use is harmless where the code also knows the newer name, or asks for SGLang's version first. It is worse than
it looks where an `except ImportError` only logs: after the upgrade a feature is gone and nothing says so.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal

from legacy_compat.registry import Removal
from legacy_compat.scan.python.names import Names
from legacy_compat.scan.python.siblings import Siblings
from legacy_compat.scan.python.tree import Function, Tree, dotted
from legacy_compat.scan.python.versions import is_guarded_by_version
from legacy_compat.scan.rules import Rules

CATCHES_IMPORT = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException", "AttributeError"}
PROBES = ("find_spec", "hasattr", "exists", "is_file", "find_loader")


@dataclass(frozen=True, slots=True)
class Guard:
    """What stands around a use. `keep`: which branch of `attempt` stays when V1's goes."""

    kind: Literal["fallback", "version", "typing", "swallowed", "none"]
    note: str = ""
    attempt: ast.Try | None = None
    keep: Literal["", "body", "handler"] = ""


NONE = Guard("none")


def guard_of(tree: Tree, names: Names, rules: Rules, node: ast.AST, row: Removal) -> Guard:
    """The innermost guard that decides; a swallowed failure only if nothing further out makes it harmless."""
    newer = Siblings(row, rules)
    silent = NONE
    for parent, field, child in tree.above(node):
        guard = NONE
        if isinstance(parent, (ast.Try, ast.TryStar)):
            guard = _of_try(names, parent, field, child, newer)
        elif isinstance(parent, ast.With) and field == "body" and _suppresses(parent):
            guard = Guard("swallowed", "contextlib.suppress hides that it is gone")
        elif isinstance(parent, (ast.If, ast.IfExp)) and field in ("body", "orelse"):
            guard = _of_if(names, parent, field, newer, row)
        if guard.kind == "none" and isinstance(child, ast.stmt) and isinstance(getattr(parent, field), list):
            guard = _of_earlier_exit(names, getattr(parent, field), child, row)
        if guard.kind in ("fallback", "version", "typing"):
            return guard
        if guard.kind == "swallowed" and silent.kind == "none":
            silent = guard
    if silent.kind == "swallowed" and _newer_is_near(tree, names, node, newer):
        return Guard("fallback", "the newer name is used as well")
    return silent


# --- try ---


def _of_try(
    names: Names, attempt: ast.Try | ast.TryStar, field: str, child: ast.AST, newer: Siblings
) -> Guard:
    plain = attempt if isinstance(attempt, ast.Try) else None
    if field == "handlers" and isinstance(child, ast.ExceptHandler) and _catches(child):
        tried = [item for item in ast.walk(ast.Module(attempt.body, [])) if isinstance(item, _IMPORTS)]
        if newer.in_code(attempt.body, names):
            return Guard("fallback", "guarded fallback: the newer name is tried first", plain, "body")
        if tried:
            return Guard("fallback", "guarded fallback: something else is tried first", None)
    if field != "body":
        return NONE
    handler = next((item for item in attempt.handlers if _catches(item)), None)
    if handler is None or _raises(handler.body):
        return NONE
    if newer.in_code(handler.body, names):
        return Guard("fallback", "guarded fallback: the newer name is used if this fails", plain, "handler")
    if _provides(handler.body, _bound(attempt.body)):
        return Guard("fallback", "guarded fallback: the handler provides its own")
    return Guard("swallowed", f"the handler hides that it is gone: it {_habit(handler.body)}")


_IMPORTS = (ast.Import, ast.ImportFrom)


def _catches(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(dotted(kind).rpartition(".")[2] in CATCHES_IMPORT for kind in kinds)


def _raises(body: list[ast.stmt]) -> bool:
    """Whether a handler ends in raising or in leaving the program, loudly."""
    last = body[-1]
    if isinstance(last, ast.Raise):
        return True
    call = last.value if isinstance(last, ast.Expr) else None
    return isinstance(call, ast.Call) and dotted(call.func) in ("sys.exit", "pytest.fail", "os._exit", "exit")


def _bound(body: list[ast.stmt]) -> set[str]:
    """The names that statements bind."""
    found: set[str] = set()
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.alias):
            found.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def _provides(body: list[ast.stmt], wanted: set[str]) -> bool:
    """Whether a handler binds one of the wanted names to something real: not None, False or an empty container."""
    for node in ast.walk(ast.Module(body, [])):
        match node:
            case ast.ImportFrom() | ast.Import():
                if wanted & {alias.asname or alias.name for alias in node.names}:
                    return True
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                if name in wanted and not _is_stub(node):
                    return True
            case ast.Assign(targets=targets, value=value) if not _is_nothing(value):
                if wanted & {
                    name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
                }:
                    return True
    return False


def _is_nothing(value: ast.AST) -> bool:
    if isinstance(value, (ast.Tuple, ast.List, ast.Set, ast.Dict)):
        return all(map(_is_nothing, ast.iter_child_nodes(value)))
    return isinstance(value, (ast.Constant, ast.expr_context)) or dotted(value) in (
        "object",
        "Any",
        "typing.Any",
    )


def _is_stub(node: ast.ClassDef | ast.FunctionDef) -> bool:
    return all(isinstance(item, ast.Pass) or _is_text(item) for item in node.body)


def _is_text(item: ast.stmt) -> bool:
    return isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)


def _habit(body: list[ast.stmt]) -> str:
    """What a handler does instead of failing, in two words."""
    last = body[-1]
    match last:
        case ast.Return():
            return "returns"
        case ast.Continue() | ast.Pass() | ast.Break():
            return "goes on" if not isinstance(last, ast.Pass) else "does nothing"
        case ast.Assign(value=ast.Constant()):
            return f"sets {ast.unparse(last)}"
        case ast.Expr(value=ast.Call(func=func)):
            return f"only calls {dotted(func) or 'a function'}()"
    return "goes on"


def _suppresses(block: ast.With) -> bool:
    for item in block.items:
        call = item.context_expr
        if isinstance(call, ast.Call) and dotted(call.func).rpartition(".")[2] == "suppress":
            return any(dotted(kind).rpartition(".")[2] in CATCHES_IMPORT for kind in call.args)
    return False


# --- if ---


def _of_if(names: Names, choice: ast.If | ast.IfExp, field: str, newer: Siblings, row: Removal) -> Guard:
    test = choice.test
    if dotted(test).rpartition(".")[2] == "TYPE_CHECKING" and field == "body":
        return Guard("typing", "imported for type checking only: nothing fails when the program runs")
    if is_guarded_by_version(names, test, field == "body", row.removed_in):
        return Guard("version", "only for SGLang releases that have it")
    if not _probes(names, test):
        return NONE
    other = choice.orelse if field == "body" else choice.body
    branch = [*other] if isinstance(other, list) else [other]
    if branch and newer.in_code(branch, names):
        return Guard("fallback", "guarded fallback: the other branch uses the newer name")
    if field == "body" and not branch:
        return Guard("swallowed", "the check before it hides that it is gone: nothing happens instead")
    return NONE


def _probes(names: Names, test: ast.AST) -> bool:
    """Whether a condition asks if something is there."""
    tests = [test]
    if isinstance(test, ast.Name):
        tests += [item.node for item in names.bindings(test.id, test) if item.how == "value"]
    calls = (node for one in tests for node in ast.walk(one) if isinstance(node, ast.Call))
    return any(dotted(call.func).rpartition(".")[2] in PROBES for call in calls)


def _of_earlier_exit(names: Names, block: list[ast.stmt], statement: ast.stmt, row: Removal) -> Guard:
    """`if version >= ...: return` before a use is the same as an `else` around it."""
    for earlier in block[: block.index(statement)] if statement in block else ():
        if isinstance(earlier, ast.If) and not earlier.orelse:
            leaves = isinstance(earlier.body[-1], (ast.Return, ast.Raise, ast.Continue))
            if leaves and is_guarded_by_version(names, earlier.test, False, row.removed_in):
                return Guard("version", "only for SGLang releases that have it")
    return NONE


def _newer_is_near(tree: Tree, names: Names, node: ast.AST, newer: Siblings) -> bool:
    """Whether the function around a use, or the module if there is none, also knows the newer name."""
    around = tree.enclosing(node, *Function) or tree.root
    return bool(newer) and newer.in_code([around], names)
