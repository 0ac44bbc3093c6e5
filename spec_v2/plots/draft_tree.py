"""One step's tree: what was drafted, with which probability, what the target accepted, and the bonus token."""

from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch

from spec_v2.observability.step_log import DecodeStep
from spec_v2.plots.drawing import (
    BLUE,
    GREEN,
    GREY,
    LARGEST,
    VERMILLION,
    CellText,
    Number,
    axes_for,
    bare,
    heading,
    legend_below,
    mix,
    token_text,
)  # fmt: skip
from spec_v2.types import DraftTree

TALLEST_ROW = 0.7  # inches
Place = tuple[int, Number]  # level and row

BOX_WIDTH, BOX_HEIGHT = 0.74, 0.76  # of the distance between levels and between rows

STYLES: dict[str, dict[str, Any]] = {
    "root": {"colour": BLUE, "sign": "", "line": "-", "label": "known before the step"},
    "accepted": {"colour": GREEN, "sign": "✓ ", "line": "-", "label": "✓ accepted"},
    "rejected": {
        "colour": VERMILLION,
        "sign": "✗ ",
        "line": "--",
        "label": "✗ rejected by the target",
    },
    "not reached": {"colour": GREY, "sign": "", "line": ":", "label": "not reached"},
    "draft": {"colour": GREY, "sign": "", "line": "-", "label": "draft"},
    "bonus": {"colour": BLUE, "sign": "★ ", "line": "-", "label": "★ bonus, the target's own"},
}


def draft_tree(
    step: DecodeStep | DraftTree,
    *,
    row: int = 0,
    decode: Callable[[int], str] = str,
    ax: Axes | None = None,
) -> Axes:
    """Draw a tree from left to right, the likeliest child on top; each node has its token and the drafter's probability.

    `step`: from `Engine.record_steps`, or a bare `DraftTree`, of which `row` is drawn, with `decode` giving the
    text of a token id. Wide lines are likely drafts.
    """
    tree = step if isinstance(step, DecodeStep) else step_of_tree(step, row, decode)
    places, num_rows = layout(tree)
    levels = max(x for x, _ in places.values()) + 1
    ax = axes_for(ax, width=max(7.2, 1.35 * levels), height=1.3 + 0.5 * num_rows)
    bare(ax)
    ax.set_xlim(-0.5, levels - 0.5)
    # boxes of a small tree in tall axes keep their shape
    inches = ax.get_window_extent().height / ax.figure.dpi
    spare = max(inches / TALLEST_ROW - num_rows - 1, 0) / 2
    ax.set_ylim(num_rows - 0.4 + spare, -1.1 - spare)
    texts: list[CellText] = []
    fates = dict.fromkeys(_fate(tree, node) for node in places)
    for node in places:
        if node != 0:
            _edge(ax, tree, node, places)
    for node, place in places.items():
        _box(ax, tree, node, place, texts)
    _column_names(ax, tree, places, levels)
    heading(ax, _title(tree))
    legend_below(ax, [_legend_line(fate) for fate in STYLES if fate in fates], columns=3)
    return ax


def step_of_tree(tree: DraftTree, row: int, decode: Callable[[int], str]) -> DecodeStep:
    """A bare tree as a step that nobody has verified: nothing was emitted."""
    tokens = tuple(tree.tokens[row].tolist())
    return DecodeStep(
        step=-1,
        request_id=row,
        seq_len=0,
        tokens=tokens,
        parents=tuple(tree.parents[row].tolist()),
        scores=tuple(tree.scores[row].tolist()),
        accept_index=(),
        emitted=(),
        num_kept=0,
        slots=(),
        pieces=tuple(map(decode, tokens)),
        emitted_pieces=(),
    )


def layout(tree: DecodeStep) -> tuple[dict[int, Place], int]:
    """(node -> (level, row), number of rows). Each leaf has a row of its own, a parent is at its children's middle.

    The bonus token, if there is one, is node -1, a child of the last accepted node.
    """
    children: dict[int, list[int]] = {node: [] for node in tree.nodes}
    for node in tree.nodes[1:]:
        children[tree.parents[node]].append(node)
    for found in children.values():
        found.sort(key=lambda node: -tree.scores[node])
    if tree.emitted:
        children[tree.accept_index[-1]].insert(0, -1)
    places: dict[int, Place] = {}

    def place(node: int, level: int, row: int) -> int:
        """Place `node` and all below it from `row` on; returns the first free row."""
        below, free = children.get(node, []), row
        for child in below:
            free = place(child, level + 1, free)
        rows = [places[child][1] for child in below]
        places[node] = (level, sum(rows) / len(rows) if rows else row)
        return max(free, row + 1)

    return places, place(0, 0, 0)


def _fate(tree: DecodeStep, node: int) -> str:
    if node == -1:
        return "bonus"
    fate = tree.fate(node)
    return "draft" if not tree.emitted and node != 0 else fate


def _column_names(ax: Axes, tree: DecodeStep, places: dict[int, Place], levels: int) -> None:
    last = "bonus" if tree.emitted and _alone(places) else f"draft {levels - 1}"
    names = ["root", *(f"draft {x}" for x in range(1, levels - 1)), last]
    group: list[CellText] = []
    for x, name in enumerate(names[:levels]):
        CellText(ax, x, -0.8, name, width=0.9, height=0.4, group=group, largest=LARGEST - 1)


def _alone(places: dict[int, Place]) -> bool:
    """Whether the bonus token is alone on the last level."""
    levels = [x for x, _ in places.values()]
    return levels.count(max(levels)) == 1 and places[-1][0] == max(levels)


def _edge(ax: Axes, tree: DecodeStep, node: int, places: dict[int, Place]) -> None:
    style = STYLES[_fate(tree, node)]
    parent = tree.accept_index[-1] if node == -1 else tree.parents[node]
    (x0, y0), (x1, y1) = places[parent], places[node]
    ax.plot(
        [x0 + BOX_WIDTH / 2, x1 - BOX_WIDTH / 2],
        [y0, y1],
        style["line"],
        color=style["colour"],
        linewidth=0.8 + 3 * (1.0 if node == -1 else tree.prob(node)),
        solid_capstyle="round",
        zorder=1,
    )


def _box(ax: Axes, tree: DecodeStep, node: int, place: Place, texts: list[CellText]) -> None:
    (x, y), fate = place, _fate(tree, node)
    style = STYLES[fate]
    strong = fate in ("accepted", "bonus", "root")
    ax.add_patch(
        FancyBboxPatch(
            (x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2),
            BOX_WIDTH,
            BOX_HEIGHT,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor=mix(ax, style["colour"], 0.22 if strong else 0.04),
            edgecolor=style["colour"],
            linestyle=style["line"],
            linewidth=1.8 if strong else 1.0,
            zorder=2,
        )
    )
    piece = tree.emitted_pieces[-1] if node == -1 else tree.pieces[node]
    below = "bonus" if node == -1 else "root" if node == 0 else f"{tree.prob(node):.2f}"
    CellText(
        ax,
        x,
        y,
        f"{style['sign']}{token_text(piece)}\n{below}",
        width=BOX_WIDTH * 0.94,
        height=BOX_HEIGHT * 0.88,
        group=texts,
        fontweight="bold" if strong else "normal",
        linespacing=1.15,
        zorder=3,
    )


def _legend_line(fate: str) -> Line2D:
    style = STYLES[fate]
    return Line2D([], [], color=style["colour"], linestyle=style["line"], linewidth=2, label=style["label"])


def _title(tree: DecodeStep) -> str:
    if not tree.emitted:
        return f"{tree.num_drafts} drafts after {token_text(tree.pieces[0])}"
    cut = f", of which {tree.num_kept} were kept" if tree.num_kept < tree.accept_len else ""
    return (
        f"{tree.num_correct_drafts} of {tree.num_drafts} drafts accepted + 1 bonus = {tree.accept_len} "
        f"token{'s' if tree.accept_len > 1 else ''} from one forward{cut}"
    )
