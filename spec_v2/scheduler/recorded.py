"""Launches that wait for each other, so that what follows one another is recorded and replayed as one.

A stream with a recorder collects the launches of a captured step. Whoever needs an event, or launches something that is
not captured, gets them run first, in order, as one call: `run_sequence`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spec_v2.scheduler.pending import Pending


@dataclass(frozen=True, slots=True)
class OutputOf:
    """Stands for what the `index`-th call of a sequence gives."""

    index: int


Call = tuple[Any, ...]  # a function and its arguments


def run_sequence(*calls: Call) -> tuple[Any, ...]:
    """Call one after the other. Returns all their values."""
    outputs: list[Any] = []
    for fn, *args in calls:
        outputs.append(fn(*(outputs[a.index] if isinstance(a, OutputOf) else a for a in args)))
    return tuple(outputs)


class Waiting:
    """The launches that have not run yet, in launch order."""

    def __init__(self) -> None:
        self._launches: list[tuple[Callable[..., Any], tuple[Any, ...], Pending[Any], str]] = []

    def __bool__(self) -> bool:
        return bool(self._launches)

    def add(self, fn: Callable[..., Any], args: tuple[Any, ...], pending: Pending[Any], label: str) -> None:
        self._launches.append((fn, args, pending, label))

    def take(self) -> tuple[list[tuple[Callable[..., Any], tuple[Any, ...]]], list[Pending[Any]], str]:
        """(calls, what they will give, their labels), each argument of an earlier one replaced by its place."""
        launches, self._launches = self._launches, []
        places = {id(pending): i for i, (_, _, pending, _) in enumerate(launches)}
        calls = [
            (fn, tuple(OutputOf(places[id(a)]) if id(a) in places else a for a in args))
            for fn, args, _, _ in launches
        ]
        return calls, [pending for _, _, pending, _ in launches], "+".join(label for *_, label in launches)


def run_waiting(
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]], pendings: list[Pending[Any]], graphs: Any
) -> None:
    """Run them as one, and hand out the values."""
    ready = [(fn, *(a.get() if isinstance(a, Pending) else a for a in args)) for fn, args in calls]
    for pending, value in zip(pendings, graphs.run(run_sequence, ready), strict=True):
        pending.set(value)
