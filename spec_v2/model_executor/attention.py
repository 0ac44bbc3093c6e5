"""The attention function that transformers' own model classes call, registered under one name.

It stores the new keys and values in our slots, then lets each query attend to the keys that its group names.
A key of another branch of a draft tree, or of another request, is never among them.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spec_v2.kernels.paged_attention import paged_attention
from spec_v2.kernels.paged_attention.npu import paged_attention_npu
from spec_v2.mem_cache.kv_pool import LayerGeometry
from spec_v2.model_executor.forward_batch import AttentionGroup, ForwardBatch
from spec_v2.model_executor.recurrence import StateProbe

NAME = "spec_v2"

# Up to this many query tokens, the query heads that share a KV head become rows of one product. torch's fused
# attention on a CPU is five times slower at one query row per head (178 and 37 us for 320 keys of SmolLM2, 2 cores);
# for long prompts it makes no difference, and the bias would be as many times larger as heads share a KV head.
MAX_PACKED_QUERIES = 64

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
    """Stands in for a forward batch once, at load: records what each layer's attention wants, or its recurrence."""

    def __init__(self) -> None:
        self.states = StateProbe()
        self.layers: dict[int, LayerGeometry] = {}
        self.options: dict[int, dict[str, Any]] = {}  # what each layer passes on to `attend_written`
        self.num_readers = 0  # layers without keys and values of their own
        self.unknown: set[str] = set()
        self.modules: list[torch.nn.Module] = []  # that attend

    @property
    def geometry(self) -> tuple[LayerGeometry, ...]:
        """Of all layers, in order. A recurrent layer keeps nothing per token."""
        everything = dict.fromkeys(self.states.layers, LayerGeometry(0, 0, 0)) | self.layers
        return tuple(everything[i] for i in sorted(everything))

    def record(
        self,
        module: torch.nn.Module,
        layer: int,
        key: Tensor | None,
        value: Tensor | None,
        options: dict[str, Any],
        kwargs: dict[str, Any],
    ) -> None:
        self.modules.append(module)
        if key is None or value is None:
            self.num_readers += 1
        else:
            self.layers[layer] = LayerGeometry(key.shape[1], key.shape[3], value.shape[3])
            self.options[layer] = options
        self.unknown |= {k for k, v in kwargs.items() if v is not None and k not in HONOURED | HARMLESS}


def slot_attention(
    module: torch.nn.Module,
    query: Float[Tensor, "1 heads t key_dim"],
    key: Float[Tensor, "1 kv_heads t key_dim"] | None,
    value: Float[Tensor, "1 kv_heads t value_dim"] | None,
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
    what they mean in transformers. Without `key` and `value` nothing is written: the layer reads what another model
    has left there. Raises RuntimeError without a `forward_batch`.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    options: dict[str, Any] = {
        "scaling": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "sliding_window": sliding_window,
        "softcap": softcap,
        "s_aux": s_aux,
    }
    if isinstance(forward_batch, GeometryProbe):
        forward_batch.record(module, layer, key, value, options, kwargs)
        width = query.shape[-1] if value is None else value.shape[-1]
        return query.new_zeros(1, query.shape[2], query.shape[1], width), None
    if not isinstance(forward_batch, ForwardBatch):
        raise NotOnSlots("this model runs on spec_v2's slots: call it through ModelRunner.forward")

    if key is not None and value is not None:
        key, value = key[0].transpose(0, 1), value[0].transpose(0, 1)
        forward_batch.kv_pool.write(layer, forward_batch.out_slots, key, value)
    return attend_written(layer, query[0].transpose(0, 1), forward_batch, **options)[None], None


def attend_written(
    layer: int,
    query: Float[Tensor, "t heads key_dim"],
    forward_batch: ForwardBatch,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "t heads value_dim"]:
    """Attend over slots, those of this forward's own tokens included: their KV has been written."""
    pool = forward_batch.kv_pool
    if forward_batch.paged is not None:
        return paged_attention(
            query,
            pool.keys[layer],
            pool.values[layer],
            forward_batch.paged,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
        )
    if forward_batch.npu is not None:
        if (
            softcap is not None or s_aux is not None
        ):  # of a head that reads another model's KV; all others are asked before
            raise RuntimeError(
                "device='npu': this head's attention has a softcap or sinks, and its target's has none; use --page-size 1"
            )
        return paged_attention_npu(
            query, pool.keys[layer], pool.values[layer], forward_batch.npu,
            scaling=scaling, sliding_window=sliding_window,
        )  # fmt: skip
    out: list[Tensor] = []
    for group in forward_batch.groups:
        b, q = group.query_positions.shape
        queries = query[group.start : group.end].unflatten(0, (b, q)).transpose(1, 2)
        keys, values = (gather(buffer[layer], group.key_slots) for buffer in (pool.keys, pool.values))
        if softcap is None and s_aux is None:
            attended = attend(queries, keys, values, group, scaling, sliding_window)
        else:
            mask = group.mask_for(sliding_window)[:, None]
            attended = attend_with_softcap_or_sinks(queries, keys, values, mask, scaling, softcap, s_aux)
        out.append(attended.transpose(1, 2).flatten(0, 1))
    return out[0] if len(out) == 1 else torch.cat(out)


def gather(
    buffer: Float[Tensor, "slots kv_heads dim"], slots: Int[Tensor, "b m"]
) -> Float[Tensor, "b kv_heads m dim"]:
    """The slots' entries, by request. `index_select` is several times faster than an index on a CPU."""
    return buffer.index_select(0, slots.flatten()).unflatten(0, slots.shape).transpose(1, 2)  # type: ignore[no-any-return]


def attend(
    queries: Float[Tensor, "b heads q key_dim"],
    keys: Float[Tensor, "b kv_heads m key_dim"],
    values: Float[Tensor, "b kv_heads m value_dim"],
    group: AttentionGroup,
    scaling: float,
    sliding_window: int | None,
) -> Float[Tensor, "b heads q value_dim"]:
    """Softmax attention by torch's fused function."""
    (b, heads, q, _), kv_heads = queries.shape, keys.shape[1]
    sharing = heads // kv_heads if q <= MAX_PACKED_QUERIES else 1
    bias = group.bias_for(sliding_window, sharing, queries.dtype)
    if sharing > 1:
        queries = queries.reshape(b, kv_heads, sharing * q, -1)
    attended = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=bias, scale=scaling, enable_gqa=sharing == 1
    )
    return attended.reshape(b, heads, q, -1)


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
