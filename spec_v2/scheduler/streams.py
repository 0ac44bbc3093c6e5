"""One Stream and Event interface for every device: streams of CUDA and of NPUs, and on a CPU a thread with a FIFO.

The rule that everything else rests on: the scheduler thread decides, the forward stream touches memory.
Work reaches a stream only through `stream.launch(fn, *args)`, runs in launch order, and gives a `Pending`.
A `Pending` argument is replaced by its value when the launch that takes it runs. An exception in a launch
poisons its step: later launches of that step are skipped, and the host meets the exception when it waits for
the step's event.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from spec_v2.kernels.paged_attention.host_lens import HostLens
from spec_v2.observability.trace import Trace
from spec_v2.scheduler.openmp import release_helper_threads
from spec_v2.scheduler.pending import Pending, Step
from spec_v2.scheduler.recorded import Waiting, run_waiting

__all__ = [
    "CpuEvent",
    "CpuStream",
    "CudaStream",
    "DeviceEvent",
    "DeviceStream",
    "Event",
    "NpuStream",
    "Pending",
    "Step",
    "Stream",
    "make_stream",
]

T = TypeVar("T")
SECONDS_BETWEEN_LOOKS = 0.5  # whether the thread that one waits for still lives


@runtime_checkable
class Graphs(Protocol):
    """What may run a launch in place of the stream: a recorder of launches (`model_executor.graph_runner`)."""

    def run(self, fn: Callable[..., Any], args: Sequence[Any]) -> Any: ...


@runtime_checkable
class Event(Protocol):
    """A mark in a stream. `synchronize` blocks the host until it is reached, then raises the step's error."""

    def synchronize(self) -> None: ...
    def query(self) -> bool: ...


@runtime_checkable
class Stream(Protocol):
    """A queue of launches that run in order. `on_run` is called before each launch runs (tests hook it)."""

    name: str
    step: Step
    graphs: Graphs | None
    on_run: Callable[[str, int], None] | None

    def launch(self, fn: Callable[..., T], /, *args: Any, label: str = "") -> Pending[T]: ...
    def record_event(self) -> Event: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def owns_current_thread(self) -> bool: ...
    def take_cores(self) -> None: ...
    def release_cores(self) -> None: ...
    def close(self) -> None: ...


def make_stream(name: str, device: torch.device, trace: Trace, num_threads: int | None = None) -> Stream:
    """The stream for a device type. Raises ValueError for a device that has none."""
    if device.type == "cpu":
        return CpuStream(name, trace, num_threads)
    if device.type == "cuda":
        return CudaStream(name, device, trace)
    if device.type == "npu":
        return NpuStream(name, device, trace)
    raise ValueError(f"device={device.type!r} has no stream here; use 'cpu', 'cuda' or 'npu'")


def _call(fn: Callable[..., T], args: tuple[Any, ...], graphs: Graphs | None) -> T:
    values = [a.get() if isinstance(a, Pending) else a for a in args]
    return fn(*values) if graphs is None else graphs.run(fn, values)


class CpuEvent:
    """`stream`: whose thread reaches it. Nobody waits for one that has died: then the event's step has failed."""

    __slots__ = ("_flag", "_step", "_stream")

    def __init__(self, step: Step, stream: "CpuStream | None" = None) -> None:
        self._flag = threading.Event()
        self._step = step
        self._stream = stream

    def reach(self) -> None:
        self._flag.set()

    def synchronize(self) -> None:
        self.wait()
        if self._step.error is not None:
            raise self._step.error

    def query(self) -> bool:
        return self._flag.is_set()

    def wait(self) -> None:
        while not self._flag.wait(SECONDS_BETWEEN_LOOKS):
            if self._stream is not None and self._stream.has_died():
                died = RuntimeError(f"the thread of the {self._stream.name} stream has died")
                self._step.error = self._step.error or died
                return


class CpuStream:
    """A FIFO of launches, served by one thread. Real concurrency, so overlap can be tested without a GPU."""

    def __init__(self, name: str, trace: Trace, num_threads: int | None = None) -> None:
        self.name = name
        self.step = Step(-1)
        self.on_run: Callable[[str, int], None] | None = None
        self.graphs: Graphs | None = None
        self._trace = trace
        self._num_threads = num_threads
        self._waiting = Waiting()
        self._start()

    def _start(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"spec_v2-{self.name}", daemon=True)
        self._thread.start()

    def has_died(self) -> bool:
        """Whether its thread has ended though nobody closed it."""
        return not self._thread.is_alive()

    def launch(self, fn: Callable[..., T], /, *args: Any, label: str = "") -> Pending[T]:
        step, pending = self.step, Pending[T](self.step)
        if step.captured and not self._trace.separate_launches:
            self._waiting.add(fn, args, pending, label)
            return pending
        self._run_waiting()
        graphs = self.graphs if step.captured else None
        self._queue.put(lambda: self._run(step, pending, fn, args, label, graphs))
        return pending

    def _run_waiting(self) -> None:
        if self._waiting:
            calls, pendings, label = self._waiting.take()
            step, graphs = self.step, self.graphs
            pending = Pending[None](step)
            self._queue.put(
                lambda: self._run(step, pending, run_waiting, (calls, pendings, graphs), label, None)
            )

    def record_event(self) -> CpuEvent:
        self._run_waiting()
        event = CpuEvent(self.step, self)
        self._queue.put(event.reach)
        return event

    def wait_event(self, event: CpuEvent) -> None:
        self._run_waiting()
        self._queue.put(event.wait)

    def synchronize(self) -> None:
        """Block until everything launched so far has run. Raises nothing: errors belong to their step.

        A thread that has died is followed by a new one; what it has not run is dropped with the steps that failed.
        """
        self._run_waiting()
        event = CpuEvent(Step(-1), self)
        self._queue.put(event.reach)
        event.wait()
        if self.has_died():
            self._start()

    def owns_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def take_cores(self) -> None:
        """The calling thread is about to wait for this stream: its helper threads make room."""
        release_helper_threads()

    def release_cores(self) -> None:
        """This stream is about to idle: its helper threads make room for the host's own work."""
        self._queue.put(release_helper_threads)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        # Grad mode belongs to a thread. Not inference_mode: its tensors could not be written elsewhere.
        with torch.no_grad():
            while (item := self._queue.get()) is not None:
                item()

    def _run(
        self,
        step: Step,
        pending: Pending[T],
        fn: Callable[..., T],
        args: tuple[Any, ...],
        label: str,
        graphs: Graphs | None,
    ) -> None:
        if step.error is not None:
            return
        try:
            if self.on_run is not None:
                self.on_run(label, step.index)
            with self._trace.span(self.name, label, step.index):
                pending.set(_call(fn, args, graphs))
        except Exception as error:  # noqa: BLE001 - kept for the host, which raises it again
            step.error = error
        except BaseException as error:  # noqa: BLE001 - what ends a thread is no reason to end the host's
            step.error = RuntimeError(f"{error!r} in {label or 'a launch'} of the {self.name} stream")


class DeviceEvent:
    __slots__ = ("_event", "_step")

    def __init__(self, event: Any, step: Step) -> None:
        self._event, self._step = event, step

    def synchronize(self) -> None:
        self._event.synchronize()
        if self._step.error is not None:
            raise self._step.error

    def query(self) -> bool:
        return bool(self._event.query())


class DeviceStream:
    """A stream of a card: `launch` calls `fn` at once, on the host thread, with this stream current."""

    def __init__(self, name: str, device: torch.device, trace: Trace) -> None:
        self.name = name
        self.step = Step(-1)
        self.on_run: Callable[[str, int], None] | None = None
        self.graphs: Graphs | None = None
        self._trace = trace
        self._waiting = Waiting()
        self._device: Any = torch.get_device_module(device)  # torch.cuda, torch.npu
        self._stream = self._device.Stream(device)

    def launch(self, fn: Callable[..., T], /, *args: Any, label: str = "") -> Pending[T]:
        step, pending = self.step, Pending[T](self.step)
        if step.captured and not self._trace.separate_launches:
            self._waiting.add(fn, args, pending, label)
            return pending
        self._run_waiting()
        graphs = self.graphs if step.captured else None
        self._run(step, pending, fn, args, label, graphs)
        return pending

    def _run_waiting(self) -> None:
        if self._waiting:
            calls, pendings, label = self._waiting.take()
            arguments = (calls, pendings, self.graphs)
            self._run(self.step, Pending[None](self.step), run_waiting, arguments, label, None)

    def _run(
        self,
        step: Step,
        pending: Pending[T],
        fn: Callable[..., T],
        args: tuple[Any, ...],
        label: str,
        graphs: Graphs | None,
    ) -> None:
        if step.error is not None:
            return
        try:
            if self.on_run is not None:
                self.on_run(label, step.index)
            span = self._trace.device_span(self.name, label, step.index, self._stream)
            with self._device.stream(self._stream), torch.no_grad(), span:
                self._before_call(step)
                pending.set(_call(fn, args, graphs))
        except Exception as error:  # noqa: BLE001 - kept for the host, which raises it again
            step.error = error

    def _before_call(self, step: Step) -> None:
        """What a device must be told before a launch of this step runs."""

    def record_event(self) -> DeviceEvent:
        self._run_waiting()
        event = self._device.Event()
        event.record(self._stream)
        return DeviceEvent(event, self.step)

    def wait_event(self, event: DeviceEvent) -> None:
        self._run_waiting()
        self._stream.wait_event(event._event)

    def synchronize(self) -> None:
        self._run_waiting()
        self._stream.synchronize()

    def take_cores(self) -> None:
        """Nothing to do: the work is not on the host's cores."""

    def release_cores(self) -> None:
        """Nothing to do: the work is not on the host's cores."""

    def owns_current_thread(self) -> bool:
        return bool(self._device.current_stream(self._stream.device) == self._stream)

    def close(self) -> None:
        self._stream.synchronize()


class CudaStream(DeviceStream):
    """A CUDA stream."""


class NpuStream(DeviceStream):
    """A stream of an Ascend NPU. `host_lens`: where attention finds the step's KV lengths, if it wants them."""

    host_lens: HostLens | None = None

    def _before_call(self, step: Step) -> None:
        if self.host_lens is not None:
            self.host_lens.seq_lens = step.seq_lens
