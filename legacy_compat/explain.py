"""`python -m legacy_compat explain`: all that the table says about a code or a name."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from legacy_compat.registry import Removal, by_code, load, nearest
from legacy_compat.scan.finding import NOTES

SAFETY = {
    "safe": "`fix` does it: mechanical, same behaviour.",
    "unsafe": "`fix --unsafe` does it: mechanical, but look it over.",
    "manual": "By hand.",
}
SHOWN = 12  # rows for a name that several have


@dataclass(frozen=True, slots=True)
class Explanation:
    """What to print, and whether anything was found."""

    text: str
    known: bool


def explain(what: str) -> Explanation:
    """`what` is a code (SV101), a dotted path, or a name alone (EAGLEWorker)."""
    if what.upper() in NOTES:
        short, full = NOTES[what.upper()]
        return Explanation(f"{what.upper()}  {short}\n\n{full}\n", True)
    rows = _rows(what)
    if not rows:
        return Explanation(f"{what!r} is neither a code nor a name of the table.{_near(what)}\n", False)
    texts = [_about(row) for row in rows[:SHOWN]]
    if len(rows) > SHOWN:
        texts.append(f"... and {len(rows) - SHOWN} more: python -m legacy_compat list {what}\n")
    return Explanation("\n".join(texts), True)


def _rows(what: str) -> list[Removal]:
    try:
        return [by_code(what)]
    except KeyError:
        pass
    if "." in what and (row := nearest(what)):
        return [row]
    exact = [row for row in load() if what in row.paths or row.name == what]
    return exact or [row for row in load() if row.name.lower() == what.lower()]


def _near(what: str) -> str:
    words = {word.lower(): word for row in load() for word in (row.code, row.name)}
    words |= {code.lower(): code for code in NOTES}
    close = [words[word] for word in difflib.get_close_matches(what.lower(), words, n=3)]
    return f" Did you mean {', '.join(close)}?" if close else " See `list`."


def _about(row: Removal) -> str:
    lines = [
        f"{row.code}  {row.old_path}",
        "",
        f"  what       {row.kind}, {row.category} in SGLang {row.removed_in} (last in {row.last_version})",
        f"  now        {row.sglang_replacement or 'nothing'}",
    ]
    if row.spec_v2_replacement:
        lines.append(f"  spec_v2    {row.spec_v2_replacement}")
    lines.append(f"  changes    {row.changes}")
    lines.append(f"  to do      {SAFETY[row.safety]}")
    if row.rewrite:
        lines.append(f"  written    {row.rewrite}")
    lines += [f"  also       {alias}" for alias in row.aliases]
    if row.source_pr:
        lines.append(f"  source     sgl-project/sglang {row.source_pr}")
    return "\n".join(lines) + "\n"
