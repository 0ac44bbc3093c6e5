"""Edits of Python code, by libcst: all that isn't edited stays as it was typed.

The scanner has decided what to do and where; the transformer only finds the places again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from legacy_compat.fix import imports
from legacy_compat.fix.sequences import without, without_in_brackets
from legacy_compat.fix.statements import Place, Statements
from legacy_compat.scan.finding import Finding

Extent = tuple[int, int, int, int]
TIGHT = (
    cst.Attribute, cst.Subscript, cst.Call, cst.Arg, cst.StarredElement, cst.StarredDictElement, cst.Await,
    cst.BinaryOperation, cst.UnaryOperation, cst.Comparison, cst.ComparisonTarget,
)  # fmt: skip


def edit_python(text: str, findings: Iterable[Finding]) -> str:
    """The source with the edits of `findings` made, except those of kind "text"."""
    wrapper = MetadataWrapper(
        cst.parse_module(text), unsafe_skip_copy=True
    )  # just parsed: no node stands twice
    code = wrapper.visit(_Edits(findings)).code
    return code if code.strip() else ""


class _Edits(Statements):
    """All edits of one file, by place."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        super().__init__()
        self.modules: dict[Place, str] = {}
        self.names: dict[Place, str] = {}  # names that follow their import
        self.chains: dict[Place, str] = {}  # where `import old` is used: old.name, by where it begins
        self.old_modules: set[str] = set()
        self.members: dict[Extent, str] = {}
        self.templates: dict[Extent, str] = {}
        self.bare_calls: set[Extent] = set()
        self.arguments: dict[Place, str | None] = {}  # new keyword, None to drop
        self.called: set[cst.Attribute] = set()
        self.negations: list[cst.UnaryOperation] = []
        for found in findings:
            self._plan(found)

    def _plan(self, found: Finding) -> None:
        edit, span = found.edit, found.span
        assert edit is not None
        place: Place = (span.line, span.column)
        extent: Extent = (span.line, span.column, span.end_line, span.end_column)
        match edit.kind:
            case "import-name":
                self.aliases[place] = edit.new
                self.names.update(dict.fromkeys(edit.uses, edit.new.rpartition(".")[2]))
            case "import-module":
                self.modules[place] = edit.new
                self.old_modules.add(found.name)
                self.chains.update(dict.fromkeys(edit.uses, edit.new))
            case "attribute":
                self.members[extent] = edit.new
            case "rewrite":
                if edit.uses:  # a call without its argument: where its function stands
                    extent = (*edit.uses[0], *edit.uses[1])
                    self.bare_calls.add(extent)
                self.templates[extent] = edit.new
            case "drop-argument":
                self.arguments[place] = None
            case "rename-argument":
                self.arguments[place] = edit.new
            case "drop-statement":
                self.doomed.update(edit.uses)
            case "drop-entry" | "drop-element" | "drop-item":
                self.parts.update(edit.uses or [place])
            case "drop-fallback":
                self.attempts.update(dict.fromkeys(edit.uses, edit.new))

    # --- names and members ---

    def _extent(self, node: cst.CSTNode) -> Extent:
        found = self.get_metadata(PositionProvider, node)
        return found.start.line, found.start.column + 1, found.end.line, found.end.column + 1

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        if not self.names:
            return updated_node
        new = self.names.get(self.place(original_node))
        return updated_node.with_changes(value=new) if new else updated_node

    def _is_module(self, node: cst.BaseExpression) -> bool:
        """Whether an expression is one of the modules whose import changes."""
        return cst.Module([]).code_for_node(node) in self.old_modules

    def visit_Call(self, node: cst.Call) -> None:
        if isinstance(node.func, cst.Attribute) and self._extent(node.func) in self.templates:
            self.called.add(node.func)

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        extent = self._extent(original_node)
        value = updated_node.value
        if extent[:2] in self.chains and self._is_module(original_node.value):
            value = imports.dotted(self.chains[extent[:2]])
        if new := self.members.get(extent):
            return updated_node.with_changes(value=value, attr=cst.Name(new))
        updated_node = (
            updated_node.with_changes(value=value) if value is not updated_node.value else updated_node
        )
        if extent in self.templates and original_node not in self.called:
            return self._filled(self.templates[extent], updated_node, updated_node, ())
        return updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        changed = updated_node
        if self.arguments:
            changed = _with_arguments(updated_node, self._arguments(original_node, updated_node))
        if original_node.func in self.called and isinstance(changed.func, cst.Attribute):
            extent = self._extent(original_node.func)
            template = self.templates[extent]
            args = () if extent in self.bare_calls else changed.args
            if not args or "{args}" in template:
                return self._filled(template, changed.func, changed, args)
        return changed

    def _arguments(self, original: cst.Call, updated: cst.Call) -> Sequence[cst.Arg]:
        doomed = set()
        args = []
        for old, new in zip(original.args, updated.args, strict=True):
            place = self.place(old)
            if old.keyword is not None and place in self.arguments:
                keyword = self.arguments[place]
                if keyword is None:
                    doomed.add(new)
                else:
                    new = new.with_changes(keyword=cst.Name(keyword))
            args.append(new)
        return without(args, doomed.__contains__) if doomed else args

    def _filled(
        self, template: str, member: cst.Attribute, whole: cst.BaseExpression, args: Sequence[cst.Arg]
    ) -> cst.BaseExpression:
        """A template with the owner and the arguments as they were typed."""
        empty = cst.Module([])
        plain = [arg.with_changes(comma=cst.MaybeSentinel.DEFAULT) for arg in args]
        text = template.format(
            owner=empty.code_for_node(member.value), args=", ".join(map(empty.code_for_node, plain))
        )
        made = cst.parse_expression(text)
        if isinstance(made, cst.UnaryOperation) and not whole.lpar:
            self.negations.append(made)
        return made.with_changes(lpar=whole.lpar, rpar=whole.rpar) if whole.lpar else made

    def leave_UnaryOperation(
        self, original_node: cst.UnaryOperation, updated_node: cst.UnaryOperation
    ) -> cst.BaseExpression:
        """`not not x` is x."""
        inner = updated_node.expression
        if isinstance(updated_node.operator, cst.Not) and any(inner is made for made in self.negations):
            assert isinstance(inner, cst.UnaryOperation)
            return inner.expression
        return updated_node

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Brackets around a new `not ...` that became an operand of something that binds tighter."""
        made = super().on_leave(original_node, updated_node)
        if not self.negations or not isinstance(made, TIGHT) or (isinstance(made, cst.Arg) and not made.star):
            return made
        changes: dict[str, Any] = {}
        for field in ("left", "right", "expression", "value", "func", "comparator"):
            part: Any = getattr(made, field, None)
            if any(part is negation for negation in self.negations):
                changes[field] = part.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        return made.with_changes(**changes) if changes else made

    # --- imports ---

    def leave_ImportAlias(
        self, original_node: cst.ImportAlias, updated_node: cst.ImportAlias
    ) -> cst.ImportAlias:
        new = self.modules.get(self.place(original_node)) if self.modules else None
        return updated_node.with_changes(name=imports.dotted(new)) if new else updated_node

    # --- literals ---

    def leave_Dict(self, original_node: cst.Dict, updated_node: cst.Dict) -> Any:
        return self._without_parts(original_node, updated_node, "key", "rbrace")

    def leave_List(self, original_node: cst.List, updated_node: cst.List) -> Any:
        return self._without_parts(original_node, updated_node, "value", "rbracket")

    def _without_parts(self, original: Any, updated: Any, field: str, bracket: str) -> Any:
        if not self.parts:
            return updated
        pairs = zip(original.elements, updated.elements, strict=True)
        doomed = {
            new for old, new in pairs if hasattr(old, field) and self.place(getattr(old, field)) in self.parts
        }
        if not doomed:
            return updated
        left, closing = without_in_brackets(updated.elements, getattr(updated, bracket), doomed.__contains__)
        if not left and not isinstance(closing.whitespace_before, cst.SimpleWhitespace):
            closing = closing.with_changes(whitespace_before=cst.SimpleWhitespace(""))
        return updated.with_changes(**{"elements": left, bracket: closing})


def _with_arguments(call: cst.Call, args: Sequence[cst.Arg]) -> cst.Call:
    """Without any left, the brackets close up."""
    if args or not call.args:
        return call.with_changes(args=args)
    return call.with_changes(args=(), whitespace_before_args=cst.SimpleWhitespace(""))
