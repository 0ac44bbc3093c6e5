"""Environment variables in Python: os.environ, env dictionaries, SGLang's own `envs`, commands in strings."""

from __future__ import annotations

import ast
import re

from legacy_compat.registry import Removal
from legacy_compat.scan.finding import Edit, EditKind
from legacy_compat.scan.python.module import Module
from legacy_compat.scan.python.strings import is_docstring
from legacy_compat.scan.python.tree import dotted
from legacy_compat.scan.python.values import strings
from legacy_compat.scan.settings import severity_of, truth, word
from legacy_compat.scan.wording import setting_sentence

SET_BY_CALL = ("setdefault", "setenv", "putenv", "set_env", "add_env", "with_env")
ON_ENVS = ("set", "override")
UNKNOWN = object()
# What stands before a variable that a command sets, or before a key, rather than before one that a sentence names.
BEFORE_COMMAND = re.compile(
    r"(?:^|[\n;&|({\[,$`]|\b(?:export|env|sudo|ENV|set|then|do|else)\s|\s(?:-e|--env)[ =]|\b[A-Z_]\w*=\S*\s)\s*\\?[\"']?$"
)


def find_environment(module: Module) -> None:
    variables = module.rules.env
    for node in module.tree.of(ast.Constant):
        text = node.value if isinstance(node.value, str) else ""
        for name, row in variables.items():
            if text == name:
                _named(module, node, row, name)
            elif name in text:
                _inside(module, node, row, name, text)
    for keyword in module.tree.of(ast.keyword):
        if keyword.arg in variables:
            _is_set(module, keyword, variables[keyword.arg], keyword.arg, keyword.value, "drop-argument")
    for attribute in module.tree.of(ast.Attribute):
        if attribute.attr in variables:
            _descriptor(module, attribute, module.rules.descriptors[attribute.attr], attribute.attr)


def _is_set(
    module: Module, place: ast.AST, row: Removal, name: str, value: ast.AST, how: EditKind | None
) -> None:
    known = value.value if isinstance(value, ast.Constant) else UNKNOWN
    state = truth(known)
    if known is UNKNOWN and any(truth(text.value) is False for text in strings(module.names, value)):
        state = False  # at times
    edit = None
    if how and known is not UNKNOWN and row.safety != "manual" and _may_go(row, state):
        start = module.span(module.tree.statement(place))
        edit = Edit(how, row.safety, uses=((start.line, start.column),) if how == "drop-statement" else ())
    message = setting_sentence(row, name, state)
    module.emit(place, row, "setting", name, message=message, severity=severity_of(row, state), edit=edit)


def _may_go(row: Removal, state: bool | None) -> bool:
    """Whether a variable is to be deleted rather than renamed; one that a flag replaces only where it was on."""
    new = row.sglang_replacement
    return new is None or (new.startswith("-") and state is True)


def _named(module: Module, node: ast.Constant, row: Removal, name: str) -> None:
    """A string that is exactly the variable's name."""
    parent, field = module.tree.parents[node]
    match parent:
        case ast.Subscript():
            _subscript(module, node, parent, row, name)
        case ast.Call(func=func, args=[first, value, *_]) if first is node and _verb(func) in SET_BY_CALL:
            alone = isinstance(module.tree.parent(parent), ast.Expr)
            _is_set(module, parent, row, name, value, "drop-statement" if alone else None)
        case ast.Dict(keys=keys, values=values) if field == "keys":
            _is_set(module, node, row, name, values[keys.index(node)], "drop-entry")
        case ast.Call(func=func) if _verb(func) in ("pop", "unsetenv", "delenv"):
            module.emit(node, row, "setting", name, severity="info", note="taken away only")
        case ast.Call(func=func) if _verb(func) in ("get", "getenv"):
            note = "SGLang no longer reads it: what is decided here by it may be out of date"
            module.emit(node, row, "setting", name, severity="warning", note=note)
        case ast.Compare(ops=[ast.In() | ast.NotIn(), *_]):
            module.emit(node, row, "setting", name, severity="warning", note="SGLang no longer reads it")
        case _:
            module.emit(node, row, "setting", name, severity="info", note="named only")


def _verb(func: ast.AST) -> str:
    return func.attr if isinstance(func, ast.Attribute) else dotted(func)


def _subscript(module: Module, node: ast.AST, parent: ast.Subscript, row: Removal, name: str) -> None:
    statement = module.tree.statement(node)
    if isinstance(parent.ctx, ast.Store) and isinstance(statement, ast.Assign):
        only = len(statement.targets) == 1 and statement.targets[0] is parent
        _is_set(module, parent, row, name, statement.value, "drop-statement" if only else None)
    else:
        note = "SGLang no longer reads it: what is decided here by it may be out of date"
        module.emit(node, row, "setting", name, severity="warning", note=note)


def _inside(module: Module, node: ast.Constant, row: Removal, name: str, text: str) -> None:
    """A longer string that names a variable: a command, a script, JSON, or just words."""
    if re.search(r"(?<![\w.])sglang(\.\w+)+", text) and "." + name in text:
        return  # a dotted target, which strings.py reports
    found = re.search(word(name).pattern + r"(?:\\?[\"'])?\s*[=:]\s*(?:\\?[\"'])?(?P<value>\w*)", text)
    if found is None or is_docstring(module, node) or not BEFORE_COMMAND.search(text[: found.start()]):
        if word(name).search(text):
            module.emit(node, row, "docs", name, severity="info")
        return
    state = truth(found["value"]) if found["value"] else None
    parent = module.tree.parent(node)
    if isinstance(parent, ast.JoinedStr) and found.end() == len(text) and not found["value"]:
        state = None  # f"NAME={value}"
    message = setting_sentence(row, name, state)
    note = "inside a string"
    module.emit(node, row, "setting", name, message=message, severity=severity_of(row, state), note=note)


def _descriptor(module: Module, node: ast.Attribute, row: Removal, name: str) -> None:
    """`envs.NAME`: the descriptor itself is gone, so touching it raises."""
    ours = any(path.startswith("sglang.") for path in module.resolve.paths(node.value))
    if not ours and (dotted(node.value).rpartition(".")[2] != "envs" or module.is_foreign(node.value)):
        return
    message = f"envs.{name} was removed in SGLang {row.removed_in}: touching it raises AttributeError"
    edit = None
    outer = module.tree.parent(node)
    call = module.tree.parent(outer) if isinstance(outer, ast.Attribute) else None
    if isinstance(outer, ast.Attribute) and isinstance(call, ast.Call) and call.func is outer:
        value = call.args[0] if call.args else None
        state = truth(value.value) if isinstance(value, ast.Constant) else None
        variable = module.rules.env[name]
        if (
            outer.attr in ON_ENVS
            and state is True
            and variable.safety != "manual"
            and _may_go(variable, state)
        ):
            edit = _descriptor_edit(module, call, outer.attr, variable)
        if outer.attr in ON_ENVS and state is False and row.sglang_replacement:
            message += f"; turned off, it now needs {row.sglang_replacement}"
    module.emit(node, row, "setting", f"envs.{name}", message=message, edit=edit)


def _descriptor_edit(module: Module, call: ast.Call, verb: str, row: Removal) -> Edit | None:
    parent = module.tree.parent(call)
    if verb == "set" and isinstance(parent, ast.Expr):
        start = module.span(parent)
        return Edit("drop-statement", row.safety, uses=((start.line, start.column),))
    if verb == "override" and isinstance(parent, ast.withitem) and parent.optional_vars is None:
        return Edit("drop-item", row.safety)
    return None
