"""Strings that name something removed: targets of mock.patch, dynamic imports, tables, paths, commands."""

from __future__ import annotations

import ast
import re

from legacy_compat.registry import Removal, Severity
from legacy_compat.scan.finding import Edit, Span
from legacy_compat.scan.mentions import Mention, mentions
from legacy_compat.scan.python.module import Module
from legacy_compat.scan.python.tree import Function, dotted
from legacy_compat.scan.python.values import HOLE, Text, strings
from legacy_compat.scan.rules import ROOT, new_path

DECLARES = ("add_argument", "option", "Option")  # a program's own option
PUT_TOGETHER = (ast.JoinedStr, ast.BinOp, ast.Call)
IMPORT_IN_TEXT = re.compile(r"^\s*(?:from|import)\s", re.MULTILINE)


def find_strings(module: Module) -> None:
    for literal in module.tree.of(ast.Constant):
        if isinstance(literal.value, str) and not isinstance(module.tree.parent(literal), ast.JoinedStr):
            _literal(module, literal, literal.value)
    for node in module.tree.of(*PUT_TOGETHER):
        if not _is_part_of_larger(module, node):
            _put_together(module, node)
    for comparison in module.tree.of(ast.Compare):
        _compare(module, comparison)


def is_docstring(module: Module, node: ast.AST) -> bool:
    """Any string that is a statement of its own, which people use as a comment too."""
    return isinstance(module.tree.parent(node), ast.Expr)


# --- one literal ---


def _literal(module: Module, node: ast.Constant, value: str) -> None:
    for found in mentions(value, module.rules):
        if found.kind in ("path", "file"):
            _mention(module, node, value, found)
        elif found.kind == "flag":
            _flag(module, node, value, found)


def _mention(module: Module, node: ast.Constant, value: str, found: Mention) -> None:
    span, exact = _place(module, node, value, found)
    shape = "path" if found.kind == "file" else "string"
    if is_docstring(module, node):
        module.emit(node, found.row, "docs", found.name, span=span, severity="info")
    elif value.strip() == value and not re.search(r"\s", value):
        edit = _target_edit(module, span, found) if exact else None
        row, name = found.row, found.name + found.rest
        module.emit(node, row, shape, name, span=span, edit=edit, note=_as_probe(module, node))
    elif IMPORT_IN_TEXT.search(value):
        module.emit(
            node, found.row, shape, found.name, span=span, severity="warning", note="code in a string"
        )
    else:
        module.emit(node, found.row, "docs", found.name, span=span, severity="info")


def _target_edit(module: Module, span: Span, found: Mention) -> Edit | None:
    """The new spelling of a dotted target, where what follows the removed part is known to follow the new one."""
    new = new_path(found.row)
    if found.kind != "path" or found.row.kind == "env" or not new or found.row.safety == "manual":
        return None
    if found.row.kind == "module" and found.row.category != "moved":
        return None  # what is asked of the module goes by the old names, wherever that is
    if found.rest and found.row.kind not in ("class", "method") and found.row.category != "moved":
        return None
    return _replacing(module, span, found.row, new)


def _replacing(module: Module, span: Span, row: Removal, new: str) -> Edit:
    start = module.places.offset(span.line, span.column)
    end = module.places.offset(span.end_line, span.end_column)
    return Edit("text", row.safety, new, ranges=((start, end, new),))


def _as_probe(module: Module, node: ast.AST) -> str:
    """importorskip and find_spec answer quietly that a module is gone."""
    call = module.tree.parent(node)
    if isinstance(call, ast.Call):
        name = dotted(call.func).rpartition(".")[2]
        if name == "importorskip":
            return "these tests are now skipped, and nothing fails"
        if name in ("find_spec", "find_loader") or (name == "get" and "modules" in dotted(call.func)):
            return "the question's answer is now always no, and nothing fails"
    return ""


def _place(module: Module, node: ast.Constant, value: str, found: Mention) -> tuple[Span, bool]:
    """Where a mention stands in the source, and whether it is spelled there once, letter by letter."""
    whole = module.span(node)
    start = module.places.offset(whole.line, whole.column)
    end = module.places.offset(whole.end_line, whole.end_column)
    text = value[found.start : found.end]
    source = module.text[start:end]
    if source.count(text) != 1:
        nth = value[: found.start].count(text)
        parts = source.split(text)
        if len(parts) <= nth + 1 or len(parts) - 1 != value.count(text):
            return whole, False
        at = sum(len(part) for part in parts[: nth + 1]) + nth * len(text)
    else:
        at = source.index(text)
    return module.places.span(start + at, start + at + len(text)), True


def _flag(module: Module, node: ast.Constant, value: str, found: Mention) -> None:
    if found.row.severity == "info":
        return
    span, exact = _place(module, node, value, found)
    if is_docstring(module, node):
        module.emit(node, found.row, "docs", found.name, span=span, severity="info")
        return
    call = module.tree.parent(node)
    if isinstance(call, ast.Call) and dotted(call.func).rpartition(".")[2] in DECLARES:
        note = "an option of this program's own, unless it passes it on"
        module.emit(node, found.row, "flag", found.name, span=span, severity="info", note=note)
        return
    severity: Severity | None = None if module.mentions_sglang else "info"
    edit = _flag_edit(module, node, value, found, span) if exact and module.mentions_sglang else None
    module.emit(node, found.row, "flag", found.name, span=span, severity=severity, edit=edit)


def _flag_edit(module: Module, node: ast.Constant, value: str, found: Mention, span: Span) -> Edit | None:
    row = found.row
    if row.safety == "manual":
        return None
    if (row.sglang_replacement or "").startswith("-"):
        return _replacing(module, span, row, row.sglang_replacement or "")
    alone = value == found.name and isinstance(module.tree.parent(node), ast.List)
    if not alone or row.sglang_replacement:
        return None
    place = module.span(node)
    return Edit("drop-element", row.safety, uses=((place.line, place.column),))


# --- put together from parts ---


def _is_part_of_larger(module: Module, node: ast.AST) -> bool:
    parent = module.tree.parent(node)
    return isinstance(parent, (ast.BinOp, ast.FormattedValue, ast.JoinedStr)) or (
        isinstance(parent, ast.Attribute) and isinstance(module.tree.parent(parent), ast.Call)
    )


def _put_together(module: Module, node: ast.AST) -> None:
    if segments := _path_segments(module, node):
        _file(module, node, segments)
        return
    if isinstance(node, ast.Call) and not isinstance(node.func, ast.Attribute):
        return
    for text in strings(module.names, node):
        if text.complete:
            _whole_path(module, text, node)
        elif re.match(rf"{ROOT}(\.\w+)+\.{HOLE}", text.value) and _may_hold_removed(module, text.value):
            message = (
                f"the module path {text.value.replace(HOLE, '{...}')} is only known when the program runs"
            )
            module.say(node, "SV903", "info", message)


def _whole_path(module: Module, text: Text, node: ast.AST) -> None:
    for found in mentions(text.value, module.rules):
        if found.kind == "path" and found.start == 0:
            place = text.node if hasattr(text.node, "lineno") else node
            module.emit(place, found.row, "string", found.name + found.rest, span=module.span(place))


def _may_hold_removed(module: Module, text: str) -> bool:
    known = text.partition(HOLE)[0]
    return any(path.startswith(known) for path in module.rules.modules)


def _path_segments(module: Module, node: ast.AST) -> list[tuple[str, ast.AST]]:
    """`root / "srt" / "speculative" / "eagle_worker.py"` and os.path.join(...) as (segment, literal)."""
    parts: list[ast.AST] = []
    if isinstance(node, ast.BinOp):
        while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            parts.insert(0, node.right)
            node = node.left
        parts.insert(0, node)
    elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in ("join", "joinpath", "Path"):
        owner = (
            node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr == "joinpath" else None
        )
        parts = [*filter(None, [owner]), *node.args]
    if len(parts) < 2:
        return []
    return [
        (text.value, part) for part in parts for text in (strings(module.names, part) or [Text(HOLE, part)])
    ]


def _file(module: Module, node: ast.AST, segments: list[tuple[str, ast.AST]]) -> None:
    joined = "/".join(value for value, _ in segments)
    for found in mentions(joined, module.rules):
        if found.kind == "file":
            module.emit(node, found.row, "path", found.row.old_path, span=module.span(segments[-1][1]))
            return
    last, place = segments[-1]
    names = {path.rpartition(".")[2] + ".py": row for path, row in module.rules.modules.items()}
    if module.mentions_sglang and (row := names.get(last.rpartition("/")[2])):
        note = "if the folder is SGLang's"
        module.emit(node, row, "path", row.old_path, span=module.span(place), severity="warning", note=note)


# --- type(x).__name__ == "Name" ---


def _compare(module: Module, node: ast.Compare) -> None:
    sides = [node.left, *node.comparators]
    if not any(
        isinstance(side, ast.Attribute) and side.attr in ("__name__", "__qualname__") for side in sides
    ):
        return
    for side in sides:
        for literal in side.elts if isinstance(side, (ast.Tuple, ast.List, ast.Set)) else [side]:
            row = _class_named(module, literal)
            if row:
                severity: Severity | None = None if module.mentions_sglang else "info"
                module.emit(literal, row, "name", row.name, severity=severity)


def _class_named(module: Module, literal: ast.AST) -> Removal | None:
    if not isinstance(literal, ast.Constant) or not isinstance(literal.value, str):
        return None
    row = module.rules.classes.get(literal.value)
    if row is None:
        return None
    bound = module.names.bindings(literal.value, literal)
    own = any(item.how == "class" or (item.how == "import" and item.path not in row.paths) for item in bound)
    return None if own else row


def find_annotations(module: Module) -> None:
    """`"EAGLEWorker"` as an annotation, where nothing imports the name."""
    noted = [node.annotation for node in module.tree.of(ast.arg, ast.AnnAssign)]  # type: ignore[attr-defined]
    noted += [node.returns for node in module.tree.of(*Function)]  # type: ignore[attr-defined]
    for annotation in filter(None, noted):
        row = _class_named(module, annotation)
        if row and module.mentions_sglang and not module.names.bindings(row.name, annotation):
            module.emit(annotation, row, "name", row.name, severity="warning", note="an annotation")
