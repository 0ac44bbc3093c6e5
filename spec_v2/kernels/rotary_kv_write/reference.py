"""Norm, rotate, store: the same operations in the same order as transformers."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spec_v2.kernels.rms_norm.reference import rms_norm_reference


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over a head's width, as in Qwen3: one weight for all query heads, one for all KV heads."""

    query_weight: Float[Tensor, " dim"]
    key_weight: Float[Tensor, " dim"]
    eps: float


def rotary_kv_write_reference(
    query: Float[Tensor, "t heads dim"],
    key: Float[Tensor, "t kv_heads dim"],
    value: Float[Tensor, "t kv_heads value_dim"],
    angles: tuple[Float[Tensor, "t rotary_dim"], Float[Tensor, "t rotary_dim"]] | None,
    slots: Int[Tensor, " t"],
    keys: Float[Tensor, "num_slots kv_heads dim"],
    values: Float[Tensor, "num_slots kv_heads value_dim"],
    norms: HeadNorms | None = None,
) -> Float[Tensor, "t heads dim"]:
    """Any dtype."""
    if norms is not None:
        query = rms_norm_reference(query, norms.query_weight, norms.eps)
        key = rms_norm_reference(key, norms.key_weight, norms.eps)
    if angles is not None:
        query, key = rotate(query, *angles), rotate(key, *angles)
    keys.index_copy_(0, slots.long(), key)
    values.index_copy_(0, slots.long(), value)
    return query.contiguous()


def rotate(
    x: Float[Tensor, "t heads dim"], cos: Float[Tensor, "t rotary_dim"], sin: Float[Tensor, "t rotary_dim"]
) -> Float[Tensor, "t heads dim"]:
    """The first `rotary_dim` dimensions turned, the others as they were."""
    width = cos.shape[1]
    turned, passed = x[..., :width], x[..., width:]
    low, high = turned.chunk(2, -1)
    turned = turned * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]
    return torch.cat([turned, passed], -1)
