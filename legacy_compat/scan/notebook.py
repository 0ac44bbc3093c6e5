"""Jupyter notebooks: their cells as Python and shell, and a way back into the very same file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from legacy_compat.scan.python import parse

SPACE = re.compile(r"[ \t\r\n]*")
SCALAR = re.compile(r"-?\d[\d.eE+-]*|true|false|null|NaN|-?Infinity")
MAGIC = re.compile(r"^[ \t]*(?:%|!|\?|(?P<name>\w+)\s*=\s*(?:!|%)(?!=))|^[ \t]*[\w.]+\?{1,2}[ \t]*$")
SHELL_CELL = re.compile(r"^%%(?:bash|sh|zsh|script\s+(?:bash|sh))\b|^!!")
OTHER_CELL = re.compile(r"^%%(?!time|timeit|capture|prun|writefile\s+\S+\.py)")
MARK = "# \ue000cell"  # begins the line before each cell in the text of all cells: a character of private use


@dataclass(slots=True)
class Node:
    """A JSON value and where it stands."""

    start: int
    end: int
    value: Any  # a scalar, a list of Nodes, or a dict of Nodes


def read(text: str, position: int = 0) -> Node:
    """A JSON text with places. Raises ValueError if it isn't JSON."""
    start = _skip(text, position)
    char = text[start : start + 1]
    if char == '"':
        value, end = scanstring(text, start + 1, True)
        return Node(start, end, value)
    if char in ("{", "["):
        return _container(text, start, char)
    found = SCALAR.match(text, start)
    if not found:
        raise ValueError(f"not JSON at offset {start}")
    return Node(start, found.end(), json.loads(found[0]))


def _skip(text: str, position: int) -> int:
    found = SPACE.match(text, position)
    return found.end() if found else position


def _container(text: str, start: int, char: str) -> Node:
    items: Any = {} if char == "{" else []
    closing = "}" if char == "{" else "]"
    at = _skip(text, start + 1)
    if text[at : at + 1] == closing:
        return Node(start, at + 1, items)
    while True:
        if char == "{":
            key = read(text, at)
            at = _skip(text, key.end)
            if text[at : at + 1] != ":" or not isinstance(key.value, str):
                raise ValueError(f"not JSON at offset {at}")
            node = read(text, at + 1)
            items[key.value] = node
        else:
            node = read(text, at)
            items.append(node)
        at = _skip(text, node.end)
        if text[at : at + 1] == closing:
            return Node(start, at + 1, items)
        if text[at : at + 1] != ",":
            raise ValueError(f"not JSON at offset {at}")
        at = _skip(text, at + 1)


@dataclass(slots=True)
class Cell:
    """One cell. `number` counts all cells from 1."""

    number: int
    kind: str  # "code" or "markdown"
    source: Node
    text: str
    shell: str = ""  # its shell lines, all others blank
    broken: bool = False  # neither Python nor Python with magics


def cells_of(text: str) -> list[Cell]:
    """The cells of a notebook. Raises ValueError for what isn't one."""
    try:
        top = read(text)
        held = top.value["cells"].value
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"not a notebook: {type(error).__name__}: {error}") from None
    cells = []
    if not isinstance(held, list) or not all(isinstance(node.value, dict) for node in held):
        raise ValueError("not a notebook: its cells are no list of objects")
    for number, node in enumerate(held, start=1):
        kind = node.value["cell_type"].value if "cell_type" in node.value else "raw"
        source = node.value.get("source")
        if source is not None and kind in ("code", "markdown"):
            parts = source.value if isinstance(source.value, list) else [source]
            joined = "".join(str(part.value) for part in parts)
            cells.append(Cell(number, kind, source, joined))
    return cells


def put_back(text: str, changed: list[tuple[Cell, str]]) -> str:
    """The notebook with new sources. Outputs, metadata, key order and indents are not touched."""
    for cell, new in sorted(changed, key=lambda item: -item[0].source.start):
        node = cell.source
        if isinstance(node.value, list):
            lines = [part for part in re.split(r"(?<=\n)", new) if part]
            first = re.match(r"\[(\s*)", text[node.start : node.end])
            last = re.search(r"(\s*)\]$", text[node.start : node.end])
            gap, end = (first[1] if first else ""), (last[1] if last else "")
            ascii_only = text[node.start : node.end].isascii()
            shown = f",{gap or ' '}".join(json.dumps(line, ensure_ascii=ascii_only) for line in lines)
            text = text[: node.start] + (f"[{gap}{shown}{end}]" if lines else "[]") + text[node.end :]
        else:
            ascii_only = text[node.start : node.end].isascii()
            text = text[: node.start] + json.dumps(new, ensure_ascii=ascii_only) + text[node.end :]
    return text


# --- magics ---


def as_python(cell: Cell) -> tuple[str, dict[str, str]]:
    """A cell as plain Python: magic lines stand as `pass` with a mark; the marks, and the lines they stand for.

    Sets `cell.shell` to its shell lines. A cell in another language, or one that does not parse, is all marks.
    """
    lines = cell.text.split("\n")
    if SHELL_CELL.match(cell.text):
        cell.shell = "\n".join(["", *lines[1:]])
        return _masked(cell, lines, range(len(lines)))
    if OTHER_CELL.match(cell.text):
        return _masked(cell, lines, range(len(lines)))
    if _parses(cell.text):  # a `%` may begin a line of plain Python too
        return cell.text, {}
    magic = _magic_lines(lines)
    cell.shell = "\n".join(_as_shell(line) if place in magic else "" for place, line in enumerate(lines))
    text, kept = _masked(cell, lines, magic)
    if _parses(text):
        return text, kept
    cell.broken = True
    return _masked(cell, lines, range(len(lines)))


def _parses(text: str) -> bool:
    try:
        parse(text)
    except SyntaxError:
        return False
    return True


def _magic_lines(lines: list[str]) -> list[int]:
    found: list[int] = []
    for place, line in enumerate(lines):
        continued = bool(found) and found[-1] == place - 1 and lines[place - 1].endswith("\\")
        if continued or MAGIC.match(line):
            found.append(place)
    return found


def _as_shell(line: str) -> str:
    """The command of `!command` or `%env NAME=value`, at its own columns."""
    return re.sub(r"^(\s*)(%(?:set_)?env\b|!{1,2}|%)", lambda found: found[1] + " " * len(found[2]), line)


def _masked(cell: Cell, lines: list[str], places: Iterable[int]) -> tuple[str, dict[str, str]]:
    """Lines replaced by `pass`, or by `name = None` for `name = !command`."""
    hidden = set(places)
    kept: dict[str, str] = {}
    indent = ""
    for place in sorted(hidden):
        if place - 1 not in hidden:
            indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
        found = MAGIC.match(lines[place])
        name = found["name"] if found else None
        mark = f"# \ue000{cell.number}.{place}\ue000"
        kept[mark] = lines[place]
        lines[place] = f"{indent}{name} = None  {mark}" if name else f"{indent}pass  {mark}"
    if len(hidden) == len(lines):  # no indent to fit into
        lines = [line.lstrip() for line in lines]
    return "\n".join(lines), kept


def hidden(masked: Iterable[tuple[str, dict[str, str]]]) -> str:
    """All lines that marks stand for."""
    return "\n".join(line for _, kept in masked for line in kept.values())


def unmask(text: str, kept: dict[str, str]) -> str:
    """The lines that marks stand for, back in their places."""
    if not kept:
        return text
    return "\n".join(
        next((original for mark, original in kept.items() if mark in line), line) for line in text.split("\n")
    )


def join_cells(cells: list[Cell], texts: list[str]) -> str:
    """All cells as one source, each after a line that marks it: what one cell imports, the next one uses."""
    return "\n".join(f"{MARK} {cell.number}\n{text}" for cell, text in zip(cells, texts, strict=True))


def split_cells(text: str) -> list[str]:
    """The texts that `join_cells` joined, also after a change."""
    parts = re.split(rf"^{re.escape(MARK)} \d+\n", text, flags=re.MULTILINE)[1:]
    return [part.removesuffix("\n") if place < len(parts) - 1 else part for place, part in enumerate(parts)]
