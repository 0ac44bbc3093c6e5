"""What the host, the forward stream and the copy stream did at the same time, and where they waited.

A figure shows whole periods: from where the first step shown begins on the forward lane to where the step after the last one
does. So the busy shares of two schedules can be compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from spec_v2.observability.trace import LANES, Span, Trace, read_perfetto
from spec_v2.plots.drawing import (
    BLUE,
    GREEN,
    GREY,
    LARGEST,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    CellText,
    Number,
    axes_for,
    ink_on,
    legend_below,
    mix,
    text_on,
)  # fmt: skip

Run = Trace | Sequence[Span] | str | Path

# phase -> colour and pattern, in the order of a step
PHASES = {
    "schedule": (SKY, ""),
    "launch": (SKY, "////"),
    "draft": (ORANGE, ""),
    "verify": (BLUE, ""),
    "publish": (PURPLE, "////"),
    "extend": (GREEN, ""),
    "copy": (PURPLE, ""),
    "process": (VERMILLION, ""),
    "wait": (GREY, ""),
    "prefill": (BLUE, "...."),
    "other": (GREY, ".."),
}
NOTHING = "wait"  # drawn empty: the host does nothing

HEADING_ROWS = 0.9  # height of a run's heading, in lanes
GAP_ROWS = 0.5


@dataclass(frozen=True, slots=True)
class Piece:
    """A span, cut to the window, as it is drawn. Times in milliseconds from the window's start."""

    lane: str
    phase: str
    step: int
    start: Number
    end: Number


@dataclass(frozen=True, slots=True)
class Window:
    """Some whole steps of a run. `busy`: lane -> share of the time in which it worked, 0 to 1."""

    pieces: tuple[Piece, ...]
    length: Number
    num_steps: int

    def busy(self, lane: str) -> Number:
        """Share of the window in which something ran on the lane, waiting excluded."""
        worked, reached = 0.0, 0.0
        for piece in sorted((p for p in self.pieces if p.lane == lane), key=lambda p: p.start):
            if piece.phase != NOTHING:
                worked += max(piece.end - max(piece.start, reached), 0.0)
                reached = max(reached, piece.end)
        return worked / self.length if self.length else 0.0

    def idle(self, lane: str) -> Number:
        """Milliseconds per step in which nothing ran on the lane."""
        return (1 - self.busy(lane)) * self.length / self.num_steps


def timeline(
    *runs: Run,
    labels: Sequence[str] = (),
    num_steps: int = 3,
    skip: int | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw `num_steps` decode steps of each run below each other, on one time axis.

    A run is an `engine.trace`, its spans, or a file that `Trace.to_perfetto` wrote. `skip`: decode steps to leave out
    first; the middle of the run if not given. The host waits where its bar is empty: processing a step begins when the
    step's copy has ended. Raises ValueError for a run without a decode step.
    """
    if not runs or (labels and len(labels) != len(runs)):
        raise ValueError(
            f"timeline: {len(runs)} runs and {len(labels)} labels; give a run, and a label for each"
        )
    windows = [window_of(_spans(run), num_steps, skip) for run in runs]
    rows_each = len(LANES) + HEADING_ROWS + GAP_ROWS
    ax = axes_for(ax, width=9.0, height=1.1 + 0.42 * rows_each * len(runs))
    ink = ink_on(ax)
    longest = max(window.length for window in windows)
    ax.set_xlim(0, longest)
    ax.set_ylim(rows_each * len(runs) - GAP_ROWS + 0.1, 0)
    lanes: list[CellText] = []
    headings: list[CellText] = []
    for i, window in enumerate(windows):
        top = i * rows_each
        CellText(
            ax, 0, top + HEADING_ROWS / 2, _summary(window, labels[i] if labels else ""),
            width=longest, height=HEADING_ROWS, group=headings, ha="left", fontweight="bold", largest=LARGEST,
        )  # fmt: skip
        for j, lane in enumerate(LANES):
            y = top + HEADING_ROWS + j
            CellText(
                ax, -0.01, y + 0.5, lane,
                width=0.12, height=0.9, group=lanes, ha="right", transform=ax.get_yaxis_transform(),
            )  # fmt: skip
            ax.axhspan(y + 0.04, y + 0.96, 0, window.length / longest, color=ink, alpha=0.06, lw=0)
            for piece in window.pieces:
                if piece.lane == lane:
                    _bar(ax, piece, y)
        _launch_arrows(ax, window, top + HEADING_ROWS)
    ax.set_yticks([])
    ax.xaxis.tick_top()
    ax.set_title("time (ms); numbers are steps", loc="left", fontsize=LARGEST, color=ink)
    shown = {piece.phase for window in windows for piece in window.pieces}
    legend_below(ax, [_patch(ax, phase) for phase in PHASES if phase in shown], columns=6)
    return ax


def window_of(spans: Sequence[Span], num_steps: int, skip: int | None) -> Window:
    """The spans of `num_steps` whole decode steps, cut to them. Raises ValueError where there is no decode step."""
    starts: dict[int, Number] = {}
    for s in sorted(spans, key=lambda s: s.start_us):
        if s.lane == "forward":
            starts.setdefault(s.step, s.start_us)
    decodes = sorted({s.step for s in spans if s.lane == "forward" and "verify" in s.name.split("+")})
    if not decodes:
        raise ValueError("timeline: the trace has no decode step; generate at least two tokens")
    # the last step has no next one that would end its period
    most = max(len(decodes) - 1, 1)
    num_steps = min(num_steps, most)
    first = (most - num_steps) // 2 if skip is None else min(skip, most - num_steps)
    begin = starts[decodes[first]]
    after = decodes[first + num_steps : first + num_steps + 1]
    end = starts[after[0]] if after else max(s.start_us + s.duration_us for s in spans)
    pieces = []
    for piece in _pieces(spans):
        start, stop = max(piece.start, begin), min(piece.end, end)
        if stop > start:
            pieces.append(
                Piece(piece.lane, piece.phase, piece.step, (start - begin) / 1e3, (stop - begin) / 1e3)
            )
    return Window(tuple(pieces), (end - begin) / 1e3, num_steps)


def _spans(run: Run) -> Sequence[Span]:
    if isinstance(run, Trace):
        return run.spans()
    return read_perfetto(run) if isinstance(run, str | Path) else run


def _pieces(spans: Sequence[Span]) -> list[Piece]:
    """Spans with their phases, in microseconds. What the host calls processing is split: first it waits for the copy."""
    copied = {s.step: s.start_us + s.duration_us for s in spans if s.lane == "copy"}
    pieces = []
    for s in spans:
        start, end = s.start_us, s.start_us + s.duration_us
        if (s.lane, s.name) == ("host", "process"):
            landed = min(max(copied.get(s.step, start), start), end)
            pieces.append(Piece(s.lane, "wait", s.step, start, landed))
            start = landed
        pieces.append(Piece(s.lane, phase_of(s.name), s.step, start, end))
    return pieces


def phase_of(name: str) -> str:
    """The phase of a span's name; of several launches that were recorded as one, the one that takes longest."""
    parts = name.split("+")
    for phase, part in (
        ("prefill", "prefill"),
        ("verify", "verify"),
        ("draft", "draft"),
        ("extend", "draft_extend"),
    ):
        if part in parts:
            return phase
    return name if name in PHASES else "other"


def _summary(window: Window, label: str) -> str:
    forward, host = window.busy("forward"), window.busy("host")
    return (
        f"{label + ': ' if label else ''}{window.length / window.num_steps:.2f} ms per step; forward lane busy "
        f"{_percent(forward)}, idle {window.idle('forward'):.2f} ms per step; host busy {_percent(host)}"
    )


def _percent(share: Number) -> str:
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"


def _bar(ax: Axes, piece: Piece, y: Number) -> None:
    colour, hatch = PHASES[piece.phase]
    width, empty = piece.end - piece.start, piece.phase == NOTHING
    ax.add_patch(
        Rectangle(
            (piece.start, y + (0.3 if empty else 0.08)),
            width,
            0.4 if empty else 0.84,
            facecolor="none" if empty else colour,
            edgecolor=colour if empty else mix(ax, colour, 0.55),
            linestyle=":" if empty else "-",
            linewidth=0.8 if empty else 0.4,
            hatch=hatch,
        )
    )
    ink = ink_on(ax) if empty else text_on(colour)
    label = piece.phase if piece.phase in ("wait", "schedule") else f"{piece.phase} {piece.step}"
    CellText(
        ax, (piece.start + piece.end) / 2, y + 0.5, label,
        width=width * 0.94, height=0.4 if empty else 0.7, color=ink, largest=LARGEST - 1,
        bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.2} if hatch else None,
    )  # fmt: skip


def _launch_arrows(ax: Axes, window: Window, top: Number) -> None:
    """From a step's launch on the host to its first run on the forward lane."""
    for launch in (p for p in window.pieces if p.phase == "launch"):
        runs = [p.start for p in window.pieces if p.lane == "forward" and p.step == launch.step]
        if runs and launch.start > 0:
            ax.annotate(
                "",
                xy=(min(runs), top + 1.1),
                xytext=(launch.start, top + 0.9),
                arrowprops={
                    "arrowstyle": "->",
                    "color": ink_on(ax),
                    "linewidth": 0.9,
                    "shrinkA": 0,
                    "shrinkB": 0,
                },
            )


def _patch(ax: Axes, phase: str) -> Patch:
    colour, hatch = PHASES[phase]
    empty = phase == NOTHING
    return Patch(
        facecolor="none" if empty else colour,
        edgecolor=colour if empty else mix(ax, colour, 0.55),
        linestyle=":" if empty else "-",
        hatch=hatch,
        label={"wait": "host waits", "other": "resolve, stash, pack"}.get(phase, phase),
    )
