"""The one rule of streams: the scheduler thread decides, and launches get frozen inputs, never the batch."""

import enum
import threading
import types
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from spec_v2.scheduler.schedule_batch import Request, ScheduleBatch
from spec_v2.scheduler.streams import CpuStream, CudaStream, NpuStream
from tests.scheduling_helpers import ALGORITHMS, expected, greedy, outputs, scene_engine, scene_prompts
from tests.tiny_models import llama

# -- what a launch can reach ---------------------------------------------------------------------------------

LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    enum.Enum,
    type,
    torch.Tensor,
    torch.dtype,
    torch.device,
)
OPAQUE = (torch.nn.Module, threading.Thread, types.ModuleType, types.BuiltinFunctionType)


def parts_of(thing: Any) -> list[tuple[str, Any]]:
    """What an object holds, with the names it has there: fields, slots, elements, arguments, closures."""
    if isinstance(thing, partial):
        return [(".func", thing.func), (".args", thing.args), (".keywords", thing.keywords)]
    if isinstance(thing, types.MethodType):
        return [(".__self__", thing.__self__), (".__func__", thing.__func__)]
    if isinstance(thing, types.FunctionType):
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
        held = [(f"<closure {name}>", cell.cell_contents) for name, cell in cells]
        return [*held, (".defaults", thing.__defaults__), (".kwdefaults", thing.__kwdefaults__)]
    if isinstance(thing, dict):
        return [(f"[{key!r}]", value) for key, value in thing.items()]
    if isinstance(thing, (list, tuple, set, frozenset, deque)):
        return [(f"[{i}]", value) for i, value in enumerate(thing)]
    slots = {name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())}
    names = sorted(slots | set(getattr(thing, "__dict__", ())))
    return [(f".{name}", getattr(thing, name)) for name in names if hasattr(thing, name)]


def paths_to_batch(thing: Any, path: str, seen: set[int]) -> list[str]:
    """Every way from an object to a ScheduleBatch or a Request."""
    if isinstance(thing, (ScheduleBatch, Request)):
        return [path]
    if isinstance(thing, (*LEAVES, *OPAQUE)) or id(thing) in seen:
        return []
    seen.add(id(thing))
    return [found for name, part in parts_of(thing) for found in paths_to_batch(part, path + name, seen)]


@pytest.fixture
def checked(monkeypatch):
    """Checks every launch of every stream; notes their labels."""
    labels = []
    for stream_class in (CpuStream, CudaStream, NpuStream):

        def launch(self, fn, /, *args, label="", original=stream_class.launch):
            found = paths_to_batch(fn, label, seen := set()) + paths_to_batch(args, f"{label} args", seen)
            assert not found, f"a launch can reach the batch: {', '.join(found)}"
            labels.append(label)
            return original(self, fn, *args, label=label)

        monkeypatch.setattr(stream_class, "launch", launch)
    return labels


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_launch_can_reach_the_batch(algorithm, schedule, device, checked):
    drafter = "random" if algorithm == "EAGLE" else None
    with scene_engine(algorithm, device, drafter, schedule=schedule, max_running_requests=2) as engine:
        prompts, params = scene_prompts(algorithm, engine.model, 3), [greedy(n) for n in (8, 5, 6)]
        assert outputs(engine, prompts, params) == expected(engine, prompts, params)
        assert not paths_to_batch(engine.scheduler.worker, "worker", set())
        assert not paths_to_batch(engine.scheduler.future_map, "future_map", set())
    every_step = {
        "row_table",
        "resolve",
        "prefill",
        "draft",
        "verify",
        "publish",
        "draft_extend",
        "stash",
        "copy",
    }
    assert every_step <= set(checked)


class Careless:
    """A worker that lets a launch see the batch, in one of many ways."""

    def __init__(self, worker, how):
        self.worker, self.how = worker, how
        self.batch = None

    def look(self, *args):
        return None

    def forward_batch_generation(self, batch, on_publish):
        launch = self.worker.stream.launch

        @dataclass
        class Box:
            content: Any

        def through_default(value=batch):
            return None

        if self.how == "argument":
            launch(self.look, batch)
        elif self.how == "request":
            launch(self.look, batch.reqs[0])
        elif self.how == "list":
            launch(self.look, [1, {"reqs": tuple(batch.reqs)}])
        elif self.how == "dataclass":
            launch(self.look, Box(batch))
        elif self.how == "closure":
            launch(lambda: len(batch))
        elif self.how == "default":
            launch(through_default)
        elif self.how == "partial":
            launch(partial(self.look, batch))
        elif self.how == "bound method":
            launch(batch.copy)
        elif self.how == "attribute of self":
            self.batch = batch
            launch(self.look)
        return self.worker.forward_batch_generation(batch, on_publish)


WAYS = (
    "argument",
    "request",
    "list",
    "dataclass",
    "closure",
    "default",
    "partial",
    "bound method",
    "attribute of self",
)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("how", [*WAYS, "not at all"])
def test_the_check_notices_a_careless_worker(how, open_engine, device):
    engine = open_engine(llama(device))
    engine.scheduler.worker = Careless(engine.scheduler.worker, how)
    if how == "not at all":
        engine.generate([(1, 2)], greedy(3))
        return
    with pytest.raises(AssertionError, match="a launch can reach the batch"):
        engine.generate([(1, 2)], greedy(3))


def test_the_worker_runs_on_the_scheduler_thread_only(open_engine, device, schedule):
    engine = open_engine(llama(device), schedule=schedule)
    threads, worker = set(), engine.scheduler.worker

    class Noting:
        def forward_batch_generation(self, batch, on_publish):
            threads.add(threading.current_thread())
            return worker.forward_batch_generation(batch, on_publish)

    engine.scheduler.worker = Noting()
    engine.generate([(1, 2)], greedy(4))
    assert threads == {threading.current_thread()}


# -- who may write the row table -----------------------------------------------------------------------------


def test_the_row_table_is_written_on_the_forward_stream_only(open_engine, device):
    engine = open_engine(llama(device))
    one = torch.tensor([1])
    with pytest.raises(RuntimeError, match="off the forward stream"):
        engine.scheduler.cache.row_table.write(one, one, one)
    engine._forward_stream.launch(engine.scheduler.cache.row_table.write, one, one, one)
    engine._forward_stream.record_event().synchronize()


def test_a_scheduler_that_writes_the_row_table_itself_fails(open_engine, device, schedule, monkeypatch):
    engine = open_engine(llama(device), schedule=schedule)
    launch = engine._forward_stream.launch

    def writing_at_once(fn, /, *args, label=""):
        return fn(*args) if label == "row_table" else launch(fn, *args, label=label)

    with monkeypatch.context() as patch:
        patch.setattr(engine._forward_stream, "launch", writing_at_once)
        with pytest.raises(RuntimeError, match="off the forward stream"):
            engine.generate([(1, 2)], greedy(3))
    assert outputs(engine, [(1, 2)], [greedy(3)]) == expected(engine, [(1, 2)], [greedy(3)])
