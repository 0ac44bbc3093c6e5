"""Faults that a test puts into an engine, by the launch that they strike and by the request that brings them."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from tests.cells import open_setup

LAUNCHES = (
    "row_table", "prefill", "verdict", "publish", "draft_extend", "stash", "pack", "resolve", "draft", "verify", "copy",
)  # fmt: skip


class Injected(Exception):
    """Raised by a test inside the engine."""


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory (said by a test)")


def open_surviving(open_engine: Any, name: str, schedule: str, device: Any, **changes: Any) -> Any:
    """An engine that checks every hand-over, and goes on after errors all the same."""
    engine = open_setup(open_engine, name, schedule, device, **{"max_running_requests": 3} | changes)
    engine.scheduler.survives_errors = True
    return engine


class Fault:
    """Strikes launches called `label`. `when(requests, occurrence)` says whether this one, the `occurrence`-th, is struck.

    `requests`: of the batch whose step it is. `struck` counts.
    """

    def __init__(
        self,
        engine: Any,
        label: str,
        when: Callable[[list[Any], int], bool],
        error: Callable[[], BaseException] = lambda: Injected("by a test"),
    ) -> None:
        self.engine, self.label, self.when, self.error = engine, label, when, error
        self.struck = self.seen = 0
        self._requests: dict[int, list[Any]] = {}
        run_batch = engine.scheduler.run_batch

        def noting(batch: Any, *, overlap: bool) -> Any:
            self._requests[engine.scheduler.num_steps_launched] = list(batch.reqs)
            return run_batch(batch, overlap=overlap)

        engine.scheduler.run_batch = noting
        for stream in (engine._forward_stream, engine._copy_stream):
            stream.on_run = self._on_run

    def _on_run(self, label: str, step: int) -> None:
        if self.label not in label.split("+"):  # recorded launches are joined
            return
        self.seen += 1
        if self.when(self._requests.get(step, []), self.seen):
            self.struck += 1
            raise self.error()

    def stop(self) -> None:
        for stream in (self.engine._forward_stream, self.engine._copy_stream):
            stream.on_run = None


def once(occurrence: int) -> Callable[[list[Any], int], bool]:
    return lambda requests, seen: seen == occurrence


def brought_by(request_id: int) -> Callable[[list[Any], int], bool]:
    return lambda requests, seen: any(req.request_id == request_id for req in requests)


def in_company(requests: list[Any], seen: int) -> bool:
    """What a batch of several is too large for."""
    return len(requests) > 1


@contextmanager
def poisonous(model: Any, token: int, value: float = float("nan")) -> Any:
    """The model's embedding of one token is NaN: whatever attends to it has no numbers."""

    def poison(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.where((args[0] == token)[..., None], value, output)

    handle = model.get_input_embeddings().register_forward_hook(poison)
    try:
        yield
    finally:
        handle.remove()
