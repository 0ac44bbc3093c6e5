"""How many drafts are accepted at each position, and how sure that is."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from spec_v2.completion import Completion
from spec_v2.observability.metrics import SpecMetrics, total
from spec_v2.plots.drawing import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    VERMILLION,
    axes_for,
    heading,
    ink_on,
    legend_below,
)

Run = SpecMetrics | Completion | Sequence[Completion]
LOOKS = (
    (BLUE, "o", "-"),
    (VERMILLION, "s", "--"),
    (GREEN, "^", "-."),
    (ORANGE, "D", ":"),
    (PURPLE, "v", "-"),
)


def acceptance(
    *runs: Run, labels: Sequence[str] = (), confidence: float = 0.95, ax: Axes | None = None
) -> Axes:
    """Share of steps that accepted a draft at position 1, 2, ..., of those whose tree reached it.

    Bars are Wilson intervals, which stay within 0 and 1 for few steps too (E. B. Wilson 1927). They take steps for
    independent of each other; steps of one text are alike, so take many texts. A run is a completion, several, or their
    `SpecMetrics`. Raises ValueError for no run, more runs than can be told apart, or a run that drafted nothing.
    """
    metrics = [_metrics(run) for run in runs]
    if not 1 <= len(metrics) <= len(LOOKS):
        raise ValueError(f"acceptance draws 1 to {len(LOOKS)} runs, not {len(metrics)}")
    if labels and len(labels) != len(runs):
        raise ValueError(f"labels={labels!r}: give one for each of the {len(runs)} runs, or none")
    ax = axes_for(ax, width=6.4, height=3.6 + 0.2 * len(metrics))
    for i, spec in enumerate(metrics):
        _draw(ax, spec, i, len(metrics), labels[i] if labels else "", confidence)
    deepest = max(len(spec.acceptance_rate_per_position) for spec in metrics)
    ax.set_xlim(0.5, deepest + 0.5)
    ax.set_ylim(0, 1.02)
    ax.set_xticks(range(1, deepest + 1))
    ax.set_xlabel("draft position (1 = next after the known token)", color=ink_on(ax))
    ax.set_ylabel("share of steps that accept it", color=ink_on(ax))
    ax.grid(axis="y", color=ink_on(ax), alpha=0.15)
    ax.set_axisbelow(True)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(True)
    heading(ax, f"Acceptance by position, {confidence:.0%} Wilson intervals")
    legend_below(ax, ax.get_legend_handles_labels()[0], columns=1)
    return ax


def _metrics(run: Run) -> SpecMetrics:
    spec = (
        run
        if isinstance(run, SpecMetrics)
        else run.spec
        if isinstance(run, Completion)
        else total(done.spec for done in run)
    )
    if not any(spec.draft_depths):
        raise ValueError("a run without a draft has no acceptance to show; set speculative_algorithm")
    return spec


def _draw(ax: Axes, spec: SpecMetrics, i: int, num_runs: int, label: str, confidence: float) -> None:
    positions, rates, low, high = intervals(spec, confidence)
    colour, marker, line = LOOKS[i]
    shift = (i - (num_runs - 1) / 2) * 0.12  # intervals of several runs beside each other
    note = f"accept length {spec.mean_acceptance_length:.2f} over {spec.verify_ct} steps"
    ax.errorbar(
        [p + shift for p in positions],
        rates,
        yerr=(low, high),
        color=colour,
        marker=marker,
        linestyle=line,
        capsize=3,
        linewidth=1.6,
        label=f"{label}: {note}" if label else note,
    )


def intervals(
    spec: SpecMetrics, confidence: float = 0.95
) -> tuple[list[int], list[float], list[float], list[float]]:
    """(positions, rates, how far the interval goes below, above)."""
    from scipy.stats import binomtest

    rates = list(spec.acceptance_rate_per_position)
    positions = list(range(1, len(rates) + 1))
    low, high = [], []
    for position, rate in zip(positions, rates, strict=True):
        reached = sum(depth >= position for depth in spec.draft_depths)
        ci = binomtest(round(rate * reached), reached).proportion_ci(confidence, method="wilson")
        low.append(max(rate - ci.low, 0.0))
        high.append(max(ci.high - rate, 0.0))
    return positions, rates, low, high
