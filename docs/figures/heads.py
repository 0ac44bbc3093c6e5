"""Draws heads.svg: how the draft models that come with the package learned, from their own curves.

python docs/figures/heads.py [file.svg]
"""

import json
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spec_v2.models.shipped import CHECKPOINTS

KINDS = {  # Okabe and Ito's colours; each line has a mark of its own too
    "eagle3": ("EAGLE-3", "#0072B2", "o"),
    "mtp": ("MTP modules", "#D55E00", "s"),
    "frozen_kv_mtp": ("Frozen-KV head", "#009E73", "^"),
    "eagle": ("EAGLE", "#CC79A7", "D"),
    "standalone": ("Small LM", "#8C8C8C", "v"),
}
INK, QUIET = "#1b1f24", "#6b7280"


def first_draft(kind: str) -> tuple[list[float], list[float]]:
    """(millions of tokens seen, agreement of the first draft), on the held-out answers, teacher-forced."""
    lines = map(json.loads, (CHECKPOINTS / "smollm2-135m" / kind / "curve.jsonl").read_text().splitlines())
    points = [(line["tokens"] / 1e6, line["heldout"]["agreement"][0]) for line in lines if "heldout" in line]
    tokens, agreement = zip(*points, strict=True)
    return list(tokens), list(agreement)


def draw(ax: Axes) -> None:
    for kind, (title, colour, mark) in KINDS.items():
        tokens, agreement = first_draft(kind)
        ax.plot(tokens, agreement, color=colour, marker=mark, markersize=4.5, lw=1.6, label=title)
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks := (1, 2, 4, 8, 16, 32, 64, 128), [str(t) for t in ticks])
    ax.set_xlim(0.9, 210)
    ax.set_ylim(0, 0.85)
    ax.set_xlabel("tokens seen in training, millions", color=INK)
    ax.set_title(
        "first draft = the target's choice, share of held-out tokens", loc="left", fontsize=10, color=INK
    )
    ax.grid(axis="y", color="#d8dde3", lw=0.6)
    ax.tick_params(colors=QUIET)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.legend(frameon=False, fontsize=9, labelcolor=INK, loc="upper left")


def main(path: Path) -> None:
    with mpl.rc_context({"svg.hashsalt": "heads", "svg.fonttype": "none", "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(7.0, 3.6), layout="constrained", facecolor="white")
        draw(figure.add_subplot())
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg")))
