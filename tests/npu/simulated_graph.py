"""`torch.npu.NPUGraph`, simulated: operators are noted as they are called, and called again by a replay.

As on hardware: a capture leaves memory as it was; what a host would have to wait for cannot be captured; an operator
that takes lengths from the host waits, in each replay, until `update` has given it new ones (here the replay raises
`NotUpdated` where hardware would hang); and `update` must not come while an earlier replay may still read the old ones.
"""

from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.npu.simulated_device import host, in_host_memory, may_still_run, replay_started, tensors_in

UPDATED_BY_HOST = {"npu::npu_fused_infer_attention_score": ("actual_seq_lengths", "actual_seq_lengths_kv")}
HOST_WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim",
    "unique_consecutive", "item",
}  # fmt: skip
MASKED = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}


class NotUpdated(RuntimeError):
    """On hardware this replay would wait for ever."""


@dataclass
class Call:
    """One operator of a recording, its tensors out of their wrappers. `is_ready`: its lengths have come since it ran."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor]
    takes_lengths: bool
    is_ready: bool = False


class NPUGraph:
    """A recording. `calls` in order; those that take lengths from the host are `waiting`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.auto_dispatch_capture = False
        self.is_captured = False
        self.num_updates = self.num_replays = 0

    @property
    def waiting(self) -> list[Call]:
        return [call for call in self.calls if call.takes_lengths and self.auto_dispatch_capture]

    def update(self, cpu_update_input: list[dict[str, Any]]) -> None:
        """Give each waiting operator its lengths; one dict for all of them, or one for each, in order."""
        waiting = self.waiting
        if not self.auto_dispatch_capture:
            raise RuntimeError("this graph takes no update: capture it with auto_dispatch_capture=True")
        if len(cpu_update_input) == 1:
            cpu_update_input = cpu_update_input * len(waiting)
        if len(cpu_update_input) != len(waiting):
            raise RuntimeError(f"{len(waiting)} operators wait, {len(cpu_update_input)} updates were given")
        if may_still_run(self):
            raise RuntimeError("an earlier replay of this graph may still read the lengths it was given")
        for call, new in zip(waiting, cpu_update_input, strict=True):
            call.kwargs |= {name: list(value) for name, value in new.items() if name in call.kwargs}
            call.is_ready = True
        self.num_updates += 1

    def replay(self) -> None:
        if not self.is_captured:
            raise RuntimeError("replay of a graph that was not captured")
        for call in self.waiting:
            if not call.is_ready:
                raise NotUpdated(f"{call.func}: no update() since the last replay; hardware would hang here")
            call.is_ready = False
        for call in self.calls:
            new = tensors_in(call.func(*call.args, **call.kwargs))
            for old, out in zip(call.outputs, new, strict=True):
                if old.data_ptr() != out.data_ptr():  # a view, or what was changed in place, is there already
                    old.copy_(out)
        self.num_replays += 1
        replay_started(self)

    def reset(self) -> None:
        self.calls.clear()
        self.is_captured = False


class _Recorder(TorchDispatchMode):
    """Notes each operator. Its effects on memory from before the capture are undone in the end."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self._calls = calls
        self._own: set[int] = set()  # storages that the capture made
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        _refuse_host_waits(func, args, kwargs)
        if func._schema.is_mutable:
            self._keep_what_changes(func, args, kwargs)
        out = func(*args, **kwargs)
        args, kwargs = in_host_memory(args), in_host_memory(kwargs)
        outputs = [host(x) for x in tensors_in(out)]
        given = {x.untyped_storage().data_ptr() for x in tensors_in((args, kwargs))}
        self._own |= {x.untyped_storage().data_ptr() for x in outputs} - given
        takes_lengths = any(kwargs.get(name) is not None for name in UPDATED_BY_HOST.get(func.name(), ()))
        self._calls.append(Call(func, args, kwargs, outputs, takes_lengths))
        return out

    def _keep_what_changes(self, func: Any, args: Any, kwargs: Any) -> None:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = kwargs.get(argument.name) if argument.kwarg_only else args[place]
            for tensor in tensors_in(value):
                memory = host(tensor)
                storage = memory.untyped_storage()
                if storage.data_ptr() not in self._own | set(self._before):
                    whole = torch.empty(0, dtype=memory.dtype).set_(storage)
                    self._before[storage.data_ptr()] = (whole, whole.clone())

    def undo(self) -> None:
        for whole, before in self._before.values():
            whole.copy_(before)


def _refuse_host_waits(func: Any, args: Any, kwargs: Any) -> None:
    name = func.name().removeprefix("aten::").partition(".")[0]
    crosses = False
    if name == "_to_copy":
        crosses = torch.device(kwargs.get("device") or args[0].device).type != args[0].device.type
    elif name in ("copy_", "_copy_from"):
        crosses = args[0].device.type != args[1].device.type
    masks = args[1] if name in MASKED else ()
    masked = any(isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in masks)
    if name in HOST_WAITS or crosses or masked:
        raise RuntimeError(f"{func}: not permitted while a stream is captured: the host would have to wait")


class graph:
    """Captures what is called inside."""

    def __init__(
        self,
        npu_graph: NPUGraph,
        pool: Any = None,
        stream: Any = None,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> None:
        self._graph = npu_graph
        npu_graph.auto_dispatch_capture = auto_dispatch_capture

    def __enter__(self) -> None:
        torch.npu.synchronize()
        self._recorder = _Recorder(self._graph.calls)
        self._recorder.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.__exit__(kind, error, trace)
        self._recorder.undo()
        self._graph.is_captured = kind is None
