"""Recorded launches without a GPU: a replay calls the function again on the recorded addresses.

What goes wrong with a real graph goes wrong here too: an input that was not fed is stale, outputs are overwritten by
the next replay, and a host tensor cannot be read in place.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from spec_v2.model_executor.graph_runner import GraphRunner, _describe
from spec_v2.scheduler import batch_planner, sampling_batch_info, schedule_batch, scheduler


class _RefusesUploads(TorchFunctionMode):
    """`x[indices] = 0` makes a tensor of the number: of a CUDA `x`, on the host, and no capture copies that over."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__setitem__ and not isinstance(args[2], Tensor):
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(index, Tensor) for index in indices):
                raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture")
        return func(*args, **(kwargs or {}))


class SimulatedGraphs(GraphRunner):
    """`host`: ids of tensors that would be in host memory on a real machine."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.host: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self.num_replays = 0

    def on_device(self, leaf: Tensor) -> bool:
        return self.host.get(id(leaf)) is not leaf

    def capture(self, fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[[], None], Any]:
        with _RefusesUploads():
            outputs = fn(*args)
        leaves: list[Any] = []
        _describe(outputs, leaves)
        fresh = [True]  # the first replay's effects have just happened

        def replay() -> None:
            self.num_replays += 1
            if fresh.pop() if fresh else False:
                return
            again: list[Any] = []
            _describe(fn(*args), again)
            for old, new in zip(leaves, again, strict=True):
                if old is not new:
                    old.copy_(new)

        return replay, outputs


def attach(engine: Any, sizes: Sequence[int], monkeypatch: Any) -> SimulatedGraphs:
    """Let an engine on the CPU replay its decode steps."""
    graphs = SimulatedGraphs()
    make = sampling_batch_info.host_tensor

    def host_tensor(*args: Any, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        graphs.host[id(tensor)] = tensor
        return tensor

    for module in (batch_planner, sampling_batch_info, schedule_batch, scheduler):
        monkeypatch.setattr(module, "host_tensor", host_tensor)
    engine._forward_stream.graphs = graphs
    engine.scheduler.future_map.open_row_0()
    engine.scheduler.planner.sizes = sizes
    return graphs
