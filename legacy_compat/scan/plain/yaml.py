"""Lines of YAML that set a variable, and how to take them out with comments, anchors and neighbours kept."""

from __future__ import annotations

import re

from legacy_compat.scan.plain.page import Page

Ranges = tuple[tuple[int, int, str], ...]

KEY = r"(?P<indent>[ \t]*)(?P<dash>-[ \t]+)?(?P<quote>[\"']?)%s(?P=quote)[ \t]*:(?P<value>[^\n]*)$"
ITEM = r"(?P<indent>[ \t]*)-[ \t]+(?P<quote>[\"']?)(?:export[ \t]+)?%s=(?P<value>[^\n\"']*)(?P=quote)[ \t]*(?:#.*)?$"
NAMED = r"(?P<indent>[ \t]*)-[ \t]+(?:name|key)[ \t]*:[ \t]*(?P<quote>[\"']?)%s(?P=quote)[ \t]*(?:#.*)?$"
PARENT = re.compile(r"(?P<indent>[ \t]*)(?P<dash>-[ \t]+)?[\"']?[\w.\-/]+[\"']?[ \t]*:(?P<rest>[^\n]*)$")


def setting_at(page: Page, start: int, end: int) -> tuple[str, Ranges | None] | None:
    """(value, what to replace) of the line whose variable stands at [start, end); None if it is no setting."""
    name = re.escape(page.text[start:end])
    number, _ = page.places.at(start)
    line = page.places.line(number)
    if found := re.match(ITEM % name, line):
        return found["value"].strip(), _without_lines(page, number, number, len(found["indent"]), item=True)
    if found := re.match(NAMED % name, line):
        return _named(page, number, len(found["indent"]))
    if found := re.match(KEY % name, line):
        value = re.sub(r"(?:^|\s)#.*$", "", found["value"]).strip()
        if not value or value[0] in "&*|>{[":  # goes on below, or somebody refers to it
            return value, None
        inner = len(found["indent"]) + len(found["dash"] or "")
        if found["dash"] and _continues(page, number, inner):
            return value, None
        return value, _without_lines(page, number, number, len(found["indent"]), item=bool(found["dash"]))
    return None


def _named(page: Page, number: int, indent: int) -> tuple[str, Ranges | None]:
    """`- name: X` with `value: "1"` below it, as Kubernetes has it."""
    last, value = number, ""
    while last < len(page.places.starts):
        line = page.places.line(last + 1)
        if not line.strip() or len(line) - len(line.lstrip()) <= indent:
            break
        last += 1
        if found := re.match(r"\s*value[ \t]*:[ \t]*(?P<value>[^\n#]*)", line):
            value = found["value"].strip()
    simple = last == number + 1 and value
    return value, _without_lines(page, number, last, indent, item=True) if simple else None


def _continues(page: Page, number: int, inner: int) -> bool:
    """Whether the map that a list's item opens has more keys below."""
    below = page.places.line(number + 1)
    return (
        bool(below.strip())
        and len(below) - len(below.lstrip()) == inner
        and not below.lstrip().startswith("- ")
    )


def _without_lines(page: Page, first: int, last: int, indent: int, *, item: bool) -> Ranges | None:
    """Takes lines out; a parent that held nothing else goes too, or keeps an empty value where it must stay."""
    start = page.places.starts[first - 1]
    stop = page.places.starts[last] if last < len(page.places.starts) else len(page.text)
    above = _parent(page, first, indent, item=item)
    if above is None or not _is_only_child(page, first, last, indent, above):
        return ((start, stop, ""),)
    line = page.places.line(above)
    found = PARENT.match(line)
    if found is None:
        return None
    rest = re.sub(r"(?:^|\s)#.*$", "", found["rest"]).strip()
    grandparent = _parent(page, above, len(found["indent"]), item=False)
    alone = grandparent is not None and _is_only_child(page, above, last, len(found["indent"]), grandparent)
    if rest or found["dash"] or alone or (grandparent is None and _is_only_line(page, above, last)):
        colon = page.places.starts[above - 1] + len(line.split("#")[0].rstrip())
        return ((colon, colon, " []" if item else " {}"), (start, stop, ""))
    return ((page.places.starts[above - 1], page.places.starts[above], ""), (start, stop, ""))


def _parent(page: Page, number: int, indent: int, *, item: bool) -> int | None:
    """The line of the key that a line belongs to. List items may stand as far left as their key."""
    for above in range(number - 1, 0, -1):
        line = page.places.line(above)
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        left = len(line) - len(line.lstrip())
        if left < indent or (item and left == indent and not line.lstrip().startswith("- ")):
            return above if PARENT.match(line) else None
        if left == indent and not item and line.lstrip().startswith("- "):
            return None
    return None


def _is_only_child(page: Page, first: int, last: int, indent: int, parent: int) -> bool:
    between = [page.places.line(number) for number in range(parent + 1, first)]
    if any(line.strip() for line in between):  # a sibling, or a comment that would lose its place
        return False
    for number in range(last + 1, len(page.places.starts) + 1):
        line = page.places.line(number)
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        left = len(line) - len(line.lstrip())
        own = PARENT.match(page.places.line(parent))
        outside = left <= len(own["indent"]) if own else left < indent
        is_item = line.lstrip().startswith("- ") and left == indent
        return outside and not is_item
    return True


def _is_only_line(page: Page, first: int, last: int) -> bool:
    """Whether a file would be left without content."""
    others = [*range(1, first), *range(last + 1, len(page.places.starts) + 1)]
    return not any(page.places.line(number).strip(" -\t") for number in others)
