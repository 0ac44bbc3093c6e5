"""Recorded launches: a launch of a decode step is recorded once for each batch size, and replayed from then on.

Nothing in a step knows of it. What is launched is a function of tensors, pools and settings, so the stream can hand
the call to a runner, and the runner decides whether to call the function, to record it, or to replay a recording.

A recording reads fixed addresses. An input that is the output of another recording, or that stays the same object
from step to step (pools, histories), is read where it lies. Any other tensor (row numbers and sampling settings
from the host, mostly) has a twin on the device that is filled before a replay, and only when it changed.

Batches are padded to the sizes of the capture list, by `padded_size` alone; the rows that fill them up are row 0.
"""

import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

_LOG = logging.getLogger("spec_v2")
MAX_VARIANTS = 16
"""Recordings of one launch that differ only in where they read; beyond it the function is called."""


def capture_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes to record, in requests: dense where a request more matters most."""
    sizes = [1, 2, 4, *range(8, 33, 8), *range(48, 129, 16), *range(160, 513, 32)]
    return (*(s for s in sizes if s < largest), largest)


def padded_size(num_requests: int, sizes: Sequence[int]) -> int | None:
    """The smallest recorded size that holds a batch; None where there is none, and the step runs as it is."""
    place = bisect_left(sizes, num_requests)
    return sizes[place] if place < len(sizes) else None


@dataclass(slots=True)
class Recording:
    """One launch at one size: `feeds` are (place among the leaves, twin), `read_in_place` the leaves read directly.

    `inputs`: the arguments with twins in their places. `replay` is None until it is recorded, `args` are those of the
    newest call.
    """

    inputs: list[Any]
    feeds: list[tuple[int, Tensor]]
    read_in_place: list[tuple[int, Tensor]]
    fed: dict[int, Tensor] = field(default_factory=dict)
    args: tuple[Any, ...] = ()
    replay: Callable[[], None] | None = None
    outputs: Any = None


class GraphRunner(ABC):
    """Abstract: a device says how to record and replay; everything else is here."""

    def __init__(self, device: torch.device, owned: dict[int, Tensor] | None = None) -> None:
        """`owned`: outputs of recordings, where several runners serve one stream and read each other's."""
        self.device = device
        self.num_captures = 0
        self._seen: dict[Any, list[Any]] = {}  # leaves of the first call of each kind
        self._recordings: dict[Any, list[Recording]] = {}
        self._newest: dict[Any, Recording] = {}  # by launch: most steps repeat the last one
        self._owned = {} if owned is None else owned  # outputs of recordings, which never move
        self._refused: dict[Any, bool] = {}

    @abstractmethod
    def capture(self, fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[[], None], Any]:
        """Record `fn(*args)` without keeping its effects; (replay, outputs), the same outputs at every replay."""

    @property
    def num_refused(self) -> int:
        """Launches that could not be recorded and run as they are."""
        return len(self._refused)

    def on_device(self, leaf: Tensor) -> bool:
        """Whether a recording could read it where it lies."""
        return leaf.device.type == self.device.type

    def run(self, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
        """The value of `fn(*args)`. A replay returns the recording's own outputs: the next replay overwrites them."""
        name = (_identity(fn), *(_identity(arg[0]) for arg in args if isinstance(arg, tuple) and arg))
        recording = self._newest.get(name)
        if recording is None or not _same(recording.args, args):
            leaves: list[Any] = []
            key = (name, *(_describe(arg, leaves) for arg in args))
            first = self._seen.get(key)
            if first is None:  # once as it is, to see which tensors stay
                self._seen[key] = leaves
                return fn(*args)
            recording = self._find(key, leaves)
            if recording is None:
                recording = self._prepare(key, args, leaves, first)
                # once on the very tensors that a recording will read: kernels are compiled for their alignment
                return fn(*args) if recording is None else fn(*recording.inputs)
            stays = self._feed(recording, leaves)
            if recording.replay is None and not self._record(recording, name, fn):
                return fn(*args)
            if stays:
                recording.args = tuple(args)
                self._newest[name] = recording
        assert recording.replay is not None
        recording.replay()
        return recording.outputs

    def _find(self, key: Any, leaves: list[Any]) -> Recording | None:
        for recording in self._recordings.get(key, []):
            if all(leaves[place] is tensor for place, tensor in recording.read_in_place) and not any(
                id(leaves[place]) in self._owned for place, _ in recording.feeds
            ):
                return recording
        return None

    def _prepare(
        self, key: Any, args: Sequence[Any], leaves: list[Any], first: list[Any]
    ) -> Recording | None:
        """A recording's inputs: what it will read in place, and twins of all other tensors."""
        variants = self._recordings.setdefault(key, [])
        if len(variants) == MAX_VARIANTS:
            return None
        feeds: list[tuple[int, Tensor]] = []
        in_place: list[tuple[int, Tensor]] = []
        twins: list[Tensor] = []
        for place, leaf in enumerate(leaves):
            if self.on_device(leaf) and (id(leaf) in self._owned or leaf is first[place]):
                in_place.append((place, leaf))
                twins.append(leaf)
            else:
                twin = torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device)
                twin.copy_(leaf, non_blocking=True)
                feeds.append((place, twin))
                twins.append(twin)
        remaining = iter(twins)
        recording = Recording([_substitute(arg, remaining) for arg in args], feeds, in_place)
        variants.append(recording)
        return recording

    def _record(self, recording: Recording, name: Any, fn: Callable[..., Any]) -> bool:
        """Capture; False where that failed, and the launch runs as it is from then on."""
        if self._refused.get(name):
            return False
        try:
            recording.replay, recording.outputs = self.capture(fn, recording.inputs)
        except RuntimeError as error:
            self._refused[name] = True  # of joined launches, this sequence alone
            _LOG.warning("%s could not be recorded and runs as it is: %s", _name(fn), error)
            return False
        self.num_captures += 1
        owned: list[Any] = []
        _describe(recording.outputs, owned)
        self._owned.update((id(tensor), tensor) for tensor in owned)
        return True

    def _feed(self, recording: Recording, leaves: list[Any]) -> bool:
        """Fill the twins. True where the same arguments need no feeding again: host tensors are never rewritten."""
        stays = True
        for place, twin in recording.feeds:
            leaf = leaves[place]
            changing = self.on_device(leaf)
            stays = stays and not changing
            if changing or recording.fed.get(place) is not leaf:
                twin.copy_(leaf, non_blocking=True)
                recording.fed[place] = leaf
        return stays


def _identity(fn: Callable[..., Any]) -> Any:
    """A bound method is made anew at each access: name it by what it is made of."""
    owner = getattr(fn, "__self__", None)
    return (getattr(fn, "__func__", fn), id(owner)) if owner is not None else (fn, 0)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def _describe(value: Any, leaves: list[Any]) -> Any:
    """What makes two calls the same kind; tensors are collected in `leaves` on the way."""
    if isinstance(value, Tensor):
        leaves.append(value)
        return (tuple(value.shape), value.dtype, value.device.type)
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value), *(_describe(getattr(value, f.name), leaves) for f in fields(value)))
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, tuple):
        return tuple(_describe(part, leaves) for part in value)
    if callable(value):
        return _identity(value)
    return (type(value), id(value))


def _substitute(value: Any, twins: Any) -> Any:
    """The same value with its tensors replaced, in the order in which `_describe` found them."""
    if isinstance(value, Tensor):
        return next(twins)
    if is_dataclass(value) and not isinstance(value, type):
        return _rebuilt(value, twins)
    if isinstance(value, tuple):
        return tuple(_substitute(part, twins) for part in value)
    return value


def _rebuilt(value: Any, twins: Any) -> Any:
    new = {f.name: _substitute(getattr(value, f.name), twins) for f in fields(value)}
    unchanged = all(new[f.name] is getattr(value, f.name) for f in fields(value))
    return value if unchanged else type(value)(**new)


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two argument lists are the same objects; containers made anew of the same parts count as the same."""
    return len(left) == len(right) and all(map(_same_value, left, right))


def _same_value(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, int) or callable(left):  # a bound method is made anew at each access
        return bool(left == right)
    if isinstance(left, tuple):
        return _same(left, right)
    if is_dataclass(left) and not isinstance(left, type):
        return all(getattr(left, f.name) is getattr(right, f.name) for f in fields(left))
    return False
