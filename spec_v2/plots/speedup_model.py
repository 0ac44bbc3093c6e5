"""What the cost model promised, beside what was measured."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from spec_v2.plots.drawing import (
    BLUE,
    LARGEST,
    VERMILLION,
    CellText,
    Number,
    axes_for,
    heading,
    ink_on,
    legend_below,
)


@dataclass(frozen=True, slots=True)
class Pair:
    """One line of the figure: a prediction, and the median, least and greatest of what was measured."""

    label: str
    predicted: Number
    measured: Number
    least: Number
    greatest: Number


def speedup_model(report: Mapping[str, Any] | str | Path, *, ax: Axes | None = None) -> Axes:
    """Predicted (ring) and measured (dot, with its spread) on a line for each contender.

    `report`: a benchmark's JSON, loaded or by path. Of `bench --json` the speed-ups over plain decoding are drawn, predicted
    as tau / (v + k c + o) (`spec_v2.bench.cost_model`); of `bench --suite` the rates, predicted from the bytes and arithmetic
    of a step, which is an upper bound. Raises ValueError for a report without a prediction.
    """
    loaded = report if isinstance(report, Mapping) else json.loads(Path(report).read_text())
    pairs, unit = (
        (_speedups(loaded), "times plain decoding") if "cells" in loaded else (_rates(loaded), "tokens/s")
    )
    if not pairs:
        raise ValueError(
            "report: it has no prediction; give the JSON of `spec-v2 bench` with a speculative algorithm"
        )
    ax = axes_for(ax, width=7.0, height=1.5 + 0.3 * len(pairs))
    ink, labels = ink_on(ax), list[CellText]()
    for y, pair in enumerate(pairs):
        ax.plot([pair.predicted, pair.measured], [y, y], color=ink, alpha=0.35, linewidth=1, zorder=1)
        ax.plot([pair.least, pair.greatest], [y, y], color=BLUE, linewidth=3.5, alpha=0.5, zorder=2)
        ax.plot(
            pair.predicted, y, "o", markersize=9, markerfacecolor="none", color=VERMILLION, mew=1.6, zorder=3
        )
        ax.plot(pair.measured, y, "o", markersize=5, color=BLUE, zorder=4)
        CellText(
            ax, -0.01, y, pair.label,
            width=1.0, height=0.9, group=labels, ha="right", transform=ax.get_yaxis_transform(), largest=LARGEST - 1,
        )  # fmt: skip
    ax.set_yticks(range(len(pairs)), [""] * len(pairs))
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(pairs) - 0.4, -0.6)
    ax.xaxis.tick_top()
    ax.grid(axis="both", color=ink, alpha=0.12)
    ax.set_axisbelow(True)
    if unit == "tokens/s":
        ax.set_xscale("log")
    else:
        ax.set_xlim(0, 1.08 * max(max(pair.predicted, pair.greatest, 1.0) for pair in pairs))  # rings whole
        ax.axvline(1, color=ink, linewidth=1, linestyle="--", alpha=0.7)
    heading(ax, f"Predicted and measured: {unit}")
    ring = Line2D([], [], color=VERMILLION, marker="o", mfc="none", ls="", markersize=9, label="predicted")
    dot = Line2D([], [], color=BLUE, marker="o", lw=3.5, markersize=5, label="measured: median and spread")
    handles = [ring, dot]
    if unit != "tokens/s":
        handles.append(Line2D([], [], color=ink, ls="--", lw=1, label="plain decoding"))
    legend_below(ax, handles, columns=3)
    return ax


def _speedups(report: Mapping[str, Any]) -> list[Pair]:
    pairs = []
    for cell in report["cells"]:
        model = cell.get("cost_model")
        # plain decoding against itself, and forced acceptance, say nothing about a drafter's speed-up
        if model is None or cell["algorithm"] in (None, "none") or "measured_speedup" not in model:
            continue
        spread = cell["ratios"]["plain"]["decode"]
        label = f"{cell['contender']}, {cell['prompts']}, batch {cell['batch_size']}"
        pairs.append(Pair(label, model["predicted_speedup"], spread["median"], spread["min"], spread["max"]))
    return pairs


def _rates(report: Mapping[str, Any]) -> list[Pair]:
    return [
        Pair(row["name"], row["predicted"], *(row["measured"][key] for key in ("median", "min", "max")))
        for row in report.get("rows", ())
        if row["unit"] == "tok/s" and row.get("predicted") and row.get("measured")
    ]
