"""Draws hybrid_tree.svg: a tree verified through a recurrence, as paths, and the walk that commits it.

python docs/figures/hybrid_tree.py [file.svg]
"""

import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch, Rectangle

# The tree that docs/architecture.md works through: node 0 is the bonus token, 2 and 4 are accepted.
TOKENS = (7, 10, 11, 20, 22, 32)
PARENTS = (-1, 0, 0, 1, 2, 4)
ACCEPTED = (0, 2, 4)
PLACES = ((0.0, 3.0), (-0.9, 2.0), (0.9, 2.0), (-0.9, 1.0), (0.9, 1.0), (0.9, 0.0))

INK, QUIET, LINE = "#1b1f24", "#6b7280", "#9aa3ad"
FILL, TAKEN, ROW = "#eef1f4", "#cfe8d5", "#fbe7c6"


def path_of(node: int) -> list[int]:
    """From the root to the node."""
    return [*(path_of(PARENTS[node]) if PARENTS[node] >= 0 else []), node]


def title(ax: Axes, x: float, text: str) -> None:
    ax.text(x, 4.8, text, ha="left", va="center", fontsize=11, color=INK)


def state_box(ax: Axes, x: float, y: float, text: str) -> None:
    ax.add_patch(
        FancyBboxPatch(
            (x - 0.62, y - 0.24),
            1.24,
            0.48,
            boxstyle="round,pad=0.02,rounding_size=0.08",
            fc=ROW,
            ec=INK,
            lw=0.9,
        )
    )
    ax.text(x, y, text, ha="center", va="center", color=INK, fontsize=10)


def draw_tree(ax: Axes) -> None:
    """Every node with the state that it makes of its parent's."""
    title(ax, -2.5, "verify: a node starts from its parent's state")
    state_box(ax, 0.0, 4.0, "row: S")
    ax.plot((0, 0), (3.74, 3.22), color=INK, lw=1.4)
    for node, (x, y) in enumerate(PLACES):
        parent = PARENTS[node]
        if parent >= 0:
            px, py = PLACES[parent]
            taken = node in ACCEPTED
            ax.plot((px, x), (py, y), color=INK if taken else LINE, lw=1.6 if taken else 1.0, zorder=0)
        ax.add_patch(Circle((x, y), 0.22, fc=TAKEN if node in ACCEPTED else FILL, ec=INK, lw=0.9))
        ax.text(x, y, str(TOKENS[node]), ha="center", va="center", fontsize=10, color=INK)
        before = "S" if parent < 0 else f"S{parent}"
        right = x >= 0
        ax.text(
            x + (0.34 if right else -0.34), y, f"S{node} = {before} + {TOKENS[node]}",
            ha="left" if right else "right", va="center", fontsize=9.5, color=INK if node in ACCEPTED else QUIET,
        )  # fmt: skip
    ax.set_xlim(-2.6, 2.6)
    ax.set_ylim(-0.5, 5.1)


def cells(ax: Axes, x: float, y: float, values: list[int], taken: bool) -> None:
    for j, node in enumerate(values):
        shade = "white" if node < 0 else TAKEN if taken else FILL
        ax.add_patch(Rectangle((x + j * 0.62, y - 0.22), 0.62, 0.44, fc=shade, ec=LINE, lw=0.8))
        ax.text(
            x + (j + 0.5) * 0.62, y, str(node), ha="center", va="center", fontsize=9.5,
            color=LINE if node < 0 else INK,
        )  # fmt: skip


def draw_paths(ax: Axes) -> None:
    """What the kernel is given: one path per node."""
    title(ax, -0.7, "as paths: one walk per node")
    ax.text(-0.1, 4.0, "node", ha="right", va="center", fontsize=9.5, color=QUIET)
    ax.text(1.24, 4.0, "its path, root first", ha="center", va="center", fontsize=9.5, color=QUIET)
    ax.text(2.72, 4.0, "says", ha="left", va="center", fontsize=9.5, color=QUIET)
    for node in range(len(TOKENS)):
        y = 3.45 - node * 0.58
        path = path_of(node)
        ax.text(-0.1, y, str(node), ha="right", va="center", fontsize=9.5, color=INK)
        cells(ax, 0.0, y, [-1] * (4 - len(path)) + path, node in ACCEPTED)
        ax.text(2.72, y, f"q{node} S{node}", ha="left", va="center", fontsize=9.5, color=INK)
    ax.set_xlim(-0.8, 3.6)
    ax.set_ylim(-0.5, 5.1)


def draw_commit(ax: Axes) -> None:
    """The accepted path, once more, into the row."""
    title(ax, -0.3, "commit: the accepted path, once more")
    ax.text(1.24, 4.0, "accept_index 0, 2, 4", ha="center", va="center", fontsize=9.5, color=QUIET)
    cells(ax, 0.0, 3.45, [*ACCEPTED, -1], taken=True)
    stops = ((2.5, "row: S"), (1.55, "S0"), (0.75, "S2"), (-0.05, "row: S4"))
    for i, (y, text) in enumerate(stops):
        if text.startswith("row"):
            state_box(ax, 1.24, y, text)
        else:
            ax.text(1.24, y, text, ha="center", va="center", fontsize=10, color=INK)
        if i:
            above = stops[i - 1][0]
            ax.annotate(
                "", (1.24, y + 0.27), (1.24, above - (0.29 if i == 1 else 0.18)),
                arrowprops={"arrowstyle": "->", "color": INK, "lw": 1.2},
            )  # fmt: skip
            token = TOKENS[ACCEPTED[i - 1]]
            ax.text(1.5, (y + above) / 2, f"token {token}", ha="left", va="center", fontsize=9.5, color=QUIET)
    ax.set_xlim(-0.4, 3.2)
    ax.set_ylim(-0.5, 5.1)


def draw() -> Figure:
    """The three panels."""
    figure = Figure(figsize=(11.5, 4.6), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=(5.2, 4.4, 3.6))
    for ax, panel in zip(axes, (draw_tree, draw_paths, draw_commit), strict=True):
        ax.axis("off")
        ax.set_aspect("equal")
        panel(ax)
    return figure


if __name__ == "__main__":
    target = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).with_suffix(".svg"))
    # text as text, and the same file from the same script
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "spec_v2", "font.family": "DejaVu Sans"}):
        options = {"metadata": {"Date": None}} if target.endswith(".svg") else {"dpi": 110}
        draw().savefig(target, facecolor="white", **options)
