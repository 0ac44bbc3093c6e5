"""Makes `docs/migration.md`: the text of `migration_intro.md`, and one entry for each row of the table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from legacy_compat.errors import explain, what_happened
from legacy_compat.registry import Removal, by_code, load
from legacy_compat.table_view import TOPICS

INTRO = Path(__file__).with_name("migration_intro.md")
PULL = "https://github.com/sgl-project/sglang/pull/"
NOTE = "<!-- Made by `python -m legacy_compat docs --write docs/migration.md`; change the table or the intro. -->"


def render() -> str:
    """The whole page as Markdown."""
    intro = INTRO.read_text(encoding="utf-8")
    intro = intro.replace("{error}", explain(by_code("SV101"))).replace("{count}", str(len(load())))
    return "\n".join([NOTE, "", intro.rstrip("\n"), "", *_contents(), *_entries(), ""])


def write(path: Path) -> bool:
    """Write the page, if it differs from what is there. Returns whether it did."""
    if is_current(path):
        return False
    path.write_text(render(), encoding="utf-8", newline="\n")
    return True


def is_current(path: Path) -> bool:
    """Whether the file says what the table says."""
    return path.exists() and path.read_text(encoding="utf-8") == render()


def _contents() -> Iterator[str]:
    for digit, topic in TOPICS.items():
        rows = [row for row in load() if row.code[2] == digit]
        yield f"- [{topic}](#sv{digit}) ({len(rows)})"


def _entries() -> Iterator[str]:
    topic = ""
    for row in load():
        if row.code[2] != topic:
            topic = row.code[2]
            yield from ("", f'<a id="sv{topic}"></a>', "", f"### {TOPICS[topic]}", "")
        yield from _entry(row)


def _entry(row: Removal) -> Iterator[str]:
    pull = f" ([{row.source_pr}]({PULL}{row.source_pr[1:]}))" if row.source_pr else ""
    here = f'<a id="{row.code.lower()}"></a>**{row.code}**'
    lines = [
        f"- {here} {_fact(row)}{pull}. Fix: {row.safety}.",
        f"SGLang: {_code(row.sglang_replacement)}. spec_v2: {_code(row.spec_v2_replacement)}.",
        _text(row.changes),
    ]
    if row.aliases:
        lines.append(f"The same for {', '.join(map(_code, row.aliases))}.")
    yield "\\\n  ".join(lines)  # a backslash at its end breaks the line


def _fact(row: Removal) -> str:
    fact = what_happened(row)
    return _text(fact) if row.kind == "behaviour" else fact.replace(row.old_path, _code(row.old_path))


def _code(path: str | None) -> str:
    return f"`{path}`" if path else "nothing"


def _text(sentence: str) -> str:
    """As Markdown: stars, and underscores at either end of a word, stay what they are."""
    return re.sub(r"\*|\b_+|_+\b", lambda found: "".join(f"\\{sign}" for sign in found[0]), sentence)
