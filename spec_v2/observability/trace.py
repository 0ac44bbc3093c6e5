"""Spans of each step on three lanes: what the host decided, what the forward stream ran, what was copied.

Kept cheaply: one tuple per span in a bounded deque; nothing is formatted until somebody looks.
"""

import gzip
import json
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spec_v2.observability.markup import table

LANES = ("host", "forward", "copy")
THREADS = {lane: number for number, lane in enumerate(LANES, start=1)}
PROCESS = 100  # no lane's number: Perfetto calls a thread with its process's number the main thread


@dataclass(frozen=True, slots=True)
class Span:
    """`start_us` and `duration_us` in microseconds since the trace began; `step` counts scheduler steps."""

    lane: str
    name: str
    step: int
    start_us: float
    duration_us: float


class Trace:
    """The newest `max_spans` spans. `spans()` gives them in start order."""

    def __init__(self, max_spans: int = 100_000) -> None:
        self._raw: deque[tuple[str, str, int, Any, Any]] = deque(maxlen=max_spans)
        self._settings: deque[tuple[int, int, tuple[int, int, int]]] = deque(maxlen=max_spans)
        self._origin_ns = time.perf_counter_ns()
        # Recorded launches of a step are joined, which is faster, unless each is to have its own span.
        self.separate_launches = False
        self._device_origin: Any = None
        self._device_origin_ns = 0

    @contextmanager
    def span(self, lane: str, name: str, step: int) -> Iterator[None]:
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self._raw.append((lane, name, step, start, time.perf_counter_ns()))

    @contextmanager
    def device_span(self, lane: str, name: str, step: int, stream: Any) -> Iterator[None]:
        """A span on a card's stream, timed by events that are read only by `spans()`."""
        make_event = torch.get_device_module(stream.device).Event
        if self._device_origin is None:
            stream.synchronize()
            self._device_origin = make_event(enable_timing=True)
            self._device_origin.record(stream)
            self._device_origin_ns = time.perf_counter_ns()
        start, end = make_event(enable_timing=True), make_event(enable_timing=True)
        start.record(stream)
        try:
            yield
        finally:
            end.record(stream)
            self._raw.append((lane, name, step, start, end))

    def note_setting(self, step: int, setting: tuple[int, int, int]) -> None:
        """The decode step that begins drafts with these (`num_steps`, `topk`, `num_draft_tokens`)."""
        self._settings.append((step, time.perf_counter_ns(), setting))

    def settings(self) -> dict[int, tuple[int, int, int]]:
        """Step -> (`num_steps`, `topk`, `num_draft_tokens`), for the newest decode steps in launch order."""
        return {step: setting for step, _, setting in self._settings}

    def spans(self) -> list[Span]:
        """All spans in start order. Waits for device spans that have not ended."""
        return sorted((self._resolve(raw) for raw in list(self._raw)), key=lambda s: s.start_us)

    def clear(self) -> None:
        self._raw.clear()
        self._settings.clear()

    def order(self, *names: str) -> list[tuple[str, int]]:
        """(name, step) of the host's spans in the order in which they began, only the names given."""
        return [(s.name, s.step) for s in self.spans() if s.lane == "host" and s.name in names]

    def to_perfetto(
        self, path: str | Path, steps: Container[int] | None = None, notes: Mapping[str, Any] | None = None
    ) -> Path:
        """Write Chrome/Perfetto trace JSON (times in microseconds), one thread per lane. Returns the path.

        Arrows lead from a step's launch to its first run, to its copy, and to where the host processes it.

        A path that ends in .gz is compressed, which Perfetto reads too. `steps`: these only. `notes`: kept in the
        file, beside the events.
        """
        heads: list[dict[str, Any]] = [
            {"ph": "M", "pid": PROCESS, "name": "process_name", "args": {"name": "spec_v2 engine"}}
        ]
        heads += [
            {"ph": "M", "pid": PROCESS, "tid": tid, "name": name, "args": value}
            for lane, tid in THREADS.items()
            for name, value in (("thread_name", {"name": lane}), ("thread_sort_index", {"sort_index": tid}))
        ]
        spans = [s for s in self.spans() if steps is None or s.step in steps]
        events: list[dict[str, Any]] = [
            {
                "ph": "X",
                "pid": PROCESS,
                "tid": THREADS[s.lane],
                "name": s.name,
                "ts": s.start_us,
                "dur": s.duration_us,
                "args": {"step": s.step},
            }
            for s in spans
        ]
        events += [
            {
                "ph": "C",  # a counter: a curve above the lanes
                "pid": PROCESS,
                "name": "draft setting",
                "ts": (ns - self._origin_ns) / 1e3,
                "args": dict(zip(("num_steps", "topk", "num_draft_tokens"), setting, strict=True)),
            }
            for _, ns, setting in list(self._settings)
        ]
        events += _flow_events(spans)
        events.sort(key=lambda e: e["ts"])  # stable: a span is there before the arrows that begin with it
        path = Path(path)
        kept = {"traceEvents": heads + events, "displayTimeUnit": "ms"} | (
            {"otherData": dict(notes)} if notes else {}
        )
        data = json.dumps(kept).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path

    def __repr__(self) -> str:
        return f"Trace({len(self._raw)} spans)"

    def _repr_html_(self) -> str:
        """What took how long, by lane, and the newest spans."""
        spans = self.spans()
        times = defaultdict[tuple[str, str], list[float]](list)
        for s in spans:
            times[s.lane, s.name].append(s.duration_us / 1e3)
        by_name = sorted(times.items(), key=lambda item: (LANES.index(item[0][0]), -sum(item[1])))
        last = spans[-12:]
        return table(
            "Trace: what ran on each lane, longest first",
            ("lane", "what", "times", "median (ms)", "in all (ms)"),
            (
                (lane, name, len(took), f"{statistics.median(took):.2f}", f"{sum(took):.1f}")
                for (lane, name), took in by_name
            ),
        ) + table(
            f"Trace: the newest {len(last)} of {len(spans)} spans",
            ("step", "lane", "what", "start (ms)", "took (ms)"),
            ((s.step, s.lane, s.name, f"{s.start_us / 1e3:.2f}", f"{s.duration_us / 1e3:.2f}") for s in last),
        )

    def _resolve(self, raw: tuple[str, str, int, Any, Any]) -> Span:
        lane, name, step, start, end = raw
        if isinstance(start, int):
            return Span(lane, name, step, (start - self._origin_ns) / 1e3, (end - start) / 1e3)
        end.synchronize()
        assert self._device_origin is not None
        offset_us = (self._device_origin_ns - self._origin_ns) / 1e3
        start_us = offset_us + self._device_origin.elapsed_time(start) * 1e3
        return Span(lane, name, step, start_us, start.elapsed_time(end) * 1e3)


def _flow_events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Arrows of each step: launch -> first run on the forward lane, last run -> copy, copy -> process."""
    lanes = defaultdict[int, dict[str, list[Span]]](lambda: defaultdict(list))
    for s in spans:
        if s.lane != "host" or s.name in ("launch", "process"):
            lanes[s.step][s.name if s.lane == "host" else s.lane].append(s)
    events: list[dict[str, Any]] = []
    for step, parts in lanes.items():
        stops = (("launch", 0), ("forward", 0)), (("forward", -1), ("copy", 0)), (("copy", 0), ("process", 0))
        for (start, first), (end, last) in stops:
            if parts[start] and parts[end]:
                events += _flow(len(events), step, parts[start][first], parts[end][last])
    return events


def _flow(number: int, step: int, start: Span, end: Span) -> Iterable[dict[str, Any]]:
    """One arrow. Its ends lie within the spans that they belong to, in order of time.

    Perfetto binds an end to the span that is open at its time, and a span is closed at its last moment. So an arrow that
    leaves at the end leaves just before it.
    """
    arrives = max(end.start_us, start.start_us if start.name == "launch" else _last_moment(start))
    arrives = min(arrives, _last_moment(end))
    leaves = start.start_us if start.name == "launch" else min(_last_moment(start), arrives)
    name = f"step {step}"
    for ph, s, ts in (("s", start, leaves), ("f", end, arrives)):
        event = {"ph": ph, "pid": PROCESS, "tid": THREADS[s.lane], "ts": ts, "id": number, "cat": "step"}
        yield event | {"name": name} | ({"bp": "e"} if ph == "f" else {})


def _last_moment(span: Span) -> float:
    """A time within the span, close to its end; Perfetto counts nanoseconds."""
    return span.start_us + max(span.duration_us - 0.01, span.duration_us / 2)


def read_perfetto(path: str | Path) -> list[Span]:
    """The spans of a file that `to_perfetto` wrote, in start order. Raises ValueError for another kind of file."""
    data = Path(path).read_bytes()
    try:
        events = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)["traceEvents"]
        lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
        spans = [
            Span(lanes[e["tid"]], e["name"], e["args"]["step"], float(e["ts"]), float(e["dur"]))
            for e in events
            if e["ph"] == "X"
        ]
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a trace that Trace.to_perfetto wrote ({error!r})") from error
    return sorted(spans, key=lambda s: s.start_us)
