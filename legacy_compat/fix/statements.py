"""Taking out statements, items of a `with`, and the older branch of a `try`, with the comments around them kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst as cst
from libcst.metadata import PositionProvider

from legacy_compat.fix import imports
from legacy_compat.fix.sequences import without

Place = tuple[int, int]  # line and column, both from 1
Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement


class Statements(cst.CSTTransformer):
    """The part of the transformer that deals with whole statements."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.aliases: dict[Place, str] = {}  # new paths of imported names
        self.doomed: set[Place] = set()  # statements
        self.parts: set[Place] = set()  # items of a `with`, entries and elements of a literal
        self.attempts: dict[Place, str] = {}  # which branch of a `try` stays
        self.gone: list[cst.CSTNode] = []

    def place(self, node: cst.CSTNode) -> Place:
        start = self.get_metadata(PositionProvider, node).start
        return start.line, start.column + 1

    # --- one line ---

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        pairs = [*zip(original_node.body, updated_node.body, strict=True)]
        kept = [new for old, new in pairs if self.place(old) not in self.doomed]
        if not kept:
            self.gone.append(updated_node)  # the block around it takes it out
        elif len(kept) < len(pairs):
            kept[-1] = kept[-1].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
            return updated_node.with_changes(body=kept)
        elif len(pairs) == 1 and self.aliases:
            old, new = pairs[0]
            return self._import(updated_node, old, new) if isinstance(old, cst.ImportFrom) else updated_node
        return updated_node

    def _import(self, line: cst.SimpleStatementLine, old: cst.ImportFrom, node: Any) -> Any:
        if isinstance(old.names, cst.ImportStar):
            return line
        pairs = zip(old.names, node.names, strict=True)
        new = {
            alias: self.aliases[place] for was, alias in pairs if (place := self.place(was)) in self.aliases
        }
        return cst.FlattenSentinel(imports.rewrite(line, node, new)) if new else line

    # --- blocks ---

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock) -> Any:
        body, rest = self._without_gone(updated_node.body)
        if body is None:
            return updated_node
        if not body:
            body = [cst.SimpleStatementLine(body=[cst.Pass()], leading_lines=rest)]
            rest = []
        return updated_node.with_changes(body=body, footer=[*rest, *updated_node.footer])

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        body, rest = self._without_gone(updated_node.body)
        if body is None:
            return updated_node
        return updated_node.with_changes(body=body, footer=[*rest, *updated_node.footer])

    def _without_gone(self, body: Sequence[Any]) -> tuple[list[Any] | None, list[cst.EmptyLine]]:
        """(what stays, comments that stood above what went and have no statement to go to)."""
        if not any(part is gone for part in body for gone in self.gone):
            return None, []
        kept: list[Any] = []
        waiting: list[cst.EmptyLine] = []
        for part in body:
            if any(part is gone for gone in self.gone):
                waiting = _together(waiting, part.leading_lines)
            else:
                lines = _together(waiting, part.leading_lines)
                kept.append(part.with_changes(leading_lines=lines) if waiting else part)
                waiting = []
        return kept, waiting

    def leave_SimpleStatementSuite(self, original_node: Any, updated_node: cst.SimpleStatementSuite) -> Any:
        """`if x: old()` keeps its line, with `pass`."""
        pairs = zip(original_node.body, updated_node.body, strict=True)
        kept = [new for old, new in pairs if self.place(old) not in self.doomed]
        if len(kept) == len(updated_node.body):
            return updated_node
        kept = kept or [cst.Pass()]
        kept[-1] = kept[-1].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
        return updated_node.with_changes(body=kept)

    # --- with and try ---

    def leave_With(self, original_node: cst.With, updated_node: cst.With) -> Any:
        pairs = [*zip(original_node.items, updated_node.items, strict=True)]
        doomed = {new for old, new in pairs if self.place(old.item) in self.parts}
        if not doomed:
            return updated_node
        left = without(updated_node.items, doomed.__contains__)
        if left:
            return updated_node.with_changes(items=left)
        return _unwrapped(updated_node, updated_node.body, updated_node)

    def leave_Try(self, original_node: cst.Try, updated_node: cst.Try) -> Any:
        keep = self.attempts.get(self.place(original_node))
        if keep is None or updated_node.orelse or updated_node.finalbody or len(updated_node.handlers) != 1:
            return updated_node
        handler = updated_node.handlers[0]
        if keep == "handler" and handler.name is not None:
            return updated_node  # its code may ask for the exception
        return _unwrapped(updated_node, updated_node.body if keep == "body" else handler.body, updated_node)


def _together(above: Sequence[cst.EmptyLine], below: Sequence[cst.EmptyLine]) -> list[cst.EmptyLine]:
    """Lines of two places that became one. Blank lines do not add up; comments all stay."""
    if any(line.comment for line in above):
        return [*above, *below]
    return (
        [*(above if len(above) > len(below) else below)]
        if not any(line.comment for line in below)
        else [*below]
    )


def _unwrapped(node: Any, body: cst.BaseSuite, unchanged: Any) -> Any:
    """The statements of a block in the place of what it belonged to; unchanged if a comment would be lost."""
    if isinstance(body, cst.SimpleStatementSuite):
        line = cst.SimpleStatementLine(body=body.body, trailing_whitespace=body.trailing_whitespace)
        return cst.FlattenSentinel([line.with_changes(leading_lines=node.leading_lines)])
    if not isinstance(body, cst.IndentedBlock) or any(line.comment for line in body.footer):
        return unchanged
    header = [cst.EmptyLine(comment=body.header.comment)] if body.header.comment else []
    first: Any = body.body[0]
    lines = [*node.leading_lines, *header, *(line for line in first.leading_lines if line.comment)]
    return cst.FlattenSentinel([first.with_changes(leading_lines=lines), *body.body[1:]])
