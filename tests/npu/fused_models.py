"""Tiny models of a shape that the fused operator takes (heads of 16), and engines whose attention it is."""

import copy
from functools import cache, partial
from typing import Any

import torch

from tests import tiny_models as tiny
from tests.harness import CHAIN, TREE_2, TREE_4, make_engine
from tests.hybrid_models import MARGIN, build

PAGE = 128
SHAPES = {
    "plain": (None, CHAIN),
    "ngram": ("NGRAM", (3, 4, 6)),
    "standalone-tree": ("STANDALONE", TREE_4),
    "eagle-chain": ("EAGLE", CHAIN),
    "eagle-tree": ("EAGLE", TREE_2),
    "multi-layer": ("MULTI_LAYER_EAGLE", CHAIN),
    "frozen-kv": ("FROZEN_KV_MTP", TREE_2),
    "hybrid": ("STANDALONE", TREE_2),  # half of its layers are recurrent
}
WIDE = {"hidden_size": 64}


@cache
def models(
    name: str, device: torch.device, dtype: torch.dtype = torch.float64, sigma: float = 0.25
) -> tuple[Any, Any]:
    """(target, draft). The draft says what the target says, but for noise of size `sigma` (a frozen-KV head: anything).

    EAGLE's targets have a sliding window, which the operator sees as a mask.
    """
    algorithm = SHAPES[name][0]
    if name == "hybrid":
        target = tiny.lively(partial(build, "qwen3_5_text", head_dim=16), min_margin=MARGIN)
        draft = tiny.noisy_copy(target, sigma)
    elif algorithm in ("EAGLE", "MULTI_LAYER_EAGLE"):
        target = tiny.lively(_even_mistral)
        make = tiny.constructed_head if algorithm == "EAGLE" else tiny.constructed_modules
        draft = make(target, sigma=sigma)
    else:
        target = tiny.lively(lambda seed: tiny.random_llama(seed, **WIDE))
        makers = {
            "STANDALONE": lambda: tiny.noisy_copy(target, sigma),
            "FROZEN_KV_MTP": lambda: _reader(target),
        }
        draft = makers[algorithm]() if algorithm in makers else None
    target = target.to(dtype).to(device)
    target.min_margin = MARGIN if name == "hybrid" else tiny.MIN_MARGIN  # for its oracle
    return target, None if draft is None else draft.to(dtype).to(device)  # after it: they share modules


def _even_mistral(seed: int) -> Any:
    """As the constructed MTP modules need it: embeddings with a root mean square of 1."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**tiny.config_kwargs(num_hidden_layers=1, sliding_window=tiny.WINDOW, **WIDE))
    model = tiny.seeded(lambda: tiny.in_float64(MistralForCausalLM(config)), seed)
    weight = model.model.embed_tokens.weight.data
    weight /= weight.square().mean(1, keepdim=True).sqrt()
    return model


def _reader(target: Any) -> Any:
    from spec_v2.models.frozen_kv_mtp import FrozenKvHead

    config = copy.deepcopy(target.config)
    config.num_hidden_layers, config.target_layer_ids = 2, [1, 0]
    return tiny.in_float64(tiny.seeded(lambda: FrozenKvHead(config, target), 3))


def fused_engine(
    name: str, schedule: str, device: torch.device, draft: Any = None, shape: Any = None, **changes: Any
) -> Any:
    """Recorded up to 4 requests, with the page size at which the operator reads pages of any width of queries."""
    algorithm, usual_shape = SHAPES[name]
    target, usual_draft = models(name, device)
    settings = {
        "page_size": PAGE,
        "max_running_requests": 6,
        "cuda_graph_max_bs": 4,
        "debug": False,
    } | changes
    return make_engine(
        target, algorithm, draft or usual_draft, shape or usual_shape, schedule=schedule, **settings
    )


def prompts_for(name: str, count: int) -> list[tuple[int, ...]]:
    """Of unequal length, the first two just below a page's end; for NGRAM they repeat themselves."""
    lengths = [123, 119, *(5 + 3 * i for i in range(count))][:count]
    prompts = [tiny.random_prompt(100 + i, n) for i, n in enumerate(lengths)]
    return [(prompt * 3)[: len(prompt) + 9] for prompt in prompts] if name == "ngram" else prompts


def pools_of(engine: Any) -> list[Any]:
    """Those that have layers."""
    cache = engine.scheduler.cache
    return [pool for pool in (cache.target_pool, cache.draft_pool) if pool.keys]
