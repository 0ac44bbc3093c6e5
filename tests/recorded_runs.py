"""Engines that replay their decode steps, what a run of one leaves behind, and models for any dtype.

Without a GPU the recordings are simulated (tests/simulated_graphs.py).
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spec_v2 import SamplingParams
from spec_v2.model_executor.fuse import speed_up
from spec_v2.model_executor.graph_runner import capture_sizes
from tests import tiny_models as tiny
from tests.eagle3_models import eagle3_head
from tests.harness import CHAIN, make_engine
from tests.simulated_graphs import attach

CAPTURED = 6
LARGEST = CAPTURED + 2
SIZES = capture_sizes(CAPTURED)
WIDE = {"hidden_size": 128, "intermediate_size": 256}  # heads of 32: the kernels' own shapes begin at 16
WIDE_TREE = (3, 4, 9)  # neither num_steps + 1 nodes, nor topk * num_steps
ROWS = ("new_seq_lens", "bonus_tokens", "topk_p", "topk_index", "hidden_states", "history")


class Setup(NamedTuple):
    algorithm: str | None
    shape: tuple[int, int, int]
    forced: int | None = None  # accept length, for drafters of which too little is accepted


SETUPS = {
    "plain": Setup(None, CHAIN),
    "ngram": Setup("NGRAM", (3, 4, 6), 3),
    "standalone": Setup("STANDALONE", CHAIN),
    "eagle-chain": Setup("EAGLE", CHAIN),
    "eagle-tree": Setup("EAGLE", WIDE_TREE),
    "eagle3-chain": Setup("EAGLE3", CHAIN, 3),
    "eagle3-tree": Setup("EAGLE3", WIDE_TREE),
}


def working_dtype(device: torch.device) -> torch.dtype:
    """What the engine's own path on this device is made for: the kernels on a GPU take no float64."""
    return torch.bfloat16 if device.type == "cuda" else torch.float64


@cache
def models(algorithm: str | None, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """(target, draft): a Llama, or for EAGLE a one-layer Mistral that its head repeats with some noise."""
    if algorithm == "EAGLE":
        target = tiny.seeded(lambda: _wide("Mistral", num_hidden_layers=1, sliding_window=tiny.WINDOW), 0)
        draft = tiny.constructed_head(target, sigma=0.25)
    else:
        target = tiny.seeded(lambda: _wide("Llama", num_hidden_layers=7), 0)
        makers = {"STANDALONE": tiny.noisy_copy, "EAGLE3": eagle3_head}
        draft = makers[algorithm](target) if algorithm in makers else None
    target = target.to(device, dtype)
    draft = None if draft is None else draft.to(device, dtype)  # after it: they share modules
    if device.type == "cuda":
        speed_up(target)
        if draft is not None:
            speed_up(draft, shared_with=target)
    return target, draft


def _wide(family: str, **changes: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{family}Config")(**tiny.config_kwargs(**WIDE, **changes))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    # nn.RMSNorm, as the constructed head copies them
    return tiny.in_float64(model)


def open_recorded(
    name: str, schedule: str, device: torch.device, monkeypatch: Any, *, replays: bool = True,
    dtype: torch.dtype | None = None, shape: tuple[int, int, int] | None = None, **changes: Any,
) -> Any:  # fmt: skip
    """An engine whose decode steps are recorded up to `CAPTURED` requests.

    `replays=False`: the same padded steps, each launch called as it is.
    """
    setup = SETUPS[name]
    target, draft = models(setup.algorithm, dtype or working_dtype(device), device)
    forced = None if setup.forced is None else {"speculative_simulated_accept_length": setup.forced}
    settings = {"max_running_requests": LARGEST, "cuda_graph_max_bs": CAPTURED} | (forced or {}) | changes
    engine = make_engine(
        target, setup.algorithm, draft, shape or setup.shape, schedule=schedule, debug=False, **settings
    )
    if device.type == "cpu":
        attach(engine, SIZES, monkeypatch)
    assert tuple(engine.scheduler.planner.sizes) == SIZES
    if not replays:
        engine._forward_stream.graphs = CalledAsTheyAre()
    return engine


class CalledAsTheyAre:
    """In a recorder's place: calls every launch."""

    def run(self, fn: Any, args: Any) -> Any:
        return fn(*args)


def prompts_for(name: str, count: int) -> list[tuple[int, ...]]:
    """Of unequal length; for NGRAM they repeat themselves."""
    prompts = [tiny.random_prompt(100 + seed, 9 + 3 * seed % 7) for seed in range(count)]
    return [prompt * 3 for prompt in prompts] if name == "ngram" else prompts


def lengths(count: int, tokens: int) -> list[SamplingParams]:
    """Greedy, most of them equally long: then a batch keeps its size for long enough to be replayed."""
    return [SamplingParams(max_new_tokens=tokens + i % 3) for i in range(count)]


class Watched:
    """Keeps what each step of an engine has decided, and the sizes of its batches.

    With the synchronous schedule also the step's tree and verdict as they lie on the device; with overlap the next
    step may have written over them already.
    """

    def __init__(self, engine: Any) -> None:
        self.steps: list[list[Tensor]] = []
        self.sizes: set[tuple[int, int]] = set()  # (requests, rows)
        self._whole = engine.server_args.schedule == "sync"
        self._process = engine.scheduler.processor.process
        engine.scheduler.processor.process = self.process

    def process(self, batch: Any, result: Any) -> Any:
        result.copy_done.synchronize()
        count, host = len(batch), result.host.get()
        kept = [host.predict, host.accept_lens, host.draft_depths, host.match_lens]
        if not batch.forward_mode.is_extend():
            self.sizes.add((count, len(host.predict)))
            if self._whole:
                kept += tensors_of(result.tree.get()) + tensors_of(result.verdict.get())
                kept += tensors_of(result.next_draft.get())
        self.steps.append([on_host(tensor[:count]) for tensor in kept])
        return self._process(batch, result)


def on_host(tensor: Tensor) -> Tensor:
    """A copy that is complete when this returns: the next step may write over the original."""
    return tensor.cpu().clone()


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors of a dataclass of tensors, in the order of its fields."""
    leaves: list[Tensor] = []
    for name in value.__dataclass_fields__:
        part = getattr(value, name)
        leaves += [part] if isinstance(part, Tensor) else tensors_of(part)
    return leaves


def memory_of(engine: Any) -> dict[str, Tensor]:
    """All KV but that of page 0, and all rows of the future map but row 0: padding writes there in any order."""
    engine._forward_stream.synchronize()
    cache, future_map = engine.scheduler.cache, engine.scheduler.future_map
    size = cache.pages.page_size
    pools = {"target": cache.target_pool, "draft": cache.draft_pool}
    kept = {
        f"{name} {kind} of layer {layer}": on_host(buffer[size:])
        for name, pool in pools.items()
        for kind, buffers in (("keys", pool.keys), ("values", pool.values))
        for layer, buffer in enumerate(buffers)
    }
    return kept | {column: on_host(getattr(future_map, column)[1:]) for column in ROWS}


def same_bits(left: Tensor, right: Tensor) -> bool:
    """NaN included: rows that nobody has used hold it."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    new = torch.contiguous_format  # a view of one element has any stride, and cannot be seen as bytes
    return torch.equal(*(x.flatten().clone(memory_format=new).view(torch.uint8) for x in (left, right)))


def plain_tokens(
    name: str, device: torch.device, dtype: torch.dtype, prompts: list, params: list
) -> list[tuple[int, ...]]:
    """What plain decoding says, one request at a time, every launch called as it is."""
    target, _ = models(SETUPS[name].algorithm, dtype, device)
    settings = {"max_running_requests": 1, "disable_cuda_graph": True}
    with make_engine(target, schedule="sync", debug=False, **settings) as engine:
        return [engine.generate([p], [q])[0].output_ids for p, q in zip(prompts, params, strict=True)]
