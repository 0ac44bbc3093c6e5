"""The trace: bounded, in start order, three lanes, and a file that Perfetto reads."""

import json
from itertools import pairwise

import pytest

from spec_v2.observability import trace as trace_module
from spec_v2.observability.trace import LANES, Span, Trace, read_perfetto
from tests.harness import CHAIN
from tests.scheduling_helpers import greedy, scene_engine
from tests.tiny_models import llama


def record(trace, lane, name, step):
    with trace.span(lane, name, step):
        pass


def test_spans_come_in_start_order_whenever_they_end():
    trace = Trace()
    with trace.span("host", "outer", 1):
        record(trace, "forward", "inner", 2)
    outer, inner = trace.spans()
    assert [(s.lane, s.name, s.step) for s in (outer, inner)] == [
        ("host", "outer", 1),
        ("forward", "inner", 2),
    ]
    assert outer.start_us <= inner.start_us
    assert inner.start_us + inner.duration_us <= outer.start_us + outer.duration_us
    assert min(outer.start_us, inner.duration_us) >= 0


def test_a_span_whose_body_raises_is_kept():
    trace = Trace()
    with pytest.raises(KeyError), trace.span("host", "launch", 0):
        raise KeyError
    assert trace.order("launch") == [("launch", 0)]


def test_order_is_about_the_hosts_spans_with_these_names():
    trace = Trace()
    for lane, name, step in (
        ("host", "launch", 0),
        ("host", "schedule", 1),
        ("forward", "launch", 7),
        ("host", "process", 0),
    ):
        record(trace, lane, name, step)
    assert trace.order("launch", "process") == [("launch", 0), ("process", 0)]
    assert trace.order() == []


def test_only_the_newest_spans_are_kept():
    trace = Trace(max_spans=3)
    for step in range(5):
        record(trace, "host", "launch", step)
    assert trace.order("launch") == [("launch", 2), ("launch", 3), ("launch", 4)]
    assert repr(trace) == "Trace(3 spans)"
    trace.clear()
    assert trace.spans() == []


def test_an_empty_trace_can_be_shown_and_written(tmp_path):
    trace = Trace()
    assert "the newest 0 of 0 spans" in trace._repr_html_()
    events = json.loads(trace.to_perfetto(tmp_path / "empty.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M"}


def test_the_table_shows_the_newest_spans():
    trace = Trace()
    for step in range(20):
        record(trace, "host", "launch", step)
    html = trace._repr_html_()
    assert "the newest 12 of 20 spans" in html
    assert '<th scope="row">19</th><td>host</td><td>launch</td>' in html
    assert '<th scope="row">7</th>' not in html


@pytest.fixture
def engine(device, schedule):
    with scene_engine("STANDALONE", device, schedule=schedule) as made:
        made.generate([(1, 2, 3), (4, 5)], greedy(7))
        yield made


def test_a_run_leaves_all_lanes_and_all_steps(engine):
    spans = engine.trace.spans()
    assert {s.lane for s in spans} == set(LANES)
    steps = range(engine.scheduler.num_steps_launched)
    for name in ("launch", "process", "verdict", "publish", "draft_extend", "stash", "pack", "copy"):
        wanted = steps if name != "verdict" else [0]
        assert [s.step for s in spans if s.name == name] == list(wanted), name
    names = {s.name for s in spans if s.lane == "forward"}
    assert names == {
        "row_table",
        "prefill",
        "verdict",
        "resolve",
        "draft",
        "verify",
        "publish",
        "draft_extend",
        "stash",
        "pack",
    }


def test_spans_of_a_lane_do_not_overlap(engine):
    for lane in LANES:
        spans = [s for s in engine.trace.spans() if s.lane == lane]
        for one, next_one in pairwise(spans):
            assert one.start_us + one.duration_us <= next_one.start_us + 1e-3, (one, next_one)


def test_a_copy_begins_after_its_step_was_stashed(engine):
    spans = engine.trace.spans()
    stashed = {s.step: s.start_us + s.duration_us for s in spans if s.name == "stash"}
    copied = {s.step: s.start_us for s in spans if s.name == "copy"}
    assert set(copied) == set(stashed)
    assert all(copied[step] >= stashed[step] for step in copied)


def test_the_file_is_what_perfetto_reads(engine, tmp_path):
    path = engine.trace.to_perfetto(str(tmp_path / "trace.json"))
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert list(names.values()) == list(LANES)
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(engine.trace.spans())
    for event, span in zip(spans, engine.trace.spans(), strict=True):
        assert (names[event["tid"]], event["name"], event["args"]["step"]) == (
            span.lane,
            span.name,
            span.step,
        )
        assert (event["ts"], event["dur"]) == (span.start_us, span.duration_us)


def test_a_cleared_trace_goes_on(open_engine, device):
    engine = open_engine(llama(device), None, None, CHAIN)
    engine.generate([(1, 2)], greedy(3))
    engine.trace.clear()
    engine.generate([(1, 2)], greedy(3))
    assert [name for name, _ in engine.trace.order("launch")] == ["launch"] * 3


def test_arrows_lead_from_a_launch_to_its_run_its_copy_and_its_processing(engine, tmp_path):
    events = json.loads(engine.trace.to_perfetto(tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]

    def under(event):
        """The span that an end of an arrow lies in."""
        [found] = [
            s
            for s in spans
            if s["tid"] == event["tid"]
            and s["args"]["step"] == int(event["name"].removeprefix("step "))
            and s["ts"] <= event["ts"] <= s["ts"] + s["dur"]
            and s["name"] not in ("schedule",)
        ][-1:]
        return found["name"]

    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts
    assert set(starts) == set(ends)
    assert len({e["name"] for e in starts.values()}) == engine.scheduler.num_steps_launched
    legs = set()
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"]
        assert end["bp"] == "e"
        legs.add((lanes[start["tid"]], lanes[end["tid"]]))
        if lanes[start["tid"]] == "host":
            assert under(start) == "launch"
        if lanes[end["tid"]] == "copy":
            assert under(end) == "copy"
        if lanes[end["tid"]] == "host":
            assert under(end) == "process"
    assert legs == {("host", "forward"), ("forward", "copy"), ("copy", "host")}


def open_spans(spans, event):
    """The spans of its lane that Perfetto has open, in whole nanoseconds, when it meets `event`."""
    now = int(event["ts"] * 1e3)
    starts = [(int(s["ts"] * 1e3), int(s["dur"] * 1e3), s) for s in spans if s["tid"] == event["tid"]]
    return [s for start, took, s in starts if start <= now < start + took]


def test_the_file_keeps_to_the_trace_event_format(engine, tmp_path):
    events = json.loads(engine.trace.to_perfetto(tmp_path / "trace.json").read_text())["traceEvents"]
    heads = [e for e in events if e["ph"] == "M"]
    assert events[: len(heads)] == heads, "names come first"
    assert [e["args"]["name"] for e in heads if e["name"] == "process_name"] == ["spec_v2 engine"]
    order = {e["tid"]: e["args"]["sort_index"] for e in heads if e["name"] == "thread_sort_index"}
    names = {e["tid"]: e["args"]["name"] for e in heads if e["name"] == "thread_name"}
    assert [names[tid] for tid in sorted(order, key=order.get)] == list(LANES)
    assert not {e["pid"] for e in events} & set(names), "Perfetto calls such a thread the main thread"
    timed = events[len(heads) :]
    assert {e["ph"] for e in timed} == {"X", "C", "s", "f"}
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed)
    for event in timed:
        assert event["ts"] >= 0
        assert event["name"]
        assert event["ph"] != "X" or event["dur"] >= 0
        assert event["ph"] != "C" or all(isinstance(value, int) for value in event["args"].values())


def test_both_ends_of_an_arrow_lie_in_spans_that_are_open_then(engine, tmp_path):
    events = json.loads(engine.trace.to_perfetto(tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    arrows = [e for e in events if e["ph"] in "sf"]
    assert len({(e["id"], e["ph"]) for e in arrows}) == len(arrows) > 20
    for end in arrows:
        step = int(end["name"].removeprefix("step "))
        assert [s["args"]["step"] for s in open_spans(spans, end)] == [step], end
    first = {}
    for place, event in enumerate(events):
        if event["ph"] == "X":
            first.setdefault((event["tid"], event["args"]["step"]), place)
        elif event["ph"] in "sf":  # a reader that goes through the file once has met the span
            assert first[event["tid"], int(event["name"].removeprefix("step "))] < place


@pytest.mark.parametrize("lead", [0.0, 5.0, 60.0])
def test_an_arrow_between_spans_of_two_clocks_stays_within_both(lead):
    """A card's clock and the host's differ by some microseconds, so an effect may seem to come first."""
    cause = Span("forward", "pack", 3, 100.0, 20.0)
    effect = Span("copy", "copy", 3, 120.0 - lead, 8.0)
    leaves, arrives = trace_module._flow(0, 3, cause, effect)
    assert cause.start_us <= leaves["ts"] < cause.start_us + cause.duration_us or lead == 60
    assert effect.start_us <= arrives["ts"] < effect.start_us + effect.duration_us
    assert leaves["ts"] <= arrives["ts"]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_file_can_be_read_back(engine, tmp_path, name):
    assert read_perfetto(engine.trace.to_perfetto(tmp_path / name)) == engine.trace.spans()


@pytest.mark.parametrize("text", ["{}", "[]", "not JSON", '{"traceEvents": [{"ph": "X"}]}'])
def test_another_file_is_refused(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=r"other\.json: not a trace"):
        read_perfetto(tmp_path / "other.json")
