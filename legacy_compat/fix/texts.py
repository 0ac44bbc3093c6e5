"""One text of any language, fixed: scan, make the edits that are allowed, and again until nothing is left to do."""

from __future__ import annotations

import importlib.util
import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field

from legacy_compat.scan import notebook
from legacy_compat.scan.files import Language
from legacy_compat.scan.finding import Edit, Finding
from legacy_compat.scan.parts import code_blocks
from legacy_compat.scan.plain import scan_plain
from legacy_compat.scan.python import parse
from legacy_compat.scan.rules import Rules
from legacy_compat.scan.run import Options, scan_source
from legacy_compat.scan.suppress import Suppressions

ROUNDS = 10  # of edits that make room for others


class Refused(Exception):
    """A file was left as it is, with the reason."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """Which edits may be made."""

    unsafe: bool = False
    drop_legacy: bool = False
    select: frozenset[str] = frozenset()  # codes; empty: all

    def __call__(self, found: Finding) -> bool:
        edit = found.edit
        if edit is None or (self.select and found.code not in self.select):
            return False
        if edit.kind == "drop-fallback":
            return self.drop_legacy
        if found.severity == "info":  # nothing has to be done
            return False
        return edit.safety == "safe" or self.unsafe


@dataclass(slots=True)
class Fixer:
    """Fixes texts by one set of rules, and keeps count of what it did."""

    rules: Rules
    options: Options
    allowed: Allowed
    made: list[Finding] = field(default_factory=list)

    def fix(self, path: str, text: str, language: Language) -> str:
        """The text with all allowed edits. Raises Refused if an edit would break it, ImportError without libcst."""
        if language == "python":
            return self._python(path, text)
        if language == "markdown":
            return self._markdown(path, text)
        if language == "notebook":
            return self._notebook(path, text)
        return self._plain(path, text, language)

    # --- rounds ---

    def _rounds(
        self, text: str, look: Callable[[str], list[Finding]], change: Callable[[str, list[Finding]], str]
    ) -> str:
        for _ in range(ROUNDS):
            silent = Suppressions(text)
            found = [
                one
                for one in look(text)
                if self.allowed(one) and not silent.cover(one.span.line, one.span.end_line, one.code)
            ]
            if not found:
                return text
            new = change(text, found)
            if new == text:
                return text
            text = new
        raise Refused("its edits did not come to an end")

    # --- Python ---

    def _python(self, path: str, text: str, hidden: str = "") -> str:
        def look(source: str) -> list[Finding]:
            try:
                return scan_source(path, source, self.rules, self.options, hidden)
            except SyntaxError as error:
                raise Refused(f"it does not parse: {error.msg}") from None

        return self._rounds(text, look, self._change_python)

    def _change_python(self, text: str, found: list[Finding]) -> str:
        code = [one for one in found if one.edit and one.edit.kind != "text"]
        new, made = text, code
        if code:
            from legacy_compat.fix.python import edit_python

            new = edit_python(text, code)
        if new == text:
            new, made = apply_ranges(text, [one for one in found if one not in code])
        try:
            parse(new)
        except SyntaxError as error:
            raise Refused(f"the result would not parse: {error.msg}") from None
        if new != text:
            self.made += made
        return new

    # --- everything else ---

    def _plain(self, path: str, text: str, language: Language) -> str:
        def change(source: str, found: list[Finding]) -> str:
            new, done = apply_ranges(source, found)
            check_well_formed(source, new, language)
            self.made += done
            return new

        return self._rounds(text, lambda source: scan_plain(path, source, language, self.rules), change)

    def _markdown(self, path: str, text: str) -> str:
        for block in reversed(code_blocks(text)):
            try:
                new = self.fix(path, block.text, block.language)
            except Refused:  # a fragment, as blocks of a document often are
                continue
            if new != block.text:
                text = text[: block.start] + block.put_back(new) + text[block.end :]
        return text

    def _notebook(self, path: str, text: str) -> str:
        try:
            cells = notebook.cells_of(text)
        except ValueError as error:
            raise Refused(str(error)) from None
        new = self._code_cells(path, cells)
        changed = [(cell, new[cell.number]) for cell in cells if new.get(cell.number, cell.text) != cell.text]
        if not changed:
            return text
        text = notebook.put_back(text, changed)
        json.loads(text)
        return text

    def _code_cells(self, path: str, cells: list[notebook.Cell]) -> dict[int, str]:
        """New texts by number of the cell. What one cell imports, another uses: all code is one source."""
        code = [cell for cell in cells if cell.kind == "code"]
        masked = [notebook.as_python(cell) for cell in code]
        joined = notebook.join_cells(code, [text for text, _ in masked])
        parts = notebook.split_cells(self._python(path, joined, notebook.hidden(masked))) if code else []
        new: dict[int, str] = {}
        for cell, part, (_, kept) in zip(code, parts, masked, strict=True):
            new[cell.number] = self._magics(path, cell, notebook.unmask(part, kept))
        for cell in cells:
            if cell.kind == "markdown":
                new[cell.number] = self._markdown(path, cell.text)
        return new

    def _magics(self, path: str, cell: notebook.Cell, text: str) -> str:
        """The shell lines of a cell: each that the shell's fixer changed or dropped."""
        if not cell.shell.strip():
            return text
        old = cell.text.split("\n")
        shell = cell.shell.split("\n")
        lines = text.split("\n")
        for before, line in zip(old, shell, strict=True):
            if line.strip() and before in lines:
                new = self._plain(path, line, "shell")
                at = lines.index(before)
                if not new.strip():
                    del lines[at]
                elif new != line:
                    lead = before[: len(line) - len(line.lstrip())]
                    lines[at] = lead + new.lstrip()
        return "\n".join(lines)


def apply_ranges(text: str, findings: list[Finding]) -> tuple[str, list[Finding]]:
    """Makes the edits of kind "text" that don't overlap; the others wait for the next round."""
    made: list[Finding] = []
    ranges: list[tuple[int, int, str]] = []
    for found in findings:
        edit = found.edit or Edit("text", "manual")
        if all(_apart(new, old) for new in edit.ranges for old in ranges):
            ranges += edit.ranges
            made.append(found)
    for start, end, new in sorted(ranges, reverse=True):
        text = text[:start] + new + text[end:]
    return text, made


def _apart(one: tuple[int, int, str], other: tuple[int, int, str]) -> bool:
    return one[1] <= other[0] or other[1] <= one[0]


def check_well_formed(before: str, after: str, language: Language) -> None:
    """Raises Refused if a file that its format's parser took is no longer one."""
    parsers: dict[str, Callable[[str], object]] = {"json": json.loads, "toml": tomllib.loads}
    if importlib.util.find_spec("yaml"):
        import yaml  # type: ignore[import-untyped, unused-ignore]

        parsers["yaml"] = lambda text: [*yaml.safe_load_all(text)]
    load = parsers.get(language)
    if load is None:
        return
    try:
        load(before)
    except Exception:  # noqa: BLE001 - templates, comments in JSON, tags: nothing to compare with
        return
    try:
        load(after)
    except Exception as error:  # noqa: BLE001 - each parser has its own
        raise Refused(f"the result would not be valid {language}: {error}") from None
