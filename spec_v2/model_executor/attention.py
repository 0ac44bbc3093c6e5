"""The attention function that transformers' own model classes call, registered under one name.

It stores the new keys and values in our slots, then lets each query attend to the keys that its group names.
A key of another branch of a draft tree, or of another request, is never among them.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from spec_v2.kernels.paged_attention import paged_attention
from spec_v2.mem_cache.kv_pool import LayerGeometry
from spec_v2.model_executor.forward_batch import ForwardBatch

NAME = "spec_v2"

# What a model may pass to its attention function. Anything else that is set would be ignored in silence.
HONOURED = {"scaling", "sliding_window", "softcap", "s_aux", "forward_batch", "is_causal"}
HARMLESS = {
    "dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
    "position_embeddings", "position_bias_is_none", "output_router_logits", "cu_seq_lens_q", "cu_seq_lens_k",
    "max_length_q", "max_length_k", "cache_params", "return_dict", "logits_to_keep", "layer_idx",
}  # fmt: skip


def register() -> None:
    """Make `attn_implementation="spec_v2"` known to transformers. Calling it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, slot_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Visibility is the forward batch's; a dense mask is never built."""


class NotOnSlots(RuntimeError):
    """The attention function was called without a forward batch."""


class GeometryProbe:
    """Stands in for a forward batch once, at load: records what each layer's attention wants."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerGeometry] = {}
        self.unknown: set[str] = set()

    def record(self, layer: int, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> None:
        self.layers[layer] = LayerGeometry(key.shape[1], key.shape[3], value.shape[3])
        self.unknown |= {k for k, v in kwargs.items() if v is not None and k not in HONOURED | HARMLESS}


def slot_attention(
    module: torch.nn.Module,
    query: Float[Tensor, "1 heads t key_dim"],
    key: Float[Tensor, "1 kv_heads t key_dim"],
    value: Float[Tensor, "1 kv_heads t value_dim"],
    attention_mask: Tensor | None,
    *,
    forward_batch: Any = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend over slots. Returns `[1, t, heads, value_dim]`, as transformers expects.

    `scaling`, `sliding_window` (tokens), `softcap` and `s_aux` (attention sinks, one logit per head) mean
    what they mean in transformers. Raises RuntimeError without a `forward_batch`.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(forward_batch, GeometryProbe):
        forward_batch.record(layer, key, value, kwargs)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
    if not isinstance(forward_batch, ForwardBatch):
        raise NotOnSlots("this model runs on spec_v2's slots: call it through ModelRunner.forward")

    pool = forward_batch.kv_pool
    pool.write(layer, forward_batch.out_slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    if forward_batch.paged is not None:
        attended = paged_attention(
            query[0].transpose(0, 1),
            pool.keys[layer],
            pool.values[layer],
            forward_batch.paged,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
        )
        return attended[None], None
    out = []
    for group in forward_batch.groups:
        b, q = group.query_positions.shape
        queries = query[0, :, group.start : group.end].unflatten(1, (b, q)).transpose(0, 1)
        keys = pool.keys[layer][group.key_slots].transpose(1, 2)
        values = pool.values[layer][group.key_slots].transpose(1, 2)
        mask = group.mask_for(sliding_window)[:, None]
        if softcap is None and s_aux is None:
            attended = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
            )
        else:
            attended = attend_with_softcap_or_sinks(queries, keys, values, mask, scaling, softcap, s_aux)
        out.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(out)[None], None


def attend_with_softcap_or_sinks(
    queries: Float[Tensor, "b heads q key_dim"],
    keys: Float[Tensor, "b kv_heads m key_dim"],
    values: Float[Tensor, "b kv_heads m value_dim"],
    mask: Bool[Tensor, "b 1 q m"],
    scaling: float,
    softcap: float | None,
    s_aux: Float[Tensor, " heads"] | None,
) -> Float[Tensor, "b heads q value_dim"]:
    """What torch's fused attention cannot do: capped logits, and sinks that take weight but give nothing."""
    group_size = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group_size, 1), values.repeat_interleave(group_size, 1)
    logits = (queries @ keys.transpose(2, 3)) * scaling
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.masked_fill(~mask, -math.inf)
    if s_aux is not None:
        sink = s_aux.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sink], -1)
    # Gemma-2 and GPT-OSS take their softmax in fp32; a float64 model keeps its own precision.
    wide = logits if logits.dtype == torch.float64 else logits.float()
    weights = wide.softmax(-1).to(queries.dtype)[..., : keys.shape[2]]
    return weights @ values
