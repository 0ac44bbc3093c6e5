"""Calls: arguments that are gone, and results that have another shape."""

from __future__ import annotations

import ast

from legacy_compat.registry import Removal, Severity
from legacy_compat.scan.finding import Edit
from legacy_compat.scan.python.module import Module
from legacy_compat.scan.python.tree import dotted
from legacy_compat.scan.rules import PARAMETER, ROOT


def find_calls(module: Module) -> None:
    for call in module.tree.of(ast.Call):
        _arguments(module, call)
        _server_arguments(module, call)
    for node in module.tree.of(ast.Assign):
        for target in node.targets:
            _unpacking(module, target, node.value)
    if module.strict_results:
        for attribute in module.tree.of(ast.Attribute):
            _result(module, attribute)


# --- arguments ---


def _arguments(module: Module, call: ast.Call) -> None:
    for callee in _callees(module, call):
        for name, row in module.rules.parameters.get(callee, {}).items():
            _check(module, call, callee, name, row)
    for keyword in call.keywords:
        _fake(module, keyword)
        bare = module.rules.bare_parameters.get((_own_name(call), keyword.arg or ""))
        foreign = isinstance(call.func, ast.Attribute) and module.is_foreign(call.func.value)
        if bare is not None and not foreign and module.rules.proven(bare, module.mentions_sglang):
            shown = f"{_own_name(call)}({keyword.arg})"
            module.emit(keyword, bare, "argument", shown, edit=_argument_edit(module, call, bare))


def _fake(module: Module, keyword: ast.keyword) -> None:
    """`MagicMock(is_spec_v2=True)`: a stand-in that still has what SGLang no longer asks for."""
    row = module.rules.bare.get(keyword.arg or "")
    if row is not None and row.kind == "attribute" and module.rules.proven(row, module.mentions_sglang):
        note = "set on an object: SGLang itself no longer reads it"
        module.emit(keyword, row, "definition", row.name, severity="info", note=note)


def _callees(module: Module, call: ast.Call) -> list[str]:
    """Dotted paths of what is called. A constructor goes by its class's, a class of the file by its base's."""
    found = []
    for meaning in module.resolve(call.func):
        for one in module.origins(meaning, "__init__"):
            if one.path.partition(".")[0] == ROOT and not one.instance:
                found.append(one.path.removesuffix(".__init__"))
    return found


def _check(module: Module, call: ast.Call, callee: str, name: str, row: Removal) -> None:
    shown = f"{callee}({name})"
    given = next((keyword for keyword in call.keywords if keyword.arg == name), None)
    if row.trigger == "not true":
        _check_switch(module, call, shown, given, row)
    elif given is not None:
        module.emit(given, row, "argument", shown, edit=_argument_edit(module, call, row))
    elif row.position is not None and not any(isinstance(one, ast.Starred) for one in call.args):
        place = row.position + _by_hand(module, call, callee, row)
        if place < len(call.args):
            module.emit(call.args[place], row, "argument", shown, note="passed by position")


def _check_switch(
    module: Module, call: ast.Call, shown: str, given: ast.keyword | None, row: Removal
) -> None:
    """An argument that matters unless it is True; leaving it out is not True either."""
    if any(keyword.arg is None for keyword in call.keywords):
        return  # **options may well hold it
    if given is None:
        module.emit(call, row, "argument", shown, note="left out, which means False")
    elif not (isinstance(given.value, ast.Constant) and given.value.value is True):
        module.emit(given, row, "argument", shown)


def _by_hand(module: Module, call: ast.Call, callee: str, row: Removal) -> int:
    """1 if the object is passed by hand, which a row's position doesn't count: Class.__init__(self, ...)."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "__init__":
        owners = [one for found in module.resolve(call.func.value) for one in module.origins(found)]
        return int(any(not one.instance for one in owners))
    return int(_is_method(row.old_path.partition("(")[0]) and not _is_method(callee))


def _is_method(callee: str) -> bool:
    return callee.split(".")[-2:-1][0][:1].isupper()


def _argument_edit(module: Module, call: ast.Call, row: Removal) -> Edit | None:
    if row.safety == "manual":
        return None
    if row.rewrite:
        return _call_edit(module, call, row, row.rewrite)
    if row.category == "removed":
        return Edit("drop-argument", row.safety)
    new = row.sglang_replacement or ""
    found = PARAMETER.match(new)
    name = found["name"] if found else new
    return Edit("rename-argument", row.safety, name) if name.isidentifier() else None


def _call_edit(module: Module, call: ast.Call, row: Removal, template: str) -> Edit | None:
    """Another call instead, where the argument is the only one and is True."""
    if call.args or len(call.keywords) != 1 or not isinstance(call.func, ast.Attribute):
        return None
    value = call.keywords[0].value
    if not (isinstance(value, ast.Constant) and value.value is True):
        return None
    span = module.span(call.func)
    return Edit("rewrite", row.safety, template, ((span.line, span.column), (span.end_line, span.end_column)))


def _own_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else dotted(call.func)


# --- server arguments: flags spelled as fields ---


def _server_arguments(module: Module, call: ast.Call) -> None:
    """`Engine(old_flag=...)`. Of a function that isn't SGLang's we only know that it may pass the name on."""
    for keyword in call.keywords:
        row = module.rules.fields.get(keyword.arg or "")
        if row is None or row.severity == "info" or not module.mentions_sglang:
            continue
        ours = any(path.partition(".")[0] == ROOT for path in module.resolve.paths(call.func))
        new = (row.sglang_replacement or "").lstrip("-").replace("-", "_")
        edit = None
        if ours and row.safety != "manual":
            edit = Edit("rename-argument", row.safety, new) if new else Edit("drop-argument", row.safety)
        severity: Severity | None = None if ours else "warning"
        note = "" if ours else "if it reaches SGLang's server arguments"
        module.emit(keyword, row, "argument", keyword.arg or "", severity=severity, note=note, edit=edit)


# --- results ---


def _unpacking(module: Module, target: ast.AST, value: ast.AST) -> None:
    """`a, b, c = worker.verify(batch)` where it returns one object, or four things, today."""
    if not isinstance(target, (ast.Tuple, ast.List)) or not isinstance(value, ast.Call):
        return
    if not isinstance(value.func, ast.Attribute) or any(
        isinstance(part, ast.Starred) for part in target.elts
    ):
        return
    name = value.func.attr
    for owner in module.owners(value.func.value, name):
        row = module.rules.member(owner.path, name) or module.rules.kept.get(f"{owner.path}.{name}")
        if row and row.arity and row.arity[0] == len(target.elts):
            message = _arity(row, len(target.elts))
            module.emit(target, row, "result", row.old_path, message=message, severity="warning")
            return
    row = module.rules.bare.get(name)
    if row and row.arity and row.arity[0] == len(target.elts):
        module.emit(target, row, "result", name, message=_arity(row, len(target.elts)), severity="warning")


def _arity(row: Removal, before: int) -> str:
    now = row.arity[1] if row.arity else 0
    result = f"{now} values" if now else "one object"
    return f"{row.old_path} gave {before} values and since SGLang {row.removed_in} gives {result}"


def _result(module: Module, node: ast.Attribute) -> None:
    """Fields of a result that hold something else today; only on request, as the name alone proves little."""
    if not (module.mentions_sglang and isinstance(node.ctx, ast.Load)):
        return
    row = module.rules.results.get(node.attr)
    if row and not module.is_defined_here(node.value, node.attr):
        module.emit(node, row, "result", row.old_path, severity="info", span=module.span(node))
