"""HTML that says the same without styles: tables and nested lists, everything escaped, nothing loaded."""

import html
from collections.abc import Callable, Iterable, Sequence

VISIBLE = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}
"""White space as a reader can see it."""

ACCEPTED_STYLE = "background-color: rgba(0, 158, 115, 0.25)"
REJECTED_STYLE = "opacity: 0.65"


def visible(text: str) -> str:
    """A token's text with its white space shown; what is empty or cannot be printed is written as an escape."""
    shown = "".join(
        VISIBLE.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in text
    )
    return shown or "∅"


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with a caption, a row of headings, and a heading to each row. Escapes all of it."""
    titles = "".join(f'<th scope="col">{html.escape(title)}</th>' for title in head)
    body = "".join(
        f'<tr><th scope="row">{html.escape(str(first))}</th>'
        + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return (
        f"<table><caption>{html.escape(caption)}</caption><thead><tr>{titles}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )


def tree_list(parents: Sequence[int], label: Callable[[int], str]) -> str:
    """A tree as nested lists, children in node order. `label(node)` gives HTML. Nodes that nothing reaches are left out.

    `parents[0]` is the root's, and parents precede children.
    """
    children: dict[int, list[int]] = {node: [] for node in range(len(parents))}
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)

    def item(node: int) -> str:
        below = "".join(item(child) for child in children[node])
        return f"<li>{label(node)}{f'<ul>{below}</ul>' if below else ''}</li>"

    return f"<ul>{item(0)}</ul>"
