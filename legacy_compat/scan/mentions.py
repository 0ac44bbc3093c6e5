"""Removed names in text of any kind: dotted paths, paths of files, variables, flags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from legacy_compat.registry import Removal
from legacy_compat.scan.rules import ROOT, Rules

Kind = Literal["path", "file", "env", "flag", "name"]
DOTTED = re.compile(rf"(?<![\w.\-]){ROOT}(?:[.:]\w+)+")


@dataclass(frozen=True, slots=True)
class Mention:
    """One removed name at [start, end) of a text."""

    start: int
    end: int
    kind: Kind
    row: Removal
    name: str  # the removed thing, as the text spells it
    rest: str = ""  # "path": what follows the removed part, with its dot


@dataclass(frozen=True, slots=True)
class Patterns:
    """The regexes of one set of rules."""

    file: re.Pattern[str]
    word: re.Pattern[str]
    files: dict[str, Removal]


@lru_cache(maxsize=8)
def _patterns(rules: Rules) -> Patterns:
    files = {"/".join(path.split(".")[-2:]) + ".py": row for path, row in rules.modules.items()}
    file = "|".join(sorted(map(re.escape, files), key=len, reverse=True)) or r"(?!)"
    names = [*rules.env, *rules.flags, *rules.bare]
    word = "|".join(sorted(map(re.escape, names), key=len, reverse=True)) or r"(?!)"
    return Patterns(
        re.compile(rf"(?P<lead>(?:[\w.$~{{}}@*+-]*/)*)(?P<file>{file})(?!\w)"),
        re.compile(rf"(?<![\w-])(?:{word})(?![\w-])"),
        files,
    )


def mentions(text: str, rules: Rules) -> Iterator[Mention]:
    """All of a text, each place once, in no order."""
    patterns = _patterns(rules)
    taken: list[tuple[int, int]] = []
    for found in DOTTED.finditer(text):
        path = found[0].replace(":", ".")
        if variable := next((name for name in rules.env if name in path.split(".")), None):
            taken.append(found.span())
            yield Mention(*found.span(), "path", rules.descriptors[variable], path)
        elif near := rules.nearest(path):
            end = found.start() + len(near[0])
            taken.append(found.span())
            yield Mention(found.start(), end, "path", near[1], near[0], path[len(near[0]) :])
    for found in patterns.file.finditer(text):
        if _is_ours(found["lead"], patterns.files[found["file"]]):
            yield Mention(*found.span(), "file", patterns.files[found["file"]], found[0])
    for found in patterns.word.finditer(text):
        if any(start <= found.start() < end for start, end in taken):
            continue
        name = found[0]
        row = rules.env.get(name) or rules.flags.get(name) or rules.bare[name]
        kind: Kind = "env" if name in rules.env else "flag" if name in rules.flags else "name"
        yield Mention(*found.span(), kind, row, name)


def _is_ours(lead: str, row: Removal) -> bool:
    """Whether the folders above a file are SGLang's: any project may have a speculative/eagle_worker.py."""
    folders = [part for part in lead.split("/") if part]
    wanted = row.old_path.split(".")[:-2]  # what stands above the last folder: sglang, srt
    if ROOT in folders:
        return folders[len(folders) - folders[::-1].index(ROOT) - 1 :] == wanted
    return folders[-1:] == wanted[-1:] and wanted[-1:] != [ROOT]
