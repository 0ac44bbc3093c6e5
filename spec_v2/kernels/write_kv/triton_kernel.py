"""A program copies a stretch of one token's key and of its value, heads side by side."""

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.dispatch import ceil_div, debug_kernels, next_power_of_2


@triton.jit
@no_type_check
def _write_kv(
    key_buffer_ptr,  # [slots, heads, key_dim], contiguous
    value_buffer_ptr,  # [slots, heads, value_dim], contiguous
    slots_ptr,  # [t]
    key_ptr,  # [t, heads, key_dim], any strides
    value_ptr,  # [t, heads, value_dim], any strides
    slots_stride,
    key_stride_t,
    key_stride_head,
    key_stride_dim,
    value_stride_t,
    value_stride_head,
    value_stride_dim,
    num_slots,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE: tl.constexpr,
    CHECK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token * slots_stride).to(tl.int64)
    if CHECK:
        tl.device_assert((slot >= 0) & (slot < num_slots), "slots: outside of the pool")
    e = tl.program_id(1) * TILE + tl.arange(0, TILE)

    in_key = e < HEADS * KEY_DIM
    head, dim = (e // KEY_DIM).to(tl.int64), e % KEY_DIM
    key = tl.load(key_ptr + token * key_stride_t + head * key_stride_head + dim * key_stride_dim, mask=in_key)
    in_value = e < HEADS * VALUE_DIM
    head, dim = (e // VALUE_DIM).to(tl.int64), e % VALUE_DIM
    value = tl.load(
        value_ptr + token * value_stride_t + head * value_stride_head + dim * value_stride_dim, mask=in_value
    )
    tl.store(key_buffer_ptr + slot * (HEADS * KEY_DIM) + e, key, mask=in_key)
    tl.store(value_buffer_ptr + slot * (HEADS * VALUE_DIM) + e, value, mask=in_value)


def write_kv_triton(
    key_buffer: Tensor, value_buffer: Tensor, slots: Tensor, key: Tensor, value: Tensor
) -> None:
    """Keys, values and slots with any strides; contiguous buffers of the same dtype as what is written."""
    assert key_buffer.is_contiguous(), "the pool's keys lie together"
    assert value_buffer.is_contiguous(), "the pool's values lie together"
    if key.dtype != key_buffer.dtype or value.dtype != value_buffer.dtype:
        raise ValueError(
            f"key {key.dtype}, value {value.dtype}: the pool keeps {key_buffer.dtype} and {value_buffer.dtype}"
        )
    t, heads, key_dim = key.shape
    value_dim = value.shape[2]
    if t == 0:
        return
    widest = heads * max(key_dim, value_dim)
    tile = min(next_power_of_2(widest), 1024)
    _write_kv[(t, ceil_div(widest, tile))](
        key_buffer, value_buffer, slots, key, value, slots.stride(0), *key.stride(), *value.stride(), len(key_buffer),
        HEADS=heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, TILE=tile, CHECK=debug_kernels(), debug=debug_kernels(),
    )  # fmt: skip
