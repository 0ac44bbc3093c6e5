"""Who sees whom: the attention mask that verifies a whole tree in one forward."""

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from spec_v2.observability.step_log import DecodeStep
from spec_v2.plots.draft_tree import step_of_tree
from spec_v2.plots.drawing import (
    BLUE,
    GREEN,
    CellText,
    axes_for,
    bare,
    heading,
    legend_below,
    mix,
    token_text,
)
from spec_v2.types import DraftTree

LABEL_CELLS = 5.0  # cells that a row's label takes


def tree_mask(
    step: DecodeStep | DraftTree,
    *,
    row: int = 0,
    decode: Callable[[int], str] = str,
    ax: Axes | None = None,
) -> Axes:
    """Rows are the nodes in the order in which the target reads them, columns the nodes that each may attend to.

    Node `j` sees itself and its ancestors (and the text before, which is not drawn). Rows of accepted nodes are bold
    and have a tick. Arguments as for `draft_tree`.
    """
    tree = step if isinstance(step, DecodeStep) else step_of_tree(step, row, decode)
    nodes = tree.nodes
    ax = axes_for(ax, width=2.0 + 0.3 * (len(nodes) + LABEL_CELLS), height=1.2 + 0.27 * len(nodes))
    bare(ax)
    ax.set_xlim(-LABEL_CELLS - 1.5, len(nodes))
    ax.set_ylim(len(nodes), -1.3)
    labels: list[CellText] = []
    numbers: list[CellText] = []
    for y, node in enumerate(nodes):
        accepted = node in tree.accept_index
        colour = GREEN if accepted else BLUE
        seen = {node, *ancestors(tree, node)}
        for x, other in enumerate(nodes):
            shade = 0.85 if other == node else 0.55 if other in seen else 0.05
            patch = Rectangle((x + 0.04, y + 0.04), 0.92, 0.92, facecolor=mix(ax, colour, shade), lw=0)
            ax.add_patch(patch)
        sign = "✓ " if accepted else ""
        CellText(
            ax, -0.3, y + 0.5, f"{sign}{token_text(tree.pieces[node])}", width=LABEL_CELLS - 0.3, height=0.9,
            group=labels, ha="right", fontweight="bold" if accepted else "normal",
        )  # fmt: skip
        CellText(ax, -LABEL_CELLS - 0.8, y + 0.5, str(node), width=1.0, height=0.9, group=numbers)
        CellText(ax, y + 0.5, -0.5, str(node), width=0.9, height=0.8, group=numbers)
    CellText(ax, -LABEL_CELLS - 0.8, -0.5, "node", width=1.4, height=0.8)
    CellText(ax, -0.3, -0.5, "token   |   sees node", width=LABEL_CELLS - 0.3, height=0.8, ha="right")
    heading(ax, f"One forward over {len(nodes)} nodes: each sees only its own path")
    own, path = (Patch(color=mix(ax, BLUE, share)) for share in (0.85, 0.55))
    own.set_label("itself")
    path.set_label("an ancestor")
    handles = [own, path]
    if tree.accept_index:
        handles.append(Patch(color=mix(ax, GREEN, 0.85), label="✓ row of an accepted node"))
    legend_below(ax, handles, columns=3)
    return ax


def ancestors(tree: DecodeStep, node: int) -> list[int]:
    """The nodes above `node`, nearest first."""
    found = []
    while (node := tree.parents[node]) >= 0:
        found.append(node)
    return found
