"""Tiny random models with recurrent layers, one per kind of recurrence, and their states by recomputation.

transformers computes their norms and recurrences in fp32 whatever the model's dtype. Here the norms are float64 like the rest,
so that what is left of fp32 is in transformers' own recurrence, which only the oracle runs: a token must win by 1e-4.
"""

from functools import cache, partial
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
        "num_logits_to_keep": None,
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
    model = model.to(torch.float64).eval().requires_grad_(False)
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "RMSNormGated")):
            module.forward = partial(wide_norm, module)
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
def hybrid(family: str, device: torch.device, **changes: Any) -> Any:
    """The model of the first seed that is lively and never near a tie."""
    make = partial(build, family, **changes)
    return tiny.lively(make, min_margin=MARGIN).to(device)
