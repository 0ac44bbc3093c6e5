"""Spans of each step on three lanes: what the host decided, what the forward stream ran, what was copied.

Kept cheaply: one tuple per span in a bounded deque; nothing is formatted until somebody looks.
"""

import gzip
import json
import time
from collections import deque
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

LANES = ("host", "forward", "copy")


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

        A path that ends in .gz is compressed, which Perfetto reads too. `steps`: these only. `notes`: kept in the
        file, beside the events.
        """
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": lane}}
            for tid, lane in enumerate(LANES)
        ]
        events += [
            {
                "ph": "X",
                "pid": 1,
                "tid": LANES.index(s.lane),
                "name": s.name,
                "ts": s.start_us,
                "dur": s.duration_us,
                "args": {"step": s.step},
            }
            for s in self.spans()
            if steps is None or s.step in steps
        ]
        events += [
            {
                "ph": "C",  # a counter: a curve above the lanes
                "pid": 1,
                "name": "draft setting",
                "ts": (ns - self._origin_ns) / 1e3,
                "args": dict(zip(("num_steps", "topk", "num_draft_tokens"), setting, strict=True)),
            }
            for _, ns, setting in list(self._settings)
        ]
        path = Path(path)
        kept = {"traceEvents": events, "displayTimeUnit": "ms"} | (
            {"otherData": dict(notes)} if notes else {}
        )
        data = json.dumps(kept).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path

    def __repr__(self) -> str:
        return f"Trace({len(self._raw)} spans)"

    def _repr_html_(self) -> str:
        spans = self.spans()
        last = spans[-12:]
        rows = "".join(
            f"<tr><td>{s.step}</td><td>{s.lane}</td><td>{s.name}</td>"
            f"<td>{s.start_us / 1e3:.2f}</td><td>{s.duration_us / 1e3:.2f}</td></tr>"
            for s in last
        )
        return (
            f"<table><caption>Trace: the newest {len(last)} of {len(spans)} spans</caption><tr><th>step</th>"
            f"<th>lane</th><th>what</th><th>start (ms)</th><th>took (ms)</th></tr>{rows}</table>"
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
