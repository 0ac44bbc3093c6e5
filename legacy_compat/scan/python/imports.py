"""Imports in every form, at any depth."""

from __future__ import annotations

import ast
import re

from legacy_compat.registry import Removal
from legacy_compat.scan.finding import Edit
from legacy_compat.scan.python.module import Module
from legacy_compat.scan.python.tree import dotted
from legacy_compat.scan.rules import ROOT, new_path

PATCHERS = ("setattr", "delattr", "object", "super")  # the third is mock's patch.object


def find_imports(module: Module) -> None:
    for node in module.tree.of(ast.Import):
        for alias in node.names:
            if found := module.rules.nearest(alias.name):
                edit = _module_edit(module, alias, found[1]) if found[0] == alias.name else None
                if edit:
                    module.moved.add(alias.name)
                module.emit(alias, found[1], "import", alias.name, edit=edit)
    for source in module.tree.of(ast.ImportFrom):
        _from(module, source)


def _from(module: Module, node: ast.ImportFrom) -> None:
    source = module.names.module_of(node)
    if source.partition(".")[0] != ROOT:
        return
    for alias in node.names:
        path = source if alias.name == "*" else f"{source}.{alias.name}"
        found = module.rules.nearest(path)
        if not found:
            continue
        edit = None
        if not node.level and alias.name != "*":
            edit = _name_edit(module, alias, found[1], exact=found[0] == path)
            if edit and found[1].kind == "module":
                module.moved.add(path)
        module.emit(alias, found[1], "import", path, edit=edit)


def _name_edit(module: Module, alias: ast.alias, row: Removal, *, exact: bool) -> Edit | None:
    """`from old import Name`, if another import can take its place."""
    new = new_path(row)
    if not new or row.safety == "manual":
        return None
    if not exact:  # a name of a removed module that has no row: it went along if the module only moved
        if row.category != "moved" or row.kind != "module":
            return None
        new = f"{new}.{alias.name}"
    local = alias.asname or alias.name
    if row.kind == "class" and _is_built_upon(module, alias, local):
        return None
    if row.kind == "module" and exact and not _all_go_along(module, row, _asked(module, local)):
        return None
    last = new.rpartition(".")[2]
    if alias.asname or last == alias.name:
        return Edit("import-name", row.safety, new)
    if not _may_be_renamed(module, alias, local, last):
        return Edit("import-name", row.safety, f"{new} as {local}")
    uses = tuple((span.line, span.column) for span in map(module.span, module.names.uses(alias, local)))
    return Edit("import-name", row.safety, new, uses)


def _is_built_upon(module: Module, alias: ast.alias, local: str) -> bool:
    """Whether a class is subclassed or patched here.

    Then its new name alone would make things worse: what was overridden or replaced belongs to another class
    today, so nothing would fail and nothing would be called.
    """
    for use in module.names.uses(alias, local):
        parent, field = module.tree.parents[use]
        if isinstance(parent, ast.ClassDef) and field == "bases":
            return True
        if isinstance(parent, ast.Attribute) and not isinstance(parent.ctx, ast.Load):
            return True
        patched = isinstance(parent, ast.Call) and field == "args" and parent.args[0] is use
        if patched and dotted(parent.func).rpartition(".")[2] in PATCHERS:  # type: ignore[attr-defined]
            return True
    return False


def _may_be_renamed(module: Module, alias: ast.alias, local: str, new: str) -> bool:
    """Whether all uses of a name can follow its import, and the new name is free."""
    if not module.names.bound_once(alias, local) or any(
        new in scope for scope in module.names.scopes.values()
    ):
        return False
    if re.search(rf"\b{local}\b", module.hidden):
        return False
    texts = (node.value for node in module.tree.of(ast.Constant))
    return not any(isinstance(text, str) and _spells(text, local) for text in texts)


def _spells(text: str, local: str) -> bool:
    """Whether a string names a local name: an entry of __all__, an annotation."""
    return bool(re.fullmatch(r"[\w\[\]., |]+", text)) and bool(re.search(rf"(?<![\w.]){local}\b", text))


def _module_edit(module: Module, alias: ast.alias, row: Removal) -> Edit | None:
    """`import old`, if everything that is asked of it is where the new module has it."""
    new = row.sglang_replacement
    if not new or row.kind != "module" or row.safety == "manual":
        return None
    uses = _asked(module, alias.asname) if alias.asname else _asked_in_full(module, alias.name)
    if not _all_go_along(module, row, uses):
        return None
    chains = uses if uses and not alias.asname else []
    places = tuple((span.line, span.column) for span in map(module.span, chains))
    return Edit("import-module", row.safety, new, places)


def _asked(module: Module, local: str) -> list[ast.Attribute] | None:
    """The expressions `local.name`; None if the name is also used for something else, or rebound."""
    found = []
    for node in module.tree.of(ast.Name):
        if node.id == local:
            parent = module.tree.parent(node)
            if not isinstance(parent, ast.Attribute):
                return None
            found.append(parent)
    return found


def _asked_in_full(module: Module, path: str) -> list[ast.Attribute]:
    """The expressions `sglang.srt...module.name`."""
    return [node for node in module.tree.of(ast.Attribute) if dotted(node.value) == path]


def _all_go_along(module: Module, row: Removal, asked: list[ast.Attribute] | None) -> bool:
    return asked is not None and all(_goes_along(module, node, row.old_path, row) for node in asked)


def _goes_along(module: Module, node: ast.Attribute, old: str, row: Removal) -> bool:
    """Whether `old.name` is to be had from the module that replaces `old`."""
    own = module.rules.paths.get(f"{old}.{node.attr}")
    if own is None:
        return row.category == "moved"
    new = own.sglang_replacement
    if own.safety == "manual" or not new or not isinstance(node.ctx, ast.Load):
        return False
    return new.rpartition(".")[0] == row.sglang_replacement
