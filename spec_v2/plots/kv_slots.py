"""What one step does to the KV slots of its requests: who owns them, what is written, what is moved, what is left over."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from spec_v2.observability.step_log import DecodeStep
from spec_v2.plots.drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    CellText,
    Number,
    axes_for,
    bare,
    heading,
    ink_on,
    legend_below,
    mix,
    token_text,
)

STATES: dict[str, tuple[str, float, str, str]] = {
    # colour, share of it over the background, pattern, meaning
    "ready": (BLUE, 0.45, "", "KV of a known token"),
    "draft": (ORANGE, 0.45, "", "KV of a node, written by verify"),
    "accepted": (GREEN, 0.5, "", "✓ KV of an accepted token"),
    "left": (GREY, 0.2, "////", "left over: the next step writes over it"),
    "free": (GREY, 0.08, "", "reserved, not written yet"),
}
STRIPS = ("before", "verify", "after")
LABEL_CELLS = 1.5
MOST_SHOWN = 8  # characters of a token in its cell
ROWS_EACH = 5.2  # three strips, the slot numbers, arrows between them


def kv_slots(steps: DecodeStep | Sequence[DecodeStep], *, tail: int = 3, ax: Axes | None = None) -> Axes:
    """Three strips for each request: its slots before the step, when verify has written, and after the step.

    `steps`: one, or several requests' parts of one step. `tail`: known tokens that are shown before the step's own
    entries. Columns are entries of the request's row; above them are the slots that these entries name. Arrows show where
    the accepted path is moved to. The bonus token is not there: its KV comes with the next step.
    """
    shown = [steps] if isinstance(steps, DecodeStep) else list(steps)
    if not shown or len({s.step for s in shown}) > 1:
        raise ValueError(
            "kv_slots draws one step: give a DecodeStep, or those of several requests of the same step"
        )
    width = max(min(tail, s.seq_len) + len(s.tokens) for s in shown)
    ax = axes_for(ax, width=1.0 + 0.52 * (width + LABEL_CELLS), height=1.1 + 0.42 * ROWS_EACH * len(shown))
    bare(ax)
    ax.set_xlim(-LABEL_CELLS - 0.1, width)
    ax.set_ylim(ROWS_EACH * len(shown) - 0.4, 0)
    texts: list[CellText] = []
    for i, step in enumerate(shown):
        _request(ax, step, i * ROWS_EACH, tail, texts)
    heading(ax, f"Step {shown[0].step}: {'; '.join(_outcome(s, len(shown) > 1) for s in shown)}")
    legend_below(ax, [_patch(ax, state) for state in STATES], columns=3)
    return ax


def states(step: DecodeStep, strip: str) -> list[tuple[str, int | None]]:
    """(state, node) of the entries `seq_len ..` of the row, one for each node; node None where a slot holds no draft."""
    n = len(step.tokens)
    if strip == "before":
        return [("free", None)] * n
    if strip == "verify":
        return [("draft", node) for node in range(n)]
    path = step.accept_index
    return [*(("accepted", node) for node in path), *(("left", node) for node in range(len(path), n))]


def _request(ax: Axes, step: DecodeStep, top: Number, tail: int, texts: list[CellText]) -> None:
    known = min(tail, step.seq_len)
    slots = step.slots[step.seq_len - known :]
    names: list[CellText] = []
    numbers: list[CellText] = []
    CellText(ax, -LABEL_CELLS / 2, top + 0.6, "slot", width=LABEL_CELLS, height=0.6, group=names)
    for x, slot in enumerate(slots):
        CellText(ax, x + 0.5, top + 0.6, str(slot), width=0.9, height=0.6, group=numbers, largest=8)
    for j, strip in enumerate(STRIPS):
        y = top + 1.0 + 1.35 * j
        CellText(ax, -LABEL_CELLS / 2, y + 0.5, strip, width=LABEL_CELLS * 0.9, height=0.6, group=names)
        for x in range(known):
            _cell(ax, x, y, "ready", "·", texts)
        for x, (state, node) in enumerate(states(step, strip), start=known):
            text = "" if node is None else token_text(step.pieces[node], MOST_SHOWN)
            sign = {"accepted": "✓", "left": "✗"}.get(state, "")
            _cell(ax, x, y, state, f"{sign}{text}", texts)
    _moves(ax, step, top + 1.0 + 1.35, known)


def _cell(ax: Axes, x: int, y: Number, state: str, text: str, texts: list[CellText]) -> None:
    colour, share, hatch, _ = STATES[state]
    fill = mix(ax, colour, share)
    ax.add_patch(
        Rectangle(
            (x + 0.03, y), 0.94, 1.0, facecolor=fill, edgecolor=mix(ax, colour, 0.9), lw=0.7, hatch=hatch
        )
    )
    background: dict[str, Any] | None = (
        {"facecolor": fill, "edgecolor": "none", "pad": 0.4} if hatch and text else None
    )
    CellText(ax, x + 0.5, y + 0.5, text, width=0.86, height=0.6, group=texts, bbox=background)


def _moves(ax: Axes, step: DecodeStep, y: Number, known: int) -> None:
    """Arrows from where verify wrote an accepted node to where it belongs."""
    for j, node in enumerate(step.accept_index):
        straight = j == node
        ax.add_patch(
            FancyArrowPatch(
                (known + node + 0.5, y + 1.0),
                (known + j + 0.5, y + 1.35),
                arrowstyle="->",
                mutation_scale=9,
                color=ink_on(ax),
                alpha=0.35 if straight else 1.0,
                linewidth=0.8 if straight else 1.4,
                shrinkA=0,
                shrinkB=0,
            )
        )


def _outcome(step: DecodeStep, several: bool) -> str:
    moved = sum(j != node for j, node in enumerate(step.accept_index))
    who = f"request {step.request_id} " if several else ""
    return f"{who}keeps {step.accept_len} of {len(step.tokens)} slots, moves {moved}"


def _patch(ax: Axes, state: str) -> Patch:
    colour, share, hatch, label = STATES[state]
    return Patch(facecolor=mix(ax, colour, share), edgecolor=mix(ax, colour, 0.9), hatch=hatch, label=label)
