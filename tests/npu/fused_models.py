"""Tiny models of a shape that the fused operator takes (heads of 16), and engines whose attention it is."""

from functools import cache
from typing import Any

import torch

from tests import tiny_models as tiny
from tests.harness import CHAIN, TREE_2, TREE_4, make_engine

PAGE = 128
SHAPES = {
    "plain": (None, CHAIN),
    "ngram": ("NGRAM", (3, 4, 6)),
    "standalone-tree": ("STANDALONE", TREE_4),
    "eagle-chain": ("EAGLE", CHAIN),
    "eagle-tree": ("EAGLE", TREE_2),
}
WIDE = {"hidden_size": 64}


@cache
def models(
    algorithm: str | None, device: torch.device, dtype: torch.dtype = torch.float64
) -> tuple[Any, Any]:
    """(target, draft). For EAGLE a target with a sliding window, which the operator sees as a mask."""
    if algorithm == "EAGLE":
        target = tiny.lively(wide_mistral)
        draft = tiny.constructed_head(target, sigma=0.25)
    else:
        target = tiny.lively(lambda seed: tiny.random_llama(seed, **WIDE))
        draft = tiny.noisy_copy(target) if algorithm == "STANDALONE" else None
    target = target.to(dtype).to(device)
    return target, None if draft is None else draft.to(dtype).to(device)  # after it: they share modules


def wide_mistral(seed: int) -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**tiny.config_kwargs(num_hidden_layers=1, sliding_window=tiny.WINDOW, **WIDE))
    return tiny.seeded(lambda: tiny.in_float64(MistralForCausalLM(config)), seed)


def fused_engine(name: str, schedule: str, device: torch.device, **changes: Any) -> Any:
    """Recorded up to 4 requests, one page size at which the operator reads pages of any width of queries."""
    algorithm, shape = SHAPES[name]
    target, draft = models(algorithm, device)
    settings = {
        "page_size": PAGE,
        "max_running_requests": 6,
        "cuda_graph_max_bs": 4,
        "debug": False,
    } | changes
    return make_engine(target, algorithm, draft, shape, schedule=schedule, **settings)


def prompts_for(name: str, count: int) -> list[tuple[int, ...]]:
    """Of unequal length, the first two just below a page's end; for NGRAM they repeat themselves."""
    lengths = [123, 119, *(5 + 3 * i for i in range(count))][:count]
    prompts = [tiny.random_prompt(100 + i, n) for i, n in enumerate(lengths)]
    return [(prompt * 3)[: len(prompt) + 9] for prompt in prompts] if name == "ngram" else prompts


def pools_of(engine: Any) -> list[Any]:
    """Those that have layers."""
    cache = engine.scheduler.cache
    return [pool for pool in (cache.target_pool, cache.draft_pool) if pool.keys]
