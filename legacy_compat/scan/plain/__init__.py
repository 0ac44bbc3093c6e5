"""Files that are not Python. Reading order:

    page.py     one file: its lines, its comments, its findings
    shell.py    commands that set a variable; Dockerfiles too
    yaml.py     lines that set one, in block style
    flow.py     entries between braces: JSON, flow maps, inline tables

Nothing is loaded and dumped again: what `fix` changes is a few characters, and the rest stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from legacy_compat.scan.files import Language
from legacy_compat.scan.finding import Edit, Finding
from legacy_compat.scan.mentions import Mention, mentions
from legacy_compat.scan.plain import flow, shell, yaml
from legacy_compat.scan.plain.page import Page
from legacy_compat.scan.rules import Rules, new_path
from legacy_compat.scan.settings import severity_of, truth
from legacy_compat.scan.wording import setting_sentence

COMMANDS = re.compile(
    r"\"(?:cmd|command|commands|args|arguments|entrypoint|run|script|scripts|test|start)\"\s*:"
)
Look = tuple[str, shell.Ranges | None, str, bool]  # value, ranges, note, whether inside a longer string
READS = re.compile(r"(?:\$\{?|%)$")


def scan_plain(path: str, text: str, language: Language, rules: Rules) -> list[Finding]:
    """All findings of one text, in order of place."""
    page = Page(path, text, language, rules)
    found = sorted(mentions(text, rules), key=lambda one: one.start)
    if language == "patch":
        _patch(page, found)
    else:
        for one in found:
            _mention(page, one)
        if language == "yaml":
            _keys(page)
    return sorted(page.findings.values(), key=lambda one: (one.span.line, one.span.column, one.code))


def _mention(page: Page, found: Mention) -> None:
    if page.language in ("prose", "data", "markdown"):
        page.emit(found, "docs", severity="info")
    elif page.is_comment(found.start):
        page.emit(found, "comment", severity="info")
    elif found.kind == "env":
        _variable(page, found)
    elif found.kind == "flag":
        _flag(page, found)
    elif found.kind == "name":
        if page.rules.proven(found.row, page.mentions_sglang):
            page.emit(found, "docs", severity="info")
    else:
        _path(page, found)


def _patch(page: Page, found: list[Mention]) -> None:
    """A patch belongs to the version it was cut from: said once, never edited."""
    if found:
        names = sorted({one.name for one in found})
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        span = page.places.span(found[0].start, found[0].end)
        message = f"a patch for an SGLang that still has {shown}"
        source = page.places.line(span.line)
        finding = Finding(page.path, span, "SV904", "info", "remark", shown, message, source=source)
        page.findings[span, "SV904"] = finding


# --- variables ---


def _variable(page: Page, found: Mention) -> None:
    name = found.name
    if READS.search(page.text[: found.start]) and not re.match(r":?=", page.text[found.end :]):
        note = "SGLang no longer reads it: what is decided here by it may be out of date"
        page.emit(found, "setting", severity="warning", note=note)
        return
    for look in _looks(page):
        if setting := look(page, found):
            value, ranges, note, quoted = setting
            break
    else:
        page.emit(found, "setting", severity="info", note="named only")
        return
    state = truth(value)
    severity = severity_of(found.row, state)
    if quoted and page.language == "json" and not _is_command(page, found):
        page.emit(found, "docs", severity="info")
        return
    edit = _edit(page, found, state, ranges)
    message = setting_sentence(found.row, name, state)
    page.emit(found, "setting", message=message, severity=severity, note=note, edit=edit)


def _looks(page: Page) -> list[Callable[[Page, Mention], Look | None]]:
    """The ways of setting a variable that a language has, the likeliest first."""
    if page.language == "json":
        return [_entry, _word]
    if page.language == "yaml":
        return [_yaml, _entry, _word, _docker_env]
    if page.language == "toml":
        return [_toml, _entry, _word]
    return [_word, _docker_env, _entry, _toml]


def _word(page: Page, found: Mention) -> Look | None:
    setting = shell.setting_at(page, found.start, found.end)
    if setting is None:
        return None
    note = "inside a string" if page.quotes(found.start) else ""
    return setting.value, setting.removal, note, bool(page.quotes(found.start))


def _yaml(page: Page, found: Mention) -> Look | None:
    setting = yaml.setting_at(page, found.start, found.end)
    return (*setting, "", False) if setting else None


def _docker_env(page: Page, found: Mention) -> Look | None:
    """`ENV NAME value`, the old form."""
    start, stop = page.line_bounds(found.start)
    match = re.fullmatch(r"\s*ENV\s+\w+\s+(?P<value>\S+)\s*", page.text[start:stop])
    return (match["value"], ((*page.whole_line(start), ""),), "", False) if match else None


def _toml(page: Page, found: Mention) -> Look | None:
    """`NAME = "1"` on a line of its own; `NAME: 1` and `NAME := 1` of other formats are only reported."""
    start, stop = page.line_bounds(found.start)
    match = re.fullmatch(
        r"\s*[\"']?\w+[\"']?\s*(?P<sign>=|:=|\?=|:)\s*(?P<value>[^#\n]*?)\s*(?:#.*)?", page.text[start:stop]
    )
    if match is None or page.text[start : found.start].strip(" \t\"'"):
        return None
    simple = (
        match["sign"] == "="
        and page.language == "toml"
        and not re.search(r"[\[{]|'''|\"\"\"", match["value"])
    )
    return match["value"], ((*page.whole_line(start), ""),) if simple else None, "", False


def _entry(page: Page, found: Mention) -> Look | None:
    """An entry between braces; taken out only if what holds it stays well-formed."""
    entry = flow.entry_of(page.text, found.start, found.end)
    if entry is None:
        return None
    begin, end, value = entry
    change = flow.without_entry(page.text, begin, end)
    around = flow.braces_around(page.text, begin, end)
    if around is None:
        return None
    in_word = page.language not in ("json", "yaml", "toml") or bool(page.quotes(around[0]))
    if in_word:
        around = flow.outermost_braces(page.text, begin, end) or around
        inside = page.text[around[0] : change[0]] + page.text[change[1] : around[1]]
        if not (flow.is_json(page.text[slice(*around)]) and flow.is_json(inside)):
            return value, None, "", False
    return value, (change,), "", False


def _edit(page: Page, found: Mention, state: bool | None, ranges: shell.Ranges | None) -> Edit | None:
    row, new = found.row, found.row.sglang_replacement or ""
    if row.safety == "manual" or ranges is None:
        return None
    if not new or (new.startswith("-") and state is True):
        return Edit("text", row.safety, ranges=ranges)
    if new.startswith("-") and state is False and page.language in ("shell", "docker", "config"):
        setting = shell.setting_at(page, found.start, found.end)
        both = shell.with_flag(page, setting, found.start, new) if setting else None
        return Edit("text", "unsafe", new, ranges=both) if both else None
    if new.isidentifier():
        return Edit("text", row.safety, new, ranges=((found.start, found.end, new),))
    return None


def _is_command(page: Page, found: Mention) -> bool:
    """Whether a JSON string is something that is run, rather than a record of it."""
    start, _ = page.line_bounds(found.start)
    return bool(COMMANDS.search(page.text[start : found.start]))


# --- flags and paths ---


def _flag(page: Page, found: Mention) -> None:
    row, new = found.row, found.row.sglang_replacement or ""
    if row.severity == "info":
        return
    edit = None
    if row.safety != "manual" and page.mentions_sglang:
        if new.startswith("-"):
            edit = Edit("text", row.safety, new, ranges=((found.start, found.end, new),))
        elif not new and _is_word(page, found):
            edit = Edit("text", row.safety, ranges=(shell.without_word(page, found.start, found.end),))
    page.emit(found, "flag", severity=None if page.mentions_sglang else "info", edit=edit)


def _is_word(page: Page, found: Mention) -> bool:
    """Whether a flag is a word of a shell command by itself."""
    ends = found.end == len(page.text) or page.text[found.end].isspace()
    return page.language in ("shell", "docker") and ends and not page.quotes(found.start)


def _keys(page: Page) -> None:
    """Flags as keys of a server's config file: `mamba-scheduler-strategy: ...`"""
    for field, row in page.rules.fields.items():
        spelled = rf"{field}|{field.replace('_', '-')}"
        for found in re.finditer(rf"^[ \t]*(?:-[ \t]+)?(?P<key>{spelled})[ \t]*:", page.text, re.MULTILINE):
            if row.severity == "info" or not page.mentions_sglang:
                continue
            new = (row.sglang_replacement or "").lstrip("-")
            new = new.replace("-", "_") if "_" in found["key"] else new
            edit = Edit("text", row.safety, new, ranges=((*found.span("key"), new),)) if new else None
            edit = None if row.safety == "manual" else edit
            mention = Mention(*found.span("key"), "flag", row, found["key"])
            page.emit(mention, "flag", severity="warning", edit=edit)


def _path(page: Page, found: Mention) -> None:
    """A dotted path or a file's path: a patch target, a sed of an installed file, code in a string."""
    edit = None
    new = new_path(found.row)
    start, stop = page.line_bounds(found.start)
    imports = re.search(r"\bimport\b", page.text[start : found.start] + " " + page.text[found.end : stop])
    follows = found.row.category == "moved" or (
        found.row.kind in ("class", "method") if found.rest else found.row.kind != "module"
    )
    plain = found.kind == "path" and found.row.kind != "env" and follows and not imports
    if plain and new and found.row.safety != "manual":
        edit = Edit("text", found.row.safety, new, ranges=((found.start, found.end, new),))
    page.emit(found, "path" if found.kind == "file" else "string", edit=edit)
