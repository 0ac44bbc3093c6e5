"""Recorded launches on an NPU: one NPU graph each, whose attention is given its KV lengths anew before each replay.

Ascend's attention takes lengths from the host, as attributes of a call. A graph keeps the attributes that it was
captured with, so each replay is preceded by `NPUGraph.update`, with one list of lengths for every attention call inside, in order:
the draft model's first forward reads `topk` keys beyond what a request has, its second `2 * topk`, and so on. Calls are noted
while they are captured (`HostLens.noting`), so no runner has to know what a step is made of.

SGLang has a runner for each kind of step. Here they are names for parts of one: each keeps the recordings that its step
function is in (a launch may be joined to its neighbours), and all else is in `GraphRunner`.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from spec_v2.kernels.paged_attention.host_lens import HostLens, KvSpan
from spec_v2.model_executor.graph_runner import GraphRunner

LENGTHS = "actual_seq_lengths_kv"


class NpuGraphRunner(GraphRunner):
    """NPU graphs that share a pool: those of plain decoding, NGRAM, frozen-KV heads, and all that no class below names."""

    step: ClassVar[str] = ""  # name of the step function whose recordings it keeps

    def __init__(self, device: torch.device, lens: HostLens, pool: Any, owned: dict[int, Tensor]) -> None:
        super().__init__(device, owned)
        self._lens, self._pool = lens, pool

    def capture(self, fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[[], None], Any]:
        npu: Any = torch.get_device_module(self.device)
        graph = npu.NPUGraph()
        recorded_on = npu.current_stream()
        with (
            self._lens.noting() as spans,
            # thread_local: downloads on the copy stream go on meanwhile
            npu.graph(
                graph,
                pool=self._pool,
                stream=recorded_on,
                auto_dispatch_capture=True,
                capture_error_mode="thread_local",
            ),
        ):
            outputs = fn(*args)
        return Replay(graph, tuple(spans), self._lens, npu.Event()), outputs


class Replay:
    """One NPU graph and the attention calls in it. Calling it gives these their lengths, then replays."""

    def __init__(self, graph: Any, spans: tuple[KvSpan, ...], lens: HostLens, fence: Any) -> None:
        self._graph, self._spans, self._lens, self._fence = graph, spans, lens, fence
        self._has_run = False

    def __call__(self) -> None:
        if self._spans:
            if self._has_run:
                self._fence.synchronize()  # until it ends, the replay before may read the lengths it was given
            self._graph.update(cpu_update_input=[{LENGTHS: self._lens.of(span)} for span in self._spans])
        self._graph.replay()
        self._fence.record()
        self._has_run = True


@final
class EAGLEDraftNpuGraphRunner(NpuGraphRunner):
    """Growing a tree with a draft model, EAGLE's or STANDALONE's, and what is joined to that: the target's verify."""

    step = "grow_tree"


@final
class EAGLEDraftExtendNpuGraphRunner(NpuGraphRunner):
    """The draft model reads what was accepted."""

    step = "draft_extend"


@final
class MultiLayerEagleDraftExtendNpuGraphRunner(NpuGraphRunner):
    """The same with one MTP module per draft step, each with a window of its own."""

    step = "extend_modules"


@final
class NpuGraphs:
    """What an NPU's stream hands its launches to: finds the runner that a launch belongs to."""

    def __init__(self, device: torch.device, lens: HostLens) -> None:
        pool, owned = torch.get_device_module(device).graph_pool_handle(), dict[int, Tensor]()
        kinds = (
            EAGLEDraftNpuGraphRunner,
            EAGLEDraftExtendNpuGraphRunner,
            MultiLayerEagleDraftExtendNpuGraphRunner,
        )
        self.runners = {kind.step: kind(device, lens, pool, owned) for kind in kinds}
        self.other = NpuGraphRunner(device, lens, pool, owned)

    @property
    def num_refused(self) -> int:
        """Launches that could not be recorded and run as they are."""
        return sum(runner.num_refused for runner in (*self.runners.values(), self.other))

    @property
    def num_captures(self) -> int:
        """Recordings of all runners."""
        return sum(runner.num_captures for runner in (*self.runners.values(), self.other))

    def run(self, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
        """The value of `fn(*args)`, as `GraphRunner.run` gives it. `fn` may be a sequence: its calls are then `args`."""
        calls = (fn, *(arg[0] for arg in args if isinstance(arg, tuple) and arg))
        names = [getattr(call, "__name__", "") for call in calls]
        runner = next((self.runners[name] for name in names if name in self.runners), self.other)
        return runner.run(fn, args)
