"""What the tests of scheduling share: one scene per algorithm, and streams whose interleaving a test chooses."""

import random
from collections import deque
from typing import Any

import torch

from spec_v2 import SamplingParams
from spec_v2.scheduler.recorded import Waiting
from spec_v2.scheduler.streams import CpuEvent, CpuStream, Step
from tests import tiny_models as tiny
from tests.cells import CHAINS_ONLY, models
from tests.harness import CHAIN, TREE_2, make_engine

ALGORITHMS = (None, "NGRAM", "STANDALONE", "EAGLE", "MULTI_LAYER_EAGLE", "FROZEN_KV_MTP")
DRAFTER = {None: "nothing", "NGRAM": "self"}  # the others' is noisy
LIVELY = {"FROZEN_KV_MTP": "random"}  # drafters of targets whose text is lively, where the scene's is not


def scene(algorithm: str | None, device: torch.device, drafter: str | None = None) -> tuple[Any, Any]:
    """(target, draft) whose drafts are accepted in part, unless another drafter is named."""
    return models(algorithm, drafter or DRAFTER.get(algorithm, "noisy"), device)


def scene_engine(algorithm: str | None, device: torch.device, drafter: str | None = None, **kw: Any) -> Any:
    target, draft = scene(algorithm, device, drafter)
    return make_engine(target, algorithm, draft, CHAIN if algorithm in CHAINS_ONLY else TREE_2, **kw)


def scene_prompts(algorithm: str | None, target: Any, count: int) -> list[tuple[int, ...]]:
    if algorithm == "NGRAM":
        return [tiny.copying_prompt(target, seed, 6 + 2 * seed) for seed in range(count)]
    make = tiny.marked_prompt if algorithm == "FROZEN_KV_MTP" else tiny.random_prompt
    return [make(seed, 3 + 2 * seed) for seed in range(count)]


def greedy(count: int, **changes: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, **changes)


def expected(engine: Any, prompts: list, params: list[SamplingParams]) -> list[tuple[int, ...]]:
    """Plain decoding of each prompt by itself."""
    return [tiny.oracle_of(engine.model).expected(*pair) for pair in zip(prompts, params, strict=True)]


def outputs(engine: Any, prompts: list, params: Any) -> list[tuple[int, ...]]:
    return [done.output_ids for done in engine.generate(prompts, params)]


def free(engine: Any) -> tuple[int, int]:
    """(free pages, free rows)"""
    return engine.scheduler.cache.pages.num_free, engine.scheduler.cache.rows.num_free


def first_batches(engine: Any, prompts: list, params: SamplingParams) -> Any:
    """Queue the prompts and return the scheduler, whose next batch is their prefill."""
    engine.scheduler.add_requests(engine._requests(prompts, params))
    return engine.scheduler


class World:
    """Streams that run in the caller's thread, one item at a time: a repeatable choice of what threads might do.

    `policy`: "eager" runs everything at once; "late" nothing before the host waits, and then the forward stream
    only when nothing else can go on; "ahead" the same, but the forward stream first of all; an integer seeds
    random choices.
    """

    def __init__(self, policy: str | int) -> None:
        self.policy = policy
        self.streams: list[SteppedStream] = []
        self.running: SteppedStream | None = None
        self._random = random.Random(policy)

    def make_stream(self, name: str, device: torch.device, trace: Any, num_threads: int | None = None) -> Any:
        self.streams.append(SteppedStream(self, name, trace))
        return self.streams[-1]

    def after_host_action(self) -> None:
        if self.policy == "eager":
            while self._step():
                pass
        elif isinstance(self.policy, int):
            while self._random.random() < 0.5 and self._step():
                pass

    def run_until(self, event: CpuEvent) -> None:
        while not event.query():
            assert self._step(), "deadlock: the host waits, and no stream can go on"

    def _step(self) -> bool:
        ready = [stream for stream in self.streams if stream.is_ready()]
        if self.running is not None or not ready:
            return False
        if isinstance(self.policy, int):
            chosen = self._random.choice(ready)
        else:
            chosen = (min if self.policy == "ahead" else max)(ready, key=lambda s: s.name == "copy")
        self.running = chosen
        try:
            with torch.no_grad():
                chosen.items.popleft()()
        finally:
            self.running = None
        return True


class SteppedEvent(CpuEvent):
    __slots__ = ("_world",)

    def __init__(self, step: Step, world: World) -> None:
        super().__init__(step)
        self._world = world

    def synchronize(self) -> None:
        self._world.run_until(self)
        super().synchronize()

    def wait(self) -> None:
        assert self.query()


class SteppedStream(CpuStream):
    """A CpuStream without a thread."""

    def __init__(self, world: World, name: str, trace: Any) -> None:
        self.name, self.step, self.on_run, self.graphs = name, Step(-1), None, None
        self._trace, self._world = trace, world
        self._waiting = Waiting()
        self.items: deque[Any] = deque()
        self._queue = self  # type: ignore[assignment]

    def put(self, item: Any) -> None:
        self.items.append(item)
        self._world.after_host_action()

    def is_ready(self) -> bool:
        waits_for = getattr(self.items[0], "__self__", None) if self.items else self
        is_wait = isinstance(waits_for, SteppedEvent) and self.items[0].__name__ == "wait"
        return bool(self.items) and (not is_wait or waits_for.query())

    def record_event(self) -> SteppedEvent:
        event = SteppedEvent(self.step, self._world)
        self.put(event.reach)
        return event

    def synchronize(self) -> None:
        event = SteppedEvent(Step(-1), self._world)
        self.put(event.reach)
        self._world.run_until(event)

    def owns_current_thread(self) -> bool:
        return self._world.running is self

    def close(self) -> None:
        self.synchronize()
