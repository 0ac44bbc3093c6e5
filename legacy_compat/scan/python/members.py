"""Attributes: members of removed classes, names in removed modules, and members known by their name alone."""

from __future__ import annotations

import ast

from legacy_compat.registry import Removal, Safety, Severity
from legacy_compat.scan.finding import Edit, Span
from legacy_compat.scan.python.module import Module
from legacy_compat.scan.python.tree import Function, dotted
from legacy_compat.scan.python.values import strings

PROBES = ("hasattr", "getattr")
SETTERS = ("setattr", "delattr", "object")  # the last is mock's patch.object


def find_members(module: Module) -> None:
    imported = {alias.name for node in module.tree.of(ast.Import) for alias in node.names if not alias.asname}
    for node in module.tree.of(ast.Attribute):
        if dotted(node) not in imported:  # `import a.b` has its own finding
            _attribute(module, node)
    for call in module.tree.of(ast.Call):
        _by_string(module, call)


# --- owner.name ---


def _attribute(module: Module, node: ast.Attribute) -> None:
    for owner in module.owners(node.value, node.attr):
        row = module.rules.member(owner.path, node.attr)
        if row and _matters(module, node, owner.path, row):
            shape = "attribute" if isinstance(node.ctx, ast.Load) else "monkeypatch"
            module.emit(node, row, shape, row.old_path, span=module.span(node), edit=_edit(module, node, row))
            return
    row = module.rules.bare.get(node.attr)
    is_set = isinstance(node.ctx, ast.Store)
    if (
        row
        and (is_set or not module.is_defined_here(node.value, node.attr))
        and not module.is_foreign(node.value)
    ):
        _bare(module, node, row)


def _matters(module: Module, node: ast.Attribute, owner: str, row: Removal) -> bool:
    """Not where the class's own finding says it all, nor where only the result changed (see calls.py)."""
    if row.category == "semantics":
        is_stored = not isinstance(node.ctx, ast.Load)
        return is_stored and row.kind == "attribute"
    return isinstance(node.ctx, ast.Store) or not module.rules.stays(owner, row)


def _bare(module: Module, node: ast.Attribute, row: Removal) -> None:
    """A member whose name alone gives it away."""
    if not module.rules.proven(row, module.mentions_sglang):
        return
    if isinstance(node.ctx, ast.Store):
        note = "set on an object: SGLang itself no longer reads it"
        module.emit(node, row, "definition", node.attr, severity="info", note=note)
        return
    module.emit(node, row, "attribute", node.attr, span=module.span(node), edit=_edit(module, node, row))


def _edit(module: Module, node: ast.Attribute, row: Removal) -> Edit | None:
    new = row.sglang_replacement
    if row.safety == "manual" or not isinstance(node.ctx, ast.Load):
        return None
    if row.rewrite:
        if row.kind == "method" and not _is_called(module, node):
            return None
        return Edit("rewrite", row.safety, row.rewrite)
    if not new or "(" in new:
        return None
    if row.kind in ("class", "function", "attribute") and _module_alias(module, node):
        return _chain_edit(module, node, row, new)
    if new.isidentifier():
        return Edit("attribute", row.safety, new)
    same_owner = new.rpartition(".")[0] == row.old_path.rpartition(".")[0]
    if row.kind in ("method", "attribute") and same_owner:
        return Edit("attribute", row.safety, new.rpartition(".")[2])
    return None


def _is_called(module: Module, node: ast.Attribute) -> bool:
    parent = module.tree.parent(node)
    return isinstance(parent, ast.Call) and parent.func is node


def _module_alias(module: Module, node: ast.Attribute) -> bool:
    return any(path in module.rules.modules for path in module.resolve.paths(node.value))


def _chain_edit(module: Module, node: ast.Attribute, row: Removal, new: str) -> Edit | None:
    """`module.Old` where the import of `module` gets the new module's path: only the last name changes."""
    for path in module.resolve.paths(node.value):
        home = module.rules.modules.get(path)
        if home and path in module.moved and home.sglang_replacement == new.rpartition(".")[0]:
            safety: Safety = "safe" if home.safety == row.safety == "safe" else "unsafe"
            return Edit("attribute", safety, new.rpartition(".")[2])
    return None


# --- hasattr(owner, "name"), setattr(owner, "name", ...) ---


def _by_string(module: Module, call: ast.Call) -> None:
    verb = dotted(call.func).rpartition(".")[2]
    if verb not in PROBES + SETTERS or len(call.args) < 2:
        return
    owner, key = call.args[0], call.args[1]
    for text in strings(module.names, key):
        row = _row_of(module, owner, text.value)
        if row is None or not text.complete:
            continue
        optional = verb == "hasattr" or (verb == "getattr" and len(call.args) > 2)
        note = "the question's answer is now always no, and nothing fails" if optional else ""
        shape = "probe" if verb in PROBES else "monkeypatch"
        module.emit(text.node, row, shape, row.old_path, note=note)


def _row_of(module: Module, owner: ast.AST, name: str) -> Removal | None:
    for found in module.owners(owner, name):
        row = module.rules.member(found.path, name)
        if row and row.category != "semantics" and not module.rules.stays(found.path, row):
            return row
    row = module.rules.bare.get(name)
    is_known = row and module.rules.proven(row, module.mentions_sglang)
    return (
        row if is_known and not module.is_defined_here(owner, name) and not module.is_foreign(owner) else None
    )


# --- class X: def name ---


def find_classes(module: Module) -> None:
    for node in module.tree.of(ast.ClassDef):
        _bases(module, node)
        _definitions(module, node)


def _bases(module: Module, klass: ast.ClassDef) -> None:
    for base in klass.bases:
        for path in module.resolve.paths(base):
            row = module.rules.paths.get(path)
            if row and row.kind == "class":
                module.emit(base, row, "base", path)


def _definitions(module: Module, klass: ast.ClassDef) -> None:
    """Overrides of members that are elsewhere today, so that nothing calls them any more."""
    owners = [one for base in module.resolve.bases(klass) for one in module.origins(base)]
    for node in klass.body:
        for name, place in _defined(node):
            typed = next(filter(None, (module.rules.member(one.path, name) for one in owners)), None)
            if typed and typed.category != "semantics":
                if not any(module.rules.stays(one.path, typed) for one in owners):
                    note = "V2 never calls an override on the outer class"
                    module.emit(
                        place, typed, "override", typed.old_path, span=_head(module, place), note=note
                    )
            elif (row := module.rules.bare.get(name)) and module.rules.proven(row, module.mentions_sglang):
                calls = isinstance(node, Function) and row.kind == "method"
                severity: Severity = "warning" if calls else "info"
                note = "SGLang no longer calls it" if calls else "a class of this file"
                head = _head(module, place)
                module.emit(place, row, "definition", name, span=head, severity=severity, note=note)


def _defined(node: ast.stmt) -> list[tuple[str, ast.AST]]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [(name, node)]
        case ast.AnnAssign(target=ast.Name(id=name) as target):
            return [(name, target)]
        case ast.Assign(targets=targets):
            return [(target.id, target) for target in targets if isinstance(target, ast.Name)]
    return []


def _head(module: Module, node: ast.AST) -> Span:
    """A function's name rather than its whole body."""
    if not isinstance(node, Function):
        return module.span(node)
    line = module.places.line(node.lineno)
    start = module.places.offset(node.lineno, line.index(node.name, node.col_offset) + 1)
    return module.places.span(start, start + len(node.name))
