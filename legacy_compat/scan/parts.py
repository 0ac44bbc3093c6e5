"""Texts inside a text: the code blocks of Markdown."""

from __future__ import annotations

import re
from dataclasses import dataclass

from legacy_compat.scan.files import Language
from legacy_compat.scan.text import NEWLINE

FENCE = re.compile(
    r"^(?P<indent>[ \t>]*)(?P<mark>`{3,}|~{3,})[ \t]*\{?\.?(?P<tag>[\w+\-]*)[^\n`]*$", re.MULTILINE
)
TAGS: dict[str, Language] = {
    **dict.fromkeys(("py", "python", "python3", "ipython", "pycon"), "python"),
    **dict.fromkeys(("sh", "bash", "shell", "zsh", "console", "shell-session", "terminal", "cmd"), "shell"),
    **dict.fromkeys(("yaml", "yml"), "yaml"),
    **dict.fromkeys(("json", "jsonc", "json5"), "json"),
    "toml": "toml",
    **dict.fromkeys(("dockerfile", "docker"), "docker"),
    **dict.fromkeys(("ini", "env", "dotenv", "conf", "properties", "makefile"), "config"),
    **dict.fromkeys(("diff", "patch"), "patch"),
}


@dataclass(frozen=True, slots=True)
class Part:
    """A code block: where it stands, its language, and its lines without the indent that the document gives them."""

    start: int
    end: int
    first_line: int
    language: Language
    indent: str
    text: str

    def put_back(self, text: str) -> str:
        """New text with the document's indent."""
        if not self.indent:
            return text
        lines = re.split(r"(?<=\n)", text)
        return "".join(self.indent + line if line.strip() else line for line in lines)


def code_blocks(text: str) -> list[Part]:
    """The fenced blocks of a Markdown text whose language is known; shell where none is said."""
    parts: list[Part] = []
    position = 0
    while opened := FENCE.search(text, position):
        body = NEWLINE.search(text, opened.end())
        if body is None:
            break
        mark = re.escape(opened["mark"][0])
        closing = re.compile(rf"^[ \t>]*{mark}{{{len(opened['mark'])},}}[ \t]*\r?$", re.MULTILINE)
        closed = closing.search(text, body.end())
        end = closed.start() if closed else len(text)
        language = TAGS.get(opened["tag"].lower()) if opened["tag"] else "shell"
        if language:
            first = len(NEWLINE.findall(text, 0, body.end())) + 1
            raw = text[body.end() : end]
            indent = opened["indent"]
            parts.append(Part(body.end(), end, first, language, indent, _without(raw, indent)))
        position = closed.end() if closed else len(text)
    return parts


def _without(text: str, indent: str) -> str:
    if not indent:
        return text
    lines = re.split(r"(?<=\n)", text)
    return "".join(line.removeprefix(indent) for line in lines)
