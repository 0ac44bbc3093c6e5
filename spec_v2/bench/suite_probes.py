"""Parts of a step by themselves: attention over a tree's tokens, and all that a step does beside its forwards.

They go through the functions that a step calls, on shapes of a real one. On CUDA a part is captured in a graph
and replayed, as the launches of small kernels would cost more than the kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from spec_v2.bench.prediction import Hardware, seconds_of
from spec_v2.bench.suite_models import ModelPlan
from spec_v2.kernels.build_tree import build_tree
from spec_v2.mem_cache.kv_cache_builder import KvCache, build_kv_cache
from spec_v2.mem_cache.kv_pool import LayerGeometry
from spec_v2.model_executor.attention import slot_attention
from spec_v2.model_executor.forward_batch import window_forward_batch
from spec_v2.model_executor.model_runner import ModelOutput, ModelRunner
from spec_v2.sampling_params import SamplingParams
from spec_v2.scheduler.future_map import FutureMap
from spec_v2.scheduler.sampling_batch_info import SamplingBatchInfo
from spec_v2.scheduler.schedule_batch import Request
from spec_v2.speculative.verify import verify
from spec_v2.types import NextDraft, StepInputs, TreeShape

TREE = TreeShape(num_steps=5, topk=4, num_draft_tokens=16, longest_path=5, is_tree=True)
CALLS = 20  # in one timed stretch: a single call is too short for a clock


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One value per repetition, in the row's unit; `floor`: what the same costs in bytes alone."""

    values: list[float]
    floor: float
    note: str


@dataclass(frozen=True, slots=True)
class Part:
    """Something to time, and where it runs."""

    run: Callable[[], Any]
    device: torch.device

    def seconds(self, repetitions: int) -> tuple[list[float], str]:
        """Seconds of one call, measured `repetitions` times, and how it was launched."""
        replay, note = (
            _in_a_graph(self.run) if self.device.type == "cuda" else (self.run, "called one by one")
        )

        def stretch() -> None:
            for _ in range(CALLS):
                replay()

        stretches = [seconds_of(stretch, self.device, repetitions=1) for _ in range(repetitions)]
        return [seconds / CALLS for seconds in stretches], note


def _in_a_graph(run: Callable[[], Any]) -> tuple[Callable[[], Any], str]:
    """The call as a CUDA graph's replay, or as it is where it cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # compiles, allocates
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        torch.cuda.synchronize()
        return run, f"launched one by one, as it cannot be captured: {str(error).splitlines()[0]}"
    return graph.replay, "replayed as a CUDA graph"


def _geometry(plan: ModelPlan, layers: int) -> tuple[LayerGeometry, ...]:
    width = plan.config["hidden_size"] // plan.config["num_attention_heads"]
    return (LayerGeometry(plan.config["num_key_value_heads"], width, width),) * layers


def _cache(plan: ModelPlan, layers: int, batch_size: int, context: int, device: torch.device) -> KvCache:
    """A cache in which request `i` owns row `i + 1`, its slots scattered as in a long-running engine."""
    cache = build_kv_cache(
        target_geometry=_geometry(plan, layers), draft_geometry=(), dtype=getattr(torch, plan.dtype), device=device,
        page_size=1, max_running_requests=batch_size, context_length=context, slots_per_step=TREE.num_draft_tokens,
        max_total_tokens=batch_size * (context + 2 * TREE.num_draft_tokens),
    )  # fmt: skip
    width = cache.row_table.width
    order = torch.randperm(cache.pages.num_usable, generator=torch.Generator().manual_seed(plan.seed)) + 1
    slots = order.repeat(-(-batch_size * width // len(order)))[: batch_size * width].view(batch_size, width)
    cache.row_table.slots[1:] = slots.to(device, torch.int32)
    return cache


@torch.no_grad()
def verify_attention(
    plan: ModelPlan, hardware: Hardware, device: torch.device, *, batch_size: int, repetitions: int,
    context: int = 4096, tokens: int = 8,
) -> ProbeResult:  # fmt: skip
    """One layer's attention over `tokens` chained tokens per request, as percent of the speed of a copy.

    Counted is the KV that has to be read, once; the new tokens' KV is written within the time.
    """
    cache = _cache(plan, 1, batch_size, context + tokens, device)
    pool = cache.target_pool
    for buffer in (*pool.keys, *pool.values):
        buffer.normal_()
    rows = torch.arange(1, batch_size + 1, device=device)
    prefix_lens = torch.full_like(rows, context)
    positions = prefix_lens[:, None] + torch.arange(tokens, device=device)
    forward_batch = window_forward_batch(
        kv_pool=pool, row_table=cache.row_table, rows=rows, prefix_lens=prefix_lens, max_prefix_len=context,
        window_slots=cache.row_table.at(rows, positions), window_positions=positions,
        visible=torch.ones(batch_size, tokens, tokens, dtype=torch.bool, device=device).tril(),
    )  # fmt: skip
    (geometry,) = pool.geometry
    heads, total = plan.config["num_attention_heads"], batch_size * tokens
    query, key, value = (
        torch.randn(1, count, total, geometry.key_dim, device=device).to(pool.keys[0].dtype)
        for count in (heads, geometry.num_kv_heads, geometry.num_kv_heads)
    )
    layer: Any = torch.nn.Module()
    layer.layer_idx, layer.num_key_value_groups = 0, heads // geometry.num_kv_heads
    part = Part(lambda: slot_attention(layer, query, key, value, None, forward_batch=forward_batch), device)
    seconds, note = part.seconds(repetitions)
    read = (
        batch_size * (context + tokens) * geometry.num_kv_heads * 2 * geometry.key_dim * query.element_size()
    )
    return ProbeResult([100 * read / s / hardware.copy_bytes_per_second for s in seconds], 100.0, note)


class _Answers(ModelRunner):
    """Stands in for the target: its forward costs nothing."""

    def __init__(self, output: ModelOutput) -> None:
        self._output = output

    def forward(self, *args: Any, **kwargs: Any) -> ModelOutput:
        return self._output


@torch.no_grad()
def accept_and_commit(
    plan: ModelPlan, hardware: Hardware, device: torch.device, *, batch_size: int, repetitions: int
) -> ProbeResult:
    """Milliseconds of all that a tree step does between its forwards, with greedy requests.

    Gathers the rows, re-ranks the candidates into a tree, verifies with a target that has its logits already
    (places, ancestors, arg-max over all nodes, the walk, the KV's move), publishes, and stashes.
    """
    step = _TreeStep(plan, batch_size, device)
    seconds, note = Part(step.run, device).seconds(repetitions)
    logits = step.target._output.logits
    floor = logits.numel() * logits.element_size() / hardware.copy_bytes_per_second
    return ProbeResult([1e3 * s for s in seconds], 1e3 * floor, note)


class _TreeStep:
    """One step's tensors, and the step without its forwards."""

    def __init__(self, plan: ModelPlan, batch_size: int, device: torch.device) -> None:
        config, dtype = plan.config, getattr(torch, plan.dtype)
        generator = torch.Generator(device).manual_seed(plan.seed)
        self._b, k = batch_size, TREE.topk
        self.cache = _cache(plan, config["num_hidden_layers"], batch_size, plan.prompt_tokens + 64, device)
        self.rows = torch.arange(1, batch_size + 1, device=device)
        nodes = batch_size * TREE.num_draft_tokens
        self.target = _Answers(
            ModelOutput(
                torch.randn(nodes, config["vocab_size"], generator=generator, device=device).to(dtype),
                torch.randn(nodes, 3 * config["hidden_size"], generator=generator, device=device).to(dtype),
            )
        )
        self.next_draft = NextDraft(
            topk_p=torch.rand(batch_size, k, generator=generator, device=device),
            topk_index=torch.arange(k, device=device).expand(batch_size, k).contiguous(),
            hidden_states=torch.zeros(batch_size, config["hidden_size"], dtype=dtype, device=device),
            draft_probs=torch.empty(batch_size, 0, device=device),
        )
        candidates = k + (TREE.num_steps - 1) * k * k
        levels = [torch.full((k,), -1)]
        for level in range(TREE.num_steps - 1):
            above = 0 if level == 0 else k + (level - 1) * k * k
            levels.append((above + torch.arange(k)).repeat_interleave(k))
        self.parents = torch.cat(levels).to(device).expand(batch_size, -1)
        self.tokens = torch.arange(candidates, device=device).expand(batch_size, -1)
        self.scores = torch.rand(batch_size, candidates, generator=generator, device=device)
        for level in range(1, TREE.num_steps):  # a product of probabilities falls along a path
            part = slice(k + (level - 1) * k * k, k + level * k * k)
            self.scores[:, part] *= self.scores.gather(1, self.parents[:, part])
        self.future_map = FutureMap(
            num_rows=self.cache.rows.num_rows, topk=k, hidden_size=config["hidden_size"], history_width=0,
            draft_probs_width=0, vocab_size=config["vocab_size"], dtype=dtype, device=device,
        )  # fmt: skip
        self.future_map.new_seq_lens[:] = plan.prompt_tokens
        self.future_map.bonus_tokens[:] = 1
        self.sampling = SamplingBatchInfo.from_requests(_greedy_requests(batch_size), False).to(device)
        self.seq_lens = torch.full_like(self.rows, plan.prompt_tokens)
        self.max_seq_len = plan.prompt_tokens

    def run(self) -> None:
        """Once; every call finds the same lengths."""
        inputs: StepInputs = self.future_map.resolve(self.rows, self.seq_lens)
        tree = build_tree(
            root_tokens=inputs.bonus_tokens, tokens=self.tokens, scores=self.scores, parents=self.parents,
            num_nodes=TREE.num_draft_tokens,
        )  # fmt: skip
        verdict = verify(
            self.target, self.cache, inputs, tree, TREE, self.sampling, self.future_map.token_counts,
            self.max_seq_len, True,
        )  # fmt: skip
        self.future_map.publish(self.rows, verdict)
        self.future_map.stash(self.rows, verdict, self.next_draft)


def _greedy_requests(count: int) -> list[Request]:
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    return [
        Request(
            request_id=i, prompt_ids=(1,), params=params, seed=i, max_new_tokens=8, stop_token_ids=frozenset()
        )
        for i in range(count)
    ]


PROBES: dict[str, Callable[..., ProbeResult]] = {"attention": verify_attention, "commit": accept_and_commit}
"""The probes by the kind of figure that they are."""
