"""A program takes a few heads of one token: of its query, of its key or of its value."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.dispatch import ceil_div, debug_kernels, next_power_of_2
from spec_v2.kernels.floats import unit_stride
from spec_v2.kernels.pdl import after_kernel_ahead, pdl_options
from spec_v2.kernels.rotary_kv_write.reference import HeadNorms

NUMBERS_PER_PROGRAM = 512  # one warp, two loads of 16 bytes per thread in bf16


@triton.jit
@no_type_check
def _heads(
    source,  # this token's heads, HEADS of them
    target,  # where they go, side by side
    weight,  # [DIM], with NORM
    cos,  # this token's, with ROTARY
    sin,
    source_stride_head,
    first_head,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # heads of a program
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,  # dimensions that turn; 0: none
    NORM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    HALF: tl.constexpr = ROTARY // 2
    dtype = target.dtype.element_ty
    head = first_head + tl.arange(0, GROUP)[:, None]
    lane = tl.arange(0, BLOCK_HALF)[None, :]
    rest = ROTARY + tl.arange(0, BLOCK_REST)[None, :]
    in_half = (head < HEADS) & (lane < HALF)
    in_rest = (head < HEADS) & (rest < DIM)
    source += head * source_stride_head
    target += head * DIM

    squares = tl.zeros([GROUP], tl.float32)
    if ROTARY > 0:
        low = tl.load(source + lane, mask=in_half, other=0.0).to(tl.float32)
        high = tl.load(source + HALF + lane, mask=in_half, other=0.0).to(tl.float32)
        squares += tl.sum(low * low, 1) + tl.sum(high * high, 1)
    if DIM > ROTARY:
        passed = tl.load(source + rest, mask=in_rest, other=0.0).to(tl.float32)
        squares += tl.sum(passed * passed, 1)
    if NORM:
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        if ROTARY > 0:
            weight_low = tl.load(weight + lane, mask=lane < HALF, other=0.0).to(tl.float32)
            weight_high = tl.load(weight + HALF + lane, mask=lane < HALF, other=0.0).to(tl.float32)
            low = (weight_low * (low * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
            high = (weight_high * (high * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        if DIM > ROTARY:
            weight_rest = tl.load(weight + rest, mask=rest < DIM, other=0.0).to(tl.float32)
            passed = weight_rest * (passed * scale).to(dtype).to(tl.float32)
    if ROTARY > 0:
        in_row = lane < HALF
        cos_low = tl.load(cos + lane, mask=in_row, other=0.0).to(tl.float32)
        cos_high = tl.load(cos + HALF + lane, mask=in_row, other=0.0).to(tl.float32)
        sin_low = tl.load(sin + lane, mask=in_row, other=0.0).to(tl.float32)
        sin_high = tl.load(sin + HALF + lane, mask=in_row, other=0.0).to(tl.float32)
        turned_low = (low * cos_low).to(dtype).to(tl.float32) + (-high * sin_low).to(dtype).to(tl.float32)
        turned_high = (high * cos_high).to(dtype).to(tl.float32) + (low * sin_high).to(dtype).to(tl.float32)
        tl.store(target + lane, turned_low.to(dtype), mask=in_half)
        tl.store(target + HALF + lane, turned_high.to(dtype), mask=in_half)
    if DIM > ROTARY:
        tl.store(target + rest, passed.to(dtype), mask=in_rest)


@triton.jit
@no_type_check
def _rotary_kv_write(
    query_ptr,  # [t, HEADS, DIM], heads in one piece
    key_ptr,  # [t, KV_HEADS, DIM], heads in one piece
    value_ptr,  # [t, KV_HEADS, VALUE_DIM], heads in one piece
    cos_ptr,  # [t, ROTARY], rows in one piece
    sin_ptr,
    query_weight_ptr,  # [DIM], read with NORM
    key_weight_ptr,
    slots_ptr,  # [t]
    out_ptr,  # [t, HEADS, DIM], out
    keys_ptr,  # [num_slots, KV_HEADS, DIM], out
    values_ptr,  # [num_slots, KV_HEADS, VALUE_DIM], out
    query_stride_t,
    query_stride_head,
    key_stride_t,
    key_stride_head,
    value_stride_t,
    value_stride_head,
    cos_stride_t,
    sin_stride_t,
    slots_stride,
    num_slots,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY_GROUPS: tl.constexpr,
    KV_GROUPS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    NORM: tl.constexpr,
    CHECK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_kernel_ahead(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    cos = cos_ptr + token * cos_stride_t
    sin = sin_ptr + token * sin_stride_t
    if group < QUERY_GROUPS:
        _heads(
            query_ptr + token * query_stride_t, out_ptr + token * HEADS * DIM, query_weight_ptr, cos, sin,
            query_stride_head, group * GROUP, eps, HEADS, GROUP, DIM, ROTARY, NORM, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        # int64: in a large pool the last slots lie beyond what 32 bits can count
        slot = tl.load(slots_ptr + token * slots_stride).to(tl.int64)
        if CHECK:
            tl.device_assert((slot >= 0) & (slot < num_slots), "slots: outside of the pool")
        first_head = (group - QUERY_GROUPS) % KV_GROUPS * GROUP
        if group < QUERY_GROUPS + KV_GROUPS:
            _heads(
                key_ptr + token * key_stride_t, keys_ptr + slot * KV_HEADS * DIM, key_weight_ptr, cos, sin,
                key_stride_head, first_head, eps, KV_HEADS, GROUP, DIM, ROTARY, NORM, BLOCK_HALF, BLOCK_REST,
            )  # fmt: skip
        else:
            _heads(
                value_ptr + token * value_stride_t, values_ptr + slot * KV_HEADS * VALUE_DIM, key_weight_ptr, cos, sin,
                value_stride_head, first_head, eps, KV_HEADS, GROUP, VALUE_DIM, 0, False, 1, BLOCK_VALUE,
            )  # fmt: skip


def rotary_kv_write_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Any strides, but the pool is contiguous; heads in one piece are not copied."""
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError(
            "keys and values must be contiguous: a copy of the pool would be written, not the pool"
        )
    (t, heads, dim), (_, kv_heads, value_dim) = query.shape, value.shape
    out = torch.empty(t, heads, dim, dtype=query.dtype, device=query.device)
    if t == 0:
        return out
    query, key, value = unit_stride(query), unit_stride(key), unit_stride(value)
    cos, sin = (query, query) if angles is None else map(unit_stride, angles)
    rotary_dim = 0 if angles is None else cos.shape[1]
    weights = (query, query) if norms is None else (norms.query_weight, norms.key_weight)
    group = max(NUMBERS_PER_PROGRAM // next_power_of_2(max(dim, value_dim)), 1)
    group = min(group, next_power_of_2(heads))
    query_groups, kv_groups = ceil_div(heads, group), ceil_div(kv_heads, group)
    _rotary_kv_write[(t, query_groups + 2 * kv_groups)](
        query, key, value, cos, sin, *map(unit_stride, weights), slots, out, keys, values,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], cos.stride(0), sin.stride(0), slots.stride(0),
        len(keys), 0.0 if norms is None else norms.eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, VALUE_DIM=value_dim, ROTARY=rotary_dim,
        GROUP=group, QUERY_GROUPS=query_groups, KV_GROUPS=kv_groups,
        BLOCK_HALF=next_power_of_2(rotary_dim // 2), BLOCK_REST=next_power_of_2(dim - rotary_dim),
        BLOCK_VALUE=next_power_of_2(value_dim), NORM=norms is not None, CHECK=debug_kernels(), debug=debug_kernels(),
        # a product and the sum behind it are rounded apart, as in transformers
        num_warps=1, enable_fp_fusion=False, **pdl_options(query),
    )  # fmt: skip
    return out
