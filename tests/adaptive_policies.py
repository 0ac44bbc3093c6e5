"""Policies for tests: scripted ones that switch as they like, and a world in which a step's length is given."""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

from spec_v2.types import TreeShape


class RandomPolicy:
    """Any candidate for each step, but plain steps in runs now and then, so that much is left unread."""

    def __init__(self, seed: int, longest_run: int = 12) -> None:
        self._random = random.Random(seed)
        self._longest_run = longest_run
        self._run = 0
        self.observed: list[Any] = []

    def choose(self, outlook: Any) -> TreeShape:
        if self._run == 0 and self._random.random() < 0.2:
            self._run = self._random.randint(1, self._longest_run)
        if self._run:
            self._run -= 1
            return outlook.candidates[0]
        return self._random.choice(outlook.candidates)

    def observe(self, step: Any) -> None:
        self.observed.append(step)


class ScriptedPolicy:
    """The candidates of these numbers, one after the other and again."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers: Iterator[int] = cycle(numbers)

    def choose(self, outlook: Any) -> TreeShape:
        return outlook.candidates[next(self._numbers)]

    def observe(self, step: Any) -> None:
        """Nothing to note."""


class ScriptedClock:
    """Seconds that pass only when a step is processed: as many as `seconds_of(shape, batch_size)` says."""

    def __init__(self, engine: Any, seconds_of: Callable[[TreeShape, int], float]) -> None:
        self.now = 0.0
        scheduler = engine.scheduler
        scheduler.clock = lambda: self.now
        process = scheduler.process_batch_result

        def processing(batch: Any, result: Any) -> Any:
            if batch.shape is not None:
                self.now += seconds_of(batch.shape, len(batch))
            return process(batch, result)

        scheduler.process_batch_result = processing
