"""Every figure: its labels do not touch, it reads on light and on dark, it draws where it is told to, and nothing else changes."""

import itertools
import math
import warnings

import matplotlib as mpl
import pytest
import torch
from matplotlib._pylab_helpers import Gcf
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from spec_v2 import SpecMetrics, plots
from spec_v2.observability.step_log import DecodeStep
from spec_v2.observability.trace import Span
from spec_v2.plots.draft_tree import layout
from spec_v2.plots.drawing import CellText, luminance, text_on, token_text
from spec_v2.plots.kv_slots import states
from spec_v2.plots.timeline import phase_of, window_of
from spec_v2.types import DraftTree

# A tree with three levels. The target takes node 2 (a second child), then node 5, then says its own.
TREE = DecodeStep(
    step=7,
    request_id=3,
    seq_len=10,
    tokens=(1, 2, 3, 4, 5, 6, 7, 8),
    parents=(-1, 0, 0, 0, 1, 2, 2, 5),
    scores=(1.0, 0.5, 0.4, 0.1, 0.25, 0.3, 0.1, 0.06),
    accept_index=(0, 2, 5),
    emitted=(3, 6, 9),
    num_kept=3,
    slots=tuple(range(40, 58)),
    pieces=(" the", " cat", " dog", "\n", "$x$", " </td><script>", "統", ""),
    emitted_pieces=(" dog", " </td><script>", " barks"),
)
OTHER = DecodeStep(
    **{f: getattr(TREE, f) for f in TREE.__slots__}
    | {"request_id": 4, "seq_len": 1, "slots": tuple(range(80, 89)), "accept_index": (0,), "emitted": (9,)}
    | {"emitted_pieces": (" no",), "num_kept": 1}
)


def chain(length):
    """A chain of long words, none accepted."""
    return DecodeStep(
        step=0,
        request_id=0,
        seq_len=0,
        tokens=tuple(range(length)),
        parents=tuple(range(-1, length - 1)),
        scores=tuple(0.5**j for j in range(length)),
        accept_index=(0,),
        emitted=(5,),
        num_kept=1,
        slots=tuple(range(length)),
        pieces=tuple(f" incomprehensibility{j}" for j in range(length)),
        emitted_pieces=(" x",),
    )


def bushy(width):
    """A root with `width` children."""
    return DecodeStep(
        step=0,
        request_id=0,
        seq_len=5,
        tokens=tuple(range(width + 1)),
        parents=(-1, *[0] * width),
        scores=(1.0, *[1 / width] * width),
        accept_index=(0, width),
        emitted=(width, 3),
        num_kept=2,
        slots=tuple(range(width + 6)),
        pieces=tuple(f" word{j}" for j in range(width + 1)),
        emitted_pieces=(" a", " b"),
    )


def spans_of(period, *, ahead):
    """Six steps of `period` ms; with `ahead`, the host launches a step while the one before it runs."""
    spans = []
    for step in range(6):
        t = step * period * 1e3
        launch = t - 0.8 * period * 1e3 if ahead and step else t - 40
        spans += [
            ("host", "schedule", step, launch - 30, 20),
            ("host", "launch", step, launch, 30),
            ("forward", "resolve", step, t, 10),
            ("forward", "draft", step, t + 10, 0.2 * period * 1e3),
            ("forward", "verify", step, t + 0.3 * period * 1e3, 0.5 * period * 1e3),
            ("forward", "publish", step, t + 0.8 * period * 1e3, 3),
            ("forward", "draft_extend", step, t + 0.81 * period * 1e3, 0.1 * period * 1e3),
            ("copy", "copy", step, t + 0.92 * period * 1e3, 4),
            ("host", "process", step, t + 0.5 * period * 1e3, 0.43 * period * 1e3),
        ]
    return [Span(lane, name, step, float(t), float(took)) for lane, name, step, t, took in spans]


METRICS = SpecMetrics(accept_lens=(1, 2, 3, 4, 1, 1, 2), draft_depths=(3,) * 7)
REPORT = {
    "cells": [
        {
            "contender": f"{name} overlap",
            "algorithm": name,
            "prompts": kind,
            "batch_size": 8,
            "cost_model": {"predicted_speedup": 1.5, "measured_speedup": 1.4},
            "ratios": {"plain": {"decode": {"median": 1.4, "min": 1.3, "max": 1.45}}},
        }
        for name in ("NGRAM", "EAGLE3", "STANDALONE")
        for kind in ("copy", "free")
    ]
    + [
        {"contender": "plain", "algorithm": "none", "prompts": "copy", "batch_size": 8, "cost_model": None},
    ]
}
SUITE = {
    "rows": [
        {
            "name": f"8b-chain-{i}",
            "unit": "tok/s",
            "predicted": 300.0 * 4**i,
            "measured": {"median": 200.0 * 4**i, "min": 190.0 * 4**i, "max": 220.0 * 4**i},
        }
        for i in range(5)
    ]
}
BARE = DraftTree(
    tokens=torch.tensor([[7, 10, 11, 20]]),
    parents=torch.tensor([[-1, 0, 0, 1]]),
    scores=torch.tensor([[1.0, 0.6, 0.3, 0.42]]),
    match_lens=torch.zeros(1, dtype=torch.long),
    draft_probs=torch.empty(1, 0, 0),
)

FIGURES = {
    "draft_tree": lambda ax=None: plots.draft_tree(TREE, ax=ax),
    "draft_tree of a chain": lambda ax=None: plots.draft_tree(chain(9), ax=ax),
    "draft_tree of a bush": lambda ax=None: plots.draft_tree(bushy(31), ax=ax),
    "draft_tree without a verdict": lambda ax=None: plots.draft_tree(BARE, ax=ax),
    "tree_mask": lambda ax=None: plots.tree_mask(TREE, ax=ax),
    "tree_mask of a bush": lambda ax=None: plots.tree_mask(bushy(31), ax=ax),
    "tree_mask without a verdict": lambda ax=None: plots.tree_mask(BARE, ax=ax),
    "timeline": lambda ax=None: plots.timeline(spans_of(1.3, ahead=False), ax=ax),
    "timeline of two": lambda ax=None: plots.timeline(
        spans_of(1.3, ahead=False), spans_of(1.1, ahead=True), labels=["sync", "overlap"], ax=ax
    ),
    "acceptance": lambda ax=None: plots.acceptance(METRICS, ax=ax),
    "acceptance of five": lambda ax=None: plots.acceptance(*[METRICS] * 5, labels=list("abcde"), ax=ax),
    "kv_slots": lambda ax=None: plots.kv_slots(TREE, ax=ax),
    "kv_slots of two": lambda ax=None: plots.kv_slots([TREE, OTHER], ax=ax),
    "speedup_model": lambda ax=None: plots.speedup_model(REPORT, ax=ax),
    "speedup_model of a suite": lambda ax=None: plots.speedup_model(SUITE, ax=ax),
}


@pytest.fixture(params=FIGURES)
def draw(request):
    return FIGURES[request.param]


@pytest.fixture(autouse=True)
def closed():
    """pyplot's list of figures is empty before and after each test."""
    assert not Gcf.figs
    yield
    Gcf.destroy_all()


def own_axes(facecolor="white", size=(9, 6)):
    figure = Figure(figsize=size, facecolor=facecolor)
    FigureCanvasAgg(figure)
    ax = figure.add_subplot()
    ax.set_facecolor(facecolor)
    return ax


def visible_texts(figure):
    """(text, its box in pixels) of everything written in the figure."""
    figure.canvas.draw()
    found, hidden = [], ticks_out_of_view(figure)
    for text in figure.findobj(Text):
        if not text.get_visible() or not text.get_text().strip():
            continue
        if id(text) in hidden:
            continue
        found.append((text, text.get_window_extent()))
    return found


def ticks_out_of_view(figure):
    """Ids of the labels of ticks that matplotlib keeps but does not draw."""
    hidden = set()
    for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
        drawn = {id(label) for tick in axis._update_ticks() for label in (tick.label1, tick.label2)}
        kept = {
            id(label) for tick in (*axis.majorTicks, *axis.minorTicks) for label in (tick.label1, tick.label2)
        }
        hidden |= kept - drawn
    return hidden


def collisions(figure):
    """Pairs of texts whose boxes share more than a pixel's edge, and texts that leave the figure."""
    texts = visible_texts(figure)
    width, height = figure.canvas.get_width_height()
    faults = [
        (a.get_text(), b.get_text())
        for (a, p), (b, q) in itertools.combinations(texts, 2)
        if min(p.x1, q.x1) - max(p.x0, q.x0) > 1 and min(p.y1, q.y1) - max(p.y0, q.y0) > 1
    ]
    outside = [
        t.get_text() for t, p in texts if p.x0 < -1 or p.y0 < -1 or p.x1 > width + 1 or p.y1 > height + 1
    ]
    return faults + outside


def test_labels_do_not_touch(draw):
    figure = draw().figure
    assert len(visible_texts(figure)) > 5
    assert not collisions(figure)


@pytest.mark.parametrize("size", [(4, 3), (7, 5), (14, 9)])
def test_labels_do_not_touch_in_axes_of_another_size(draw, size):
    ax = own_axes(size=size)
    draw(ax)
    names = {id(t) for t in ax.texts if isinstance(t, CellText)}
    drawn = [(t, p) for t, p in visible_texts(ax.figure) if id(t) in names]
    for (a, p), (b, q) in itertools.combinations(drawn, 2):
        overlap = min(p.x1, q.x1) - max(p.x0, q.x0) > 1 and min(p.y1, q.y1) - max(p.y0, q.y0) > 1
        assert not overlap, (a.get_text(), b.get_text())


def test_the_check_of_collisions_notices():
    ax = own_axes()
    ax.text(0.5, 0.5, "one")
    ax.text(0.51, 0.5, "two")
    ax.text(0.99, 0.1, "far too long for the place where it begins" * 3)
    assert ("one", "two") in collisions(ax.figure)
    assert len(collisions(ax.figure)) > 1


def contrast(one, two):
    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("background", ["white", "#111111"])
def test_text_can_be_read_on_light_and_dark(draw, background):
    ax = own_axes(background)
    draw(ax)
    for text, _ in visible_texts(ax.figure):
        on_page = contrast(text.get_color(), background)
        on_bar = max(contrast(text.get_color(), p.get_facecolor()) for p in ax.patches) if ax.patches else 0
        is_bar_label = isinstance(text, CellText) and text.get_color() != text_on(background)
        assert (on_bar if is_bar_label else on_page) >= 4.5, text.get_text()


def test_a_figure_follows_a_dark_style():
    with mpl.rc_context({"figure.facecolor": "black", "axes.facecolor": "black"}):
        ax = plots.draft_tree(TREE)
    assert {luminance(t.get_color()) > 0.7 for t, _ in visible_texts(ax.figure)} == {True}


def test_axes_that_are_given_are_used_and_nothing_else_changes(draw):
    ax, before = own_axes(), dict(mpl.rcParams)
    assert draw(ax) is ax
    assert ax.figure.axes == [ax]
    assert not Gcf.figs
    assert dict(mpl.rcParams) == before


def test_without_axes_one_figure_is_made(draw):
    before = dict(mpl.rcParams)
    draw()
    assert len(Gcf.figs) == 1
    assert dict(mpl.rcParams) == before


def test_drawing_twice_gives_the_same_picture(draw):
    pictures = []
    for _ in range(2):
        figure = draw().figure
        figure.canvas.draw()
        pictures.append(bytes(figure.canvas.buffer_rgba()))
    assert pictures[0] == pictures[1]


def test_drawing_warns_of_nothing(draw):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw().figure.canvas.draw()


# --- what they say


def texts_of(ax):
    return [t.get_text() for t, _ in visible_texts(ax.figure)]


def test_a_tree_tells_what_became_of_each_draft():
    ax = plots.draft_tree(TREE)
    said = texts_of(ax)
    assert ax.get_title(loc="left") == "2 of 7 drafts accepted + 1 bonus = 3 tokens from one forward"
    for label in ("✓ ␣dog\n0.40", "✗ ␣cat\n0.50", "$x$\n0.50", "★ ␣barks\nbonus", "␣the\nroot", "✗ ↵\n0.10"):
        assert label in said, label
    assert "\\u7d71" in "".join(said), "what the font lacks is written as an escape"
    assert {"✓ accepted", "not reached", "★ bonus, the target's own"} <= set(said)


def test_a_step_that_was_cut_says_so():
    cut = DecodeStep(**{f: getattr(TREE, f) for f in TREE.__slots__} | {"num_kept": 1})
    assert plots.draft_tree(cut).get_title(loc="left").endswith("of which 1 were kept")


def test_a_bare_tree_has_no_verdict():
    said = texts_of(plots.draft_tree(BARE, decode=lambda token: f"t{token}"))
    assert "t20\n0.70" in said
    assert not any(sign in text for text in said for sign in "✓✗★")


def test_each_leaf_has_a_row_and_parents_lie_between_their_children():
    places, num_rows = layout(TREE)
    assert num_rows == 5
    assert sorted(y for node, (_, y) in places.items() if node in (-1, 7, 6, 4, 3)) == [0, 1, 2, 3, 4]
    assert places[0][0] == 0
    assert places[-1][0] == 3, "the bonus token follows node 5"
    assert places[1][1] == places[4][1]
    assert places[5][1] == (places[-1][1] + places[7][1]) / 2


def test_the_mask_shows_a_path_for_each_node():
    ax = plots.tree_mask(TREE)
    light = mpl.colors.to_rgba(ax.figure.get_facecolor())[:3]
    cells = ax.patches[: len(TREE.nodes) ** 2]
    dark = [1 - luminance(c.get_facecolor()[:3]) / luminance(light) > 0.2 for c in cells]
    rows = ["".join("1" if x else "0" for x in dark[8 * j : 8 * j + 8]) for j in range(8)]
    assert rows == [
        "10000000", "11000000", "10100000", "10010000",
        "11001000", "10100100", "10100010", "10100101",
    ]  # fmt: skip


def test_a_window_is_whole_periods_and_waiting_is_not_work():
    window = window_of(spans_of(2.0, ahead=False), num_steps=2, skip=1)
    assert (window.num_steps, window.length) == (2, pytest.approx(4.0))
    # resolve 0.01, draft 0.4, verify 1.0, publish 0.003, extend 0.2, of 2 ms
    assert window.busy("forward") == pytest.approx((0.01 + 0.4 + 1.0 + 0.003 + 0.2) / 2, abs=1e-6)
    assert window.idle("forward") == pytest.approx(2 - 1.613, abs=1e-6)
    # processing begins when the copy has ended, at 1.844 ms; the span ends at 1.86 ms
    assert window.busy("host") == pytest.approx((0.016 + 0.05) / 2, abs=1e-6)
    waits = [p for p in window.pieces if p.phase == "wait"]
    assert [p.end - p.start for p in waits] == pytest.approx([0.844] * 2)


def test_the_last_step_is_left_out_because_nothing_ends_its_period():
    assert window_of(spans_of(1.0, ahead=True), num_steps=99, skip=None).num_steps == 5


def test_launches_that_were_recorded_as_one_are_named_by_the_longest():
    names = ("resolve+draft+verify+publish", "draft_extend+stash", "pack", "prefill", "resolve+draft")
    assert [phase_of(name) for name in names] == ["verify", "extend", "other", "prefill", "draft"]


def test_a_file_and_its_trace_give_the_same_timeline(tmp_path):
    import json

    events = [
        {"ph": "M", "tid": i, "name": "thread_name", "args": {"name": lane}}
        for i, lane in enumerate(("host", "forward", "copy"))
    ]
    lanes = {"host": 0, "forward": 1, "copy": 2}
    spans = spans_of(1.0, ahead=True)
    events += [
        {
            "ph": "X",
            "tid": lanes[s.lane],
            "name": s.name,
            "ts": s.start_us,
            "dur": s.duration_us,
            "args": {"step": s.step},
        }
        for s in spans
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert texts_of(plots.timeline(path)) == texts_of(plots.timeline(spans))


def test_intervals_are_wilsons():
    ax = plots.acceptance(METRICS)
    [container] = ax.containers
    line, _, (bars,) = container.lines
    rates = line.get_ydata()
    assert list(rates) == [4 / 7, 2 / 7, 1 / 7]
    (low_end, high_end) = bars.get_segments()[0][:, 1]
    n, p, z = 7, 4 / 7, 1.959963984540054
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert (low_end, high_end) == (pytest.approx(middle - half), pytest.approx(middle + half))


def test_slots_after_a_step_hold_the_path_in_front():
    assert states(TREE, "before") == [("free", None)] * 8
    assert states(TREE, "verify") == [("draft", node) for node in range(8)]
    assert states(TREE, "after") == [
        ("accepted", 0), ("accepted", 2), ("accepted", 5), *(("left", node) for node in range(3, 8)),
    ]  # fmt: skip
    said = texts_of(plots.kv_slots(TREE))
    assert {"47", "50", "57"} <= set(said), "the slots of the tail and of the tree"
    assert "39" not in said
    assert {"✓␣dog", "✓␣</td><…"} <= set(said)
    assert "Step 7: keeps 3 of 8 slots, moves 2" in said


def test_predictions_and_measurements_are_those_of_the_report():
    ax = plots.speedup_model(REPORT)
    assert sum("overlap" in text for text in texts_of(ax)) == 6
    rings = [line for line in ax.lines if line.get_markerfacecolor() == "none"]
    assert [line.get_xdata()[0] for line in rings] == [1.5] * 6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.timeline(), "give a run"),
        (lambda: plots.timeline([], labels=["a"]), "no decode step"),
        (lambda: plots.timeline(spans_of(1, ahead=True), labels=["a", "b"]), "2 labels"),
        (lambda: plots.timeline([Span("forward", "prefill", 0, 0.0, 1.0)]), "at least two tokens"),
        (lambda: plots.acceptance(), "1 to 5 runs"),
        (lambda: plots.acceptance(SpecMetrics((1, 1), (0, 0))), "set speculative_algorithm"),
        (lambda: plots.acceptance(METRICS, labels=["a", "b"]), "one for each"),
        (lambda: plots.kv_slots([]), "one step"),
        (lambda: plots.kv_slots([TREE, chain(3)]), "same step"),
        (lambda: plots.speedup_model({"cells": []}), "has no prediction"),
        (lambda: plots.speedup_model({}), "give the JSON"),
    ],
)
def test_what_cannot_be_drawn_says_why(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_tokens_are_written_so_that_all_of_them_can_be_seen():
    assert [token_text(t) for t in (" a", "\n\n", "", "\x07", "$_$")] == ["␣a", "↵↵", "∅", "\\x07", "$_$"]
    assert token_text("incomprehensibility") == "incomprehensi…"
