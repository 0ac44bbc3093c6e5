"""`list_replacements()`: the table, to look at, to search, to take apart."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, overload

from legacy_compat.registry import Removal, load

TOPICS = {
    "1": "Workers",
    "2": "Data classes",
    "3": "Scheduler, batches, requests, algorithm",
    "4": "Forward modes and graph runners",
    "5": "Helper functions, and modules that moved",
    "6": "Environment variables and flags",
    "7": "Behaviours that changed, and older renames",
    "8": "DFLASH, frozen-KV MTP, NGRAM; V2 workers since 0.5.14",
}
"""What the first digit of a code stands for."""

BREAKABLE = re.compile(
    r"(?<=[._(])|(?<=[a-z])(?=[A-Z])"
)  # places where a long path may go on in the next line
COLUMNS = {"Code": 6, "Gone, and since which SGLang": 31, "Instead": 31, "Fix": 7, "What changes": 25}
"""Title and share of the width in percent."""

SHOWN_AS_TEXT = 20  # rows that fit on a screen


def list_replacements(search: str = "", *, sglang_version: str | None = None) -> Replacements:
    """What V1's removal took away, and what to use instead.

    `search` keeps rows in which it occurs, in any case: a name, a code, a kind such as "env", any word.
    `sglang_version` keeps those that concern code for that release, such as "0.5.13".
    Raises ValueError for what is not a release.
    """
    rows: Sequence[Removal] = load()
    if sglang_version is not None:
        rows = [row for row in rows if row.concerns(sglang_version)]
    word = search.casefold()
    return Replacements(row for row in rows if word in _words(row))


def _words(row: Removal) -> str:
    parts = (row.code, row.kind, *row.paths, row.sglang_replacement, row.spec_v2_replacement, row.changes)
    return " ".join(part for part in parts if part).casefold()


class Replacements(Sequence[Removal]):
    """Rows of the table, a sequence that draws itself."""

    def __init__(self, rows: Any) -> None:
        self._rows: tuple[Removal, ...] = tuple(rows)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Removal: ...
    @overload
    def __getitem__(self, index: slice) -> Replacements: ...
    def __getitem__(self, index: int | slice) -> Removal | Replacements:
        return Replacements(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __iter__(self) -> Iterator[Removal]:
        return iter(self._rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Replacements) and self._rows == other._rows

    def __hash__(self) -> int:
        return hash(self._rows)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Plain dictionaries, for a data frame or a file."""
        return [dataclasses.asdict(row) for row in self]

    def to_json(self, indent: int | None = 2) -> str:
        """The rows as a JSON array of objects."""
        return json.dumps(self.to_dicts(), indent=indent)

    def __repr__(self) -> str:
        lines = [f"{row.code}  {row.old_path}\n       {_arrow(row)}" for row in self[:SHOWN_AS_TEXT]]
        rest = len(self) - len(lines)
        if rest > 0:
            lines.append(f"... and {rest} more: list_replacements('a word') searches, [n] takes one")
        return "\n".join(lines) or "no removal matches"

    def _repr_html_(self) -> str:
        """A table that reads the same without styles; the box only spares a notebook its length."""
        if not self:
            return "<p>No removal matches.</p>"
        return (
            '<div style="max-height: 32em; overflow: auto">'
            f'<table style="width: 100%; table-layout: fixed"><caption>'
            f"{len(self)} of {len(load())} removals. Fix: <b>safe</b> can be rewritten by"
            " <code>python -m legacy_compat fix</code>; <b>unsafe</b> too, to be reviewed; <b>manual</b> is"
            " yours.</caption>"
            f"<thead><tr>{''.join(_header(title, width) for title, width in COLUMNS.items())}</tr></thead>"
            f"{''.join(self._topics())}</table></div>"
        )

    def _topics(self) -> Iterator[str]:
        for digit, topic in TOPICS.items():
            rows = [row for row in self if row.code[2] == digit]
            if rows:
                heading = f'<tr><th colspan="5" style="text-align: left">{topic}</th></tr>'
                yield f"<tbody>{heading}{''.join(map(_html_row, rows))}</tbody>"


def _arrow(row: Removal) -> str:
    return f"→ {row.sglang_replacement or 'nothing'}  ({row.kind}, gone in {row.removed_in}, {row.safety})"


def _header(title: str, width: int) -> str:
    return f'<th style="width: {width}%; text-align: left">{title}</th>'


def _html_row(row: Removal) -> str:
    gone = html.escape(row.old_path) if row.kind == "behaviour" else _path(row.old_path)
    cells = (
        row.code,
        f"{gone}<br>{row.kind}, {row.removed_in}",
        f"SGLang: {_path(row.sglang_replacement)}<br>spec_v2: {_path(row.spec_v2_replacement)}",
        row.safety,
        html.escape(row.changes),
    )
    left = ' style="text-align: left; vertical-align: top"'
    return f"<tr>{''.join(f'<td{left}>{cell}</td>' for cell in cells)}</tr>"


def _path(path: str | None) -> str:
    """A path as code that may be broken within; a dash for nothing."""
    if path is None:
        return "–"
    return f"<code>{BREAKABLE.sub('<wbr>', html.escape(path))}</code>"
