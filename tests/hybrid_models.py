"""Tiny random models with recurrent layers, one per kind of recurrence, and their states by recomputation.

transformers computes their norms and recurrences in fp32 whatever the model's dtype. Here the norms are float64 like the rest,
so that what is left of fp32 is in transformers' own recurrence, which only the oracle runs: a token must win by 1e-4.
"""

import copy
import random
from collections.abc import Sequence
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F

from tests import tiny_models as tiny

MARGIN = 1e-4
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "head_dim": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA
    | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_5_text": DELTA,
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_chunk_size": 16,
        "z_loss_coefficient": 0.0,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
        "position_embedding_type": "rope",
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
        "embedding_multiplier": 2.0,
        "logits_scaling": 2.0,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
}


def build(family: str, seed: int, **changes: Any) -> Any:
    """A random model in float64."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **tiny.config_kwargs(**FAMILIES[family] | changes))
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = tiny.seeded(lambda: AutoModelForCausalLM.from_config(config, **options), seed)
    model.generation_config.eos_token_id = None
    return in_float64(model)


def in_float64(model: Any) -> Any:
    """All of it, norms included."""
    model = model.to(torch.float64).eval().requires_grad_(False)
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "RMSNormGated")):
            module.forward = MethodType(wide_norm, module)
    return model


def wide_norm(norm: Any, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
    """What transformers' norms compute, in float64."""
    name, weight = type(norm).__name__, norm.weight
    gate_first = gate is not None and not name.startswith("Qwen")
    if gate_first:
        x = x * F.silu(gate)
    eps = getattr(norm, "variance_epsilon", None) or norm.eps
    grouped = x.unflatten(-1, (-1, getattr(norm, "group_size", x.shape[-1])))
    x = (grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
    if name.startswith("Qwen") and gate is None:
        weight = 1.0 + weight
    return weight * x * (F.silu(gate) if gate is not None and not gate_first else 1.0)


@cache
def hybrid(family: str, device: torch.device) -> Any:
    """The model of the first seed that is lively and never near a tie."""
    model = tiny.lively(partial(build, family), min_margin=MARGIN).to(device)
    model.min_margin = MARGIN  # for its oracle
    return model


@cache
def drafter(kind: str, family: str, device: torch.device) -> Any:
    """ "self" and "noisy": recurrent like the target, a model of its own. "head": an EAGLE head that repeats the target's
    layers without ever seeing the first token; its LM head is noisy too."""
    target = hybrid(family, device)
    if kind == "self":
        return target
    return (
        repeating_head(target, sigma=0.25 if family == "lfm2" else 0.15)
        if kind == "head"
        else tiny.noisy_copy(target, sigma=0.15)
    )


def repeating_head(target: Any, sigma: float) -> Any:
    """At position `p` it reads token `p + 1`, as every EAGLE head, and ignores hidden states."""
    from spec_v2.models.eagle import EagleHead

    config, size = copy.deepcopy(target.config), target.config.hidden_size
    make = partial(EagleHead, config, target, norm_input=True, norm_output=True, own_lm_head=True)
    head = in_float64(tiny.seeded(make, 3))
    head.decoder.load_state_dict(target.get_decoder().state_dict())
    head.fc.weight.data.zero_()
    head.fc.weight.data[:, :size] = torch.eye(size)
    head.fc.bias.data.zero_()
    head.lm_head = tiny.with_noise(target.lm_head, sigma, 7)
    return head.to(target.device).eval().requires_grad_(False)


def prompts(model: Any, lengths: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Random prompts whose next `count` tokens are all certain."""
    found: list[tuple[int, ...]] = []
    seed = 0
    while len(found) < len(lengths):
        prompt = tiny.random_prompt(seed, lengths[len(found)])
        seed += 1
        try:
            tiny.oracle_of(model).tokens(prompt, count)
        except tiny.NearTie:
            continue
        found.append(prompt)
    return found


def half_true_corpus(model: Any, texts: Sequence[tuple[int, ...]], count: int) -> torch.Tensor:
    """For NGRAM: twice what follows each prompt, each time with other tokens wrong, some in a row, so that trees branch."""
    from spec_v2.kernels.ngram_tree import NOTHING

    ids: list[int] = []
    for seed in (0, 1):
        rng = random.Random(seed)
        for prompt in texts:
            right = tiny.oracle_of(model).tokens(prompt, count)
            said = [(t + 1) % tiny.VOCAB if rng.random() < 0.2 else t for t in right]
            ids += [*prompt, *said, NOTHING]
    return torch.tensor(ids, device=model.device)


def one_convolution(seed: int) -> Any:
    """A model without attention: its next token is a function of the last three."""
    return build("lfm2", seed, num_hidden_layers=1, layer_types=["conv"])


def six_layers(seed: int) -> Any:
    """Deep enough for an EAGLE-3 head."""
    layers = DELTA["layer_types"] * 3
    return build("qwen3_5_text", seed, num_hidden_layers=len(layers), layer_types=layers)
