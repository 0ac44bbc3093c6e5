"""Shell commands: which words of a command set a variable, and how to take one out without hurting the rest.

Also Dockerfiles, whose ENV is such a command, and scripts inside YAML.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from legacy_compat.scan.plain.page import Page

Form = Literal["prefix", "export", "alone", "docker-flag", "other"]
Ranges = tuple[tuple[int, int, str], ...]

VALUE = re.compile(r"=(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s;&|()<>\"'`]*)")
DEFAULT = re.compile(r":?=(?P<value>[^}\n]*)\}")
GAP = re.compile(r"(?:[ \t]|\\\r?\n)+")
SEPARATOR = re.compile(
    r"&&|\|\||[;|&({`]|\bthen\b|\bdo\b|\belse\b|^\s*RUN\b|^\s*-(?=\s)|^\s*\$(?=\s)", re.MULTILINE
)
SETTERS = {"export", "declare", "typeset", "readonly", "local", "ENV", "ARG", "set", "setx"}
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
PROMPTS = ("$", "#", "%", ">")  # of commands shown in a document
OPENS = re.compile(r"(?:\bthen|\bdo|\belse|[{(]|\bin)\s*$|^\s*\S[^()]*\)\s*$")
CLOSES = re.compile(r"^\s*(?:fi|done|else|elif|esac|\}|\)|;;)")
LAUNCH = re.compile(r"\bsglang(?:\.launch_server|\s+serve)\b(?!\s*=)")


@dataclass(frozen=True, slots=True)
class Setting:
    """A variable that a command sets. `removal`: what to replace so that it doesn't, None if by hand."""

    form: Form
    value: str
    removal: Ranges | None


def setting_at(page: Page, start: int, end: int) -> Setting | None:
    """The setting whose name stands at [start, end); None if the name is not assigned to there."""
    if page.text[:start].endswith("${") and (default := DEFAULT.match(page.text, end)):
        return Setting("other", default["value"].strip("\"'"), None)
    found = VALUE.match(page.text, end)
    if found is None:
        return None
    value = found["value"].strip("\"'")
    stop = found.end()
    before = _command_before(page, start)
    whole_word = re.compile(r"\s|$|[;&|)]").match(page.text, stop)
    if page.quotes(start) or not whole_word or (before and not before[-1].isspace()):
        return Setting("other", value, None)
    words = before.split()
    form = _form(words)
    if form == "other":
        return Setting(form, value, None)
    if form == "docker-flag":
        start = page.text.rindex("-", 0, start)
        start = start - 1 if page.text[start - 1] == "-" else start
        return Setting(form, value, (without_word(page, start, stop),))
    if form == "prefix" or (form == "export" and _has_other_words(page, words, stop)):
        return Setting(form, value, (without_word(page, start, stop),))
    return Setting(form, value, _without_command(page, start, stop, before))


def _command_before(page: Page, start: int) -> str:
    """The words of the same command before a place, across continued lines."""
    begin, _ = page.line_bounds(start)
    while begin > 0 and re.search(r"(?<!\\)\\\r?\n$", page.text[max(0, begin - 3) : begin]):
        begin, _ = page.line_bounds(begin - 1)
    before = re.sub(r"\\\r?\n", " ", page.text[begin:start])
    parts = [found.end() for found in SEPARATOR.finditer(before) if not _is_quoted(before, found.start())]
    return before[parts[-1] :] if parts else before


def _is_quoted(text: str, place: int) -> bool:
    return bool(re.search(r"[\"']", text)) and text[:place].count('"') % 2 == 1


def _form(words: list[str]) -> Form:
    if not words or all(ASSIGNMENT.match(word) for word in words):
        return "prefix"
    if words[-1] in ("-e", "--env") and words[0] != "env":
        return "docker-flag"
    if words[0] in SETTERS and all(word[0] == "-" or ASSIGNMENT.match(word) for word in words[1:]):
        return "export"
    return "other"


def _has_other_words(page: Page, words: list[str], stop: int) -> bool:
    """Whether an `export` sets something else too."""
    after = GAP.match(page.text, stop)
    following = page.text[after.end() : after.end() + 1] if after else ""
    return any(ASSIGNMENT.match(word) for word in words[1:]) or bool(re.match(r"[A-Za-z_\"']", following))


def without_word(page: Page, start: int, stop: int) -> tuple[int, int, str]:
    """One word and the gap after it; the gap before it if it is the last one."""
    text = page.text
    after = GAP.match(text, stop)
    if after and not re.match(r"\r?\n|$|#", text[after.end() : after.end() + 2]):
        return start, after.end(), ""
    before = re.search(r"(?:[ \t]|\\\r?\n)*$", text[:start])
    begin = before.start() if before else start
    if begin == 0 or text[begin - 1] == "\n":  # the only word: its line goes
        return page.whole_line(start)[0], page.whole_line(start)[1], ""
    return begin, stop, ""


def _without_command(page: Page, start: int, stop: int, before: str) -> Ranges | None:
    """A command that sets this variable and does nothing else, with its line if it has one to itself."""
    text = page.text
    begin, line_end = page.line_bounds(start)
    command = start - len(before.lstrip())
    if "\n" in text[command:stop]:
        return None
    rest = text[stop:line_end]
    joined = re.match(r"\s*(?:;(?!;)|&&)\s*(?=\S)", rest)
    if joined and not joined[0].isspace():
        return ((command, stop + joined.end(), ""),)
    if rest.strip() and not rest.lstrip().startswith("#"):
        return None
    lead = text[begin:command]
    if lead.strip() and lead.strip() not in PROMPTS:
        tail = re.search(r"\s*(?:;|&&)\s*$", lead)
        return ((begin + tail.start(), stop, ""),) if tail else ((command, stop, ":"),)
    if _block_would_be_empty(page, start):
        return ((command, stop, ":"),)
    return ((*page.whole_line(start), ""),)


def _block_would_be_empty(page: Page, start: int) -> bool:
    """Whether the line stands alone between `then` and `fi` or the like: shell has no empty blocks."""
    line, _ = page.places.at(start)
    lines = [page.places.line(number) for number in range(1, len(page.places.starts) + 1)]
    above = next((text for text in reversed(lines[: line - 1]) if _is_code(text)), "")
    below = next((text for text in lines[line:] if _is_code(text)), "")
    return bool(OPENS.search(above) and CLOSES.search(below))


def _is_code(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def with_flag(page: Page, setting: Setting, start: int, flag: str) -> Ranges | None:
    """Takes out a variable that was off and passes the flag that says the same today.

    Only where the server's command is plain to see: the same command, or the only one of the file.
    """
    if setting.removal is None:
        return None
    if setting.form != "prefix" and not _is_set_once(page, start):
        return None
    launches = [found for found in LAUNCH.finditer(page.text) if not page.is_comment(found.start())]
    if setting.form == "prefix":
        stop = _end_of_command(page, start)
        launches = [found for found in launches if start < found.start() < stop]
    if len(launches) != 1:
        return None
    (launch,) = launches
    arguments = page.text[launch.end() : _end_of_command(page, launch.start())]
    if re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", arguments):
        return setting.removal
    return (*setting.removal, (launch.end(), launch.end(), f" {flag}"))


def _is_set_once(page: Page, start: int) -> bool:
    """Whether a variable has one value from here on: set in one place, and not under a condition."""
    begin, _ = page.line_bounds(start)
    name = re.compile(r"\w+").match(page.text, start)
    places = re.finditer(rf"\b{name[0] if name else ''}=", page.text)
    settings = [found for found in places if not page.is_comment(found.start())]
    return len(settings) == 1 and not page.text[begin : begin + 1].isspace()


def _end_of_command(page: Page, start: int) -> int:
    """The end of the line that a command ends on."""
    _, stop = page.line_bounds(start)
    while page.text[:stop].endswith("\\") and stop < len(page.text):
        _, stop = page.line_bounds(min(page.text.find("\n", stop) + 1, len(page.text)) or len(page.text))
    return stop
