"""Entries between braces: JSON, YAML's flow maps, TOML's inline tables, JSON inside a quoted shell word."""

from __future__ import annotations

import json
import re

QUOTE = r"(?:\\?[\"'])?"
VALUE = r"(?P<value>[\w.\-]*)"


def entry_of(text: str, start: int, end: int) -> tuple[int, int, str] | None:
    """Start, end and value of the entry whose key stands at [start, end), quotes included; None if it isn't one."""
    lead = re.search(QUOTE + r"$", text[max(0, start - 2) : start])
    begin = start - len(lead[0]) if lead else start
    found = re.compile(QUOTE + r"\s*[:=]\s*" + QUOTE + VALUE + QUOTE + r"(?=\s*[,}\]\r\n#]|\s*$)").match(
        text, end
    )
    opened = re.search(r"(?:[{,\[]|^|\n)\s*$", text[max(0, begin - 200) : begin])
    return (begin, found.end(), found["value"]) if found and opened else None


def without_entry(text: str, start: int, end: int) -> tuple[int, int, str]:
    """What to replace, and by what, to take an entry out together with one comma."""
    after = re.compile(r"\s*,[ \t]*(?:\r?\n[ \t]*)?").match(text, end)
    if after:
        return start, after.end(), ""
    before = re.search(r",\s*$", text[:start])
    if before:
        return before.start(), end, ""
    opened = re.search(r"[{\[]\s*$", text[:start])
    closed = re.compile(r"\s*[}\]]").match(text, end)
    if opened and closed:  # the only one: no blank line is left behind
        return opened.start() + 1, closed.end() - 1, ""
    return start, end, ""


def braces_around(text: str, start: int, end: int) -> tuple[int, int] | None:
    """The innermost {...} around a place, by counting; quotes are not looked at."""
    depth, begin = 0, start
    while begin > 0:
        begin -= 1
        if text[begin] == "}":
            depth += 1
        elif text[begin] == "{":
            if depth == 0:
                break
            depth -= 1
    else:
        return None
    depth, finish = 0, end
    while finish < len(text):
        if text[finish] == "{":
            depth += 1
        elif text[finish] == "}":
            if depth == 0:
                return begin, finish + 1
            depth -= 1
        finish += 1
    return None


def outermost_braces(text: str, start: int, end: int) -> tuple[int, int] | None:
    """The largest {...} around a place that doesn't leave its line."""
    found = None
    here = braces_around(text, start, end)
    while here and "\n" not in text[here[0] : here[1]]:
        found = here
        here = braces_around(text, *found)
    return found


def is_json(text: str) -> bool:
    """Whether a text is JSON, be it with its quotes escaped."""
    for candidate in (text, text.replace('\\"', '"'), text.replace('\\\\"', '"')):
        try:
            json.loads(candidate)
        except ValueError:
            continue
        return True
    return False
