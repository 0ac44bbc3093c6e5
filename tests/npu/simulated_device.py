"""A simulated NPU: the device type `npu` in a process that has no NPU. Nothing here is hardware, and nothing is fast.

Tensors of the device lie in host memory, but say that they are on `npu:0`, and are kept apart from the host's: an
operation that mixes the two is refused, as hardware refuses it. `install` gives the process `torch.npu` and the two
operators of torch_npu that spec_v2 calls, so whatever runs here runs through the names that hardware has.

What it does not show: speed, rounding (all arithmetic is the CPU's), memory limits, and launches that return before
they have run. A device type is named once in a process, so this needs one of its own: `pytest --backend npu`.
"""

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "simulated NPU"
_kept: list[Any] = []  # registrations end with the library objects
HOST_INDEXED = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}


class SimulatedTensor(torch.Tensor):
    """`held`: the tensor in host memory. Whatever is asked of this one is asked of that, and wrapped again."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "SimulatedTensor":
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=torch.device("npu", 0),
        )
        made.held = held
        return made  # type: ignore[no-any-return]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SimulatedTensor({self.held!r}, device='npu:0', simulated)"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("a tensor on npu:0 has no numpy array: copy it to the host first, with .cpu()")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name == "_to_copy":
            return _to_copy(func, args, kwargs)
        if name in ("copy_", "_copy_from"):  # the one operation that may cross over
            host(args[0]).copy_(host(args[1]))
            return args[0]
        given = {id(x.held): x for x in tensors_in((args, kwargs)) if isinstance(x, SimulatedTensor)}
        _refuse_mixing(func, name, args, kwargs)
        if kwargs.get("pin_memory"):
            raise RuntimeError(f"{func}: only host memory can be pinned")
        args, kwargs = in_host_memory(args), in_host_memory(kwargs)
        made = func(*args, **kwargs)
        if isinstance(made, (tuple, list)):
            return type(made)(_on_device(func, x, given) for x in made)
        return _on_device(func, made, given)


def _on_device(func: Any, value: Any, given: dict[int, SimulatedTensor]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) not in given:
        return SimulatedTensor(value)
    wrapper = given[id(value)]  # changed in place: still the caller's own object
    assert wrapper.shape == value.shape, f"{func} has resized its output, which is not simulated"
    return wrapper


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of a call's arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)


def in_host_memory(value: Any) -> Any:
    """The same arguments for the CPU: simulated tensors are taken out of their wrappers, devices are replaced."""
    if isinstance(value, SimulatedTensor):
        if value.dtype != value.held.dtype:  # torch has changed the wrapper alone
            raise RuntimeError(
                "Module.to(dtype) is not simulated: convert a model before it comes to the device"
            )
        return value.held
    if isinstance(value, (tuple, list)):
        return type(value)(in_host_memory(part) for part in value)
    if isinstance(value, dict):
        return {name: in_host_memory(part) for name, part in value.items()}
    return torch.device("cpu") if isinstance(value, torch.device) else value


def host(value: Any) -> Any:
    """The tensor in host memory behind a simulated one; anything else as it is."""
    return value.held if isinstance(value, SimulatedTensor) else value


def _to_copy(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    device = torch.device(kwargs.pop("device", None) or args[0].device)
    kwargs.pop("pin_memory", None)
    kwargs.pop("non_blocking", None)
    copied = func(host(args[0]), **kwargs)
    return SimulatedTensor(copied) if device.type == "npu" else copied


def _refuse_mixing(func: Any, name: str, args: Any, kwargs: Any) -> None:
    """Host tensors among device tensors; numbers, and indices, which hardware takes from the host too, may be."""
    if name in HOST_INDEXED:
        args = (args[0], *args[2:])
    strangers = [x for x in tensors_in((args, kwargs)) if type(x) is torch.Tensor and x.dim() > 0]
    if strangers:
        raise RuntimeError(
            f"{func}: expected all tensors to be on the same device, but found npu:0 and {strangers[0].device}"
        )


# -- what makes a tensor ---------------------------------------------------------------------------------------


def _empty(size: Any, *, dtype: Any = None, pin_memory: Any = None, **options: Any) -> torch.Tensor:
    if pin_memory:
        raise RuntimeError("only host memory can be pinned")
    return SimulatedTensor(torch.empty(size, dtype=dtype or torch.get_default_dtype()))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **options: Any) -> torch.Tensor:
    return SimulatedTensor(torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype()))


def _factory(name: str) -> Callable[..., torch.Tensor]:
    """The operator itself, in host memory."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def make(*args: Any, device: Any = None, pin_memory: Any = None, **options: Any) -> torch.Tensor:
        return SimulatedTensor(operator(*args, device=torch.device("cpu"), **options))

    return make


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    host(target).copy_(host(source))
    return target


# -- torch.npu -------------------------------------------------------------------------------------------------


class Stream:
    """Runs everything at once; remembers nothing."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = torch.device("npu", 0)

    def synchronize(self) -> None:
        _in_flight.clear()

    def wait_event(self, event: "Event") -> None:
        """In order already."""

    def __enter__(self) -> "Stream":
        _streams.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _streams.pop()


class Event:
    """Reached as soon as it is recorded. Waiting for it tells the device that replays before it have ended."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._before: set[int] | None = None

    def record(self, stream: Any = None) -> None:
        self._before = set(_in_flight)

    def synchronize(self) -> None:
        _in_flight.difference_update(self._before or ())

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        return 0.0


_streams: list[Stream] = []  # the current one is the last
_in_flight: set[int] = set()
"""Replays that the host has not waited for: their graphs may not be changed yet."""


def replay_started(graph: Any) -> None:
    _in_flight.add(id(graph))


def may_still_run(graph: Any) -> bool:
    return id(graph) in _in_flight


def _module() -> types.ModuleType:
    from tests.npu import simulated_graph

    npu = types.ModuleType("torch.npu", "Simulated: see tests/npu/simulated_device.py")
    npu.is_simulated = True  # type: ignore[attr-defined]
    members: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: _in_flight.clear(),
        "manual_seed_all": lambda seed: None,
        "get_device_name": lambda device=None: NAME,
        "mem_get_info": lambda device=None: (2 << 30, 4 << 30),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: stream,
        "current_stream": lambda device=None: _streams[-1],
        "NPUGraph": simulated_graph.NPUGraph,
        "graph": simulated_graph.graph,
        "graph_pool_handle": lambda: (0, 0),
    }
    for name, member in members.items():
        setattr(npu, name, member)
    return npu


def install() -> None:
    """Give this process the device type `npu`, simulated. Once; cannot be undone."""
    from tests.npu.simulated_operators import define_operators

    if hasattr(torch, "npu"):
        raise RuntimeError("this process has a torch.npu already")
    _setup_privateuseone_for_python_backend("npu", backend_module=_module())
    _streams.append(Stream())
    aten = torch.library.Library("aten", "IMPL")
    made: dict[str, Callable[..., Any]] = {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "_copy_from": _copy_from,
    }
    # these would be made empty and then resized
    made |= {name: _factory(name) for name in ("arange", "arange.start", "arange.start_step", "eye", "eye.m")}
    for name, function in made.items():
        aten.impl(name, function, "PrivateUse1")
    _kept.extend((aten, define_operators()))
