"""One Python file under examination: its tree, its names, and the findings so far."""

from __future__ import annotations

import ast
import os
import re
from dataclasses import replace
from pathlib import Path

from legacy_compat.registry import Removal, Severity
from legacy_compat.scan.finding import SEVERITIES, Edit, Finding, Span
from legacy_compat.scan.python.guards import guard_of
from legacy_compat.scan.python.names import Local, Meaning, Names, Ref
from legacy_compat.scan.python.resolve import Resolver
from legacy_compat.scan.python.siblings import Siblings
from legacy_compat.scan.python.tree import Collection, Tree
from legacy_compat.scan.rules import ROOT, Rules
from legacy_compat.scan.text import Places
from legacy_compat.scan.wording import sentence


class Module:
    """Everything that the finders of `legacy_compat.scan.python` ask and tell."""

    def __init__(self, path: str, text: str, root: ast.Module, rules: Rules, where: str) -> None:
        self.path, self.text, self.rules = path, text, rules
        self.where = where  # the file's own module path if it lies in SGLang's package, else empty
        package = where if Path(path).name == "__init__.py" else where.rpartition(".")[0]
        self.places = Places(text)
        self.tree = Tree(root)
        self.names = Names(self.tree, package, rules.paths.__contains__)
        self.resolve = Resolver(self.names)
        self.mentions_sglang = bool(where) or bool(re.search(rf"\b{ROOT}\b", text, re.IGNORECASE))
        self.hidden = ""  # code outside the source that uses its names
        self.strict_results = False  # also report fields of results
        self.moved: set[str] = set()  # modules whose import `fix` can rewrite, and all that is asked of them
        self.findings: dict[tuple[Span, str], Finding] = {}
        own = rules.nearest(where) if where else None
        self.own_row = own[1] if own and own[0] == where else None  # this file is a removed module itself

    # --- asking ---

    def owners(self, node: ast.AST, member: str) -> list[Ref]:
        """The classes and modules of SGLang that `node.member` is asked of; not where the file defines it."""
        found: list[Ref] = []
        for meaning in self.resolve(node):
            found += self.origins(meaning, member)
        return [owner for owner in found if owner.path.partition(".")[0] == ROOT]

    def origins(self, meaning: Meaning, member: str = "") -> list[Ref]:
        """A class of the file gives way to its imported bases, unless it defines the member itself."""
        if isinstance(meaning, Ref):
            return [meaning]
        if member and self.names.own_attribute(meaning.node, member) is not None:
            return []
        bases = self.resolve.bases(meaning.node)
        inner = [one for base in bases for one in self.origins(base, member)]
        return [Ref(one.path, meaning.instance) for one in inner]

    def is_defined_here(self, node: ast.AST, member: str) -> bool:
        """Whether some class of the file that `node` may be an object of defines a member."""
        return any(
            isinstance(meaning, Local) and self.names.own_attribute(meaning.node, member) is not None
            for meaning in self.resolve(node)
        )

    def is_foreign(self, node: ast.AST) -> bool:
        """Whether an expression is known to come from somewhere else than SGLang."""
        found = [one.path for meaning in self.resolve(node) for one in self.origins(meaning)]
        return bool(found) and not any(path.partition(".")[0] == ROOT for path in found)

    def spans_versions(self, node: ast.AST, row: Removal) -> bool:
        """Whether a literal stands in a table or a loop that also has the newer name."""
        outermost = None
        for parent, _, _ in self.tree.above(node):
            if isinstance(parent, ast.stmt):
                break
            if isinstance(parent, Collection):
                outermost = parent
        return outermost is not None and Siblings(row, self.rules).in_code([outermost], self.names)

    # --- telling ---

    def span(self, node: ast.AST) -> Span:
        line, end_line = getattr(node, "lineno", 1), getattr(node, "end_lineno", 1)
        return Span(
            line,
            self.places.column_of_bytes(line, getattr(node, "col_offset", 0)),
            end_line,
            self.places.column_of_bytes(end_line, getattr(node, "end_col_offset", 0)),
        )

    def emit(
        self,
        node: ast.AST,
        row: Removal,
        shape: str,
        name: str = "",
        *,
        span: Span | None = None,
        message: str = "",
        severity: Severity | None = None,
        note: str = "",
        edit: Edit | None = None,
    ) -> None:
        """Adds a finding, after looking at what stands around it. The first one at a place stays."""
        place = span or self.span(node)
        if (place, row.code) in self.findings or (self.own_row and row.old_path.startswith(self.where + ".")):
            return
        name = name or row.old_path
        finding = Finding(
            self.path,
            place,
            row.code,
            severity or row.severity,
            shape,
            name,
            message or sentence(row, shape, name),
            row,
            edit,
            note,
            self.places.line(place.line),
        )
        self.findings[place, row.code] = self._guarded(finding, node, row)

    def _guarded(self, finding: Finding, node: ast.AST, row: Removal) -> Finding:
        if self.spans_versions(node, row):
            note = "one entry of a table for several versions"
            return replace(finding, severity="info", note=note, edit=None)
        guard = guard_of(self.tree, self.names, self.rules, node, row)
        match guard.kind:
            case "fallback" | "version":
                keep = guard.keep and guard.attempt is not None and not guard.attempt.orelse
                start = self.span(guard.attempt) if guard.attempt else finding.span
                edit = (
                    Edit("drop-fallback", "unsafe", guard.keep, ((start.line, start.column),))
                    if keep
                    else None
                )
                return replace(finding, severity="info", note=guard.note, edit=edit)
            case "typing":
                lower = min(finding.severity, "warning", key=SEVERITIES.index)
                return replace(finding, severity=lower, note=guard.note, edit=None)
            case "swallowed" if finding.severity != "info":
                return replace(finding, severity="error", note=guard.note, edit=None)
        return finding

    def say(self, node: ast.AST, code: str, severity: Severity, message: str) -> None:
        """Adds one of the scanner's own remarks, SV9..."""
        place = self.span(node)
        line = self.places.line(place.line)
        finding = Finding(self.path, place, code, severity, "remark", "", message, source=line)
        self.findings.setdefault((place, code), finding)


def module_path(path: str, package_root: str | None = None) -> str:
    """A file's own dotted path if it lies in SGLang's package, by the folders above it; else empty."""
    whole = Path(os.path.normpath(Path(path).absolute()))  # not resolve(): a link's own place is what counts
    parts = whole.with_suffix("").parts
    if package_root is not None:
        try:
            parts = whole.with_suffix("").relative_to(os.path.normpath(Path(package_root).absolute())).parts
        except ValueError:
            return ""
        start = 0
    else:
        folders = [place for place, part in enumerate(parts[:-1]) if part == ROOT]
        if not folders:
            return ""
        start = folders[-1]
    inside = parts[start:-1] if parts[-1] == "__init__" else parts[start:]
    return ".".join(inside)
