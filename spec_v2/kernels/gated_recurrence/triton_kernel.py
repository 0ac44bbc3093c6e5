"""A program walks one path with a stretch of one head's state in registers, `kd` by a few of the `vd` columns.

The columns of a state never meet, so programs don't wait for each other. All modes are this one kernel with the same
tile, so a state is the same to the last bit whether a token came in a prompt, a chain or a tree.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.dispatch import ceil_div, debug_kernels, next_power_of_2, refuse_beyond
from spec_v2.kernels.floats import unit_stride
from spec_v2.kernels.gated_recurrence.reference import NORM_EPS, Saves, TokenInputs

TILE = 4096  # numbers of a state that a program holds
WIDEST_KEY = 1024


@triton.jit
@no_type_check
def _gated_recurrence(
    states_ptr,  # [rows, heads, KD, VD], read and with SAVES written
    start_rows_ptr,  # [p]
    paths_ptr,  # [p, length]
    value_ptr,  # [t, heads, VD], last axis in one piece, like key and query
    key_ptr,  # [t, key_heads, KD]
    query_ptr,  # [t, key_heads, KD]
    decay_ptr,  # [t, heads]
    step_ptr,  # [t, heads]
    out_ptr,  # [t or p, heads, VD], out unless NONE
    save_rows_ptr,  # [p, SAVES]
    save_lens_ptr,  # [p, SAVES]
    value_stride_t,
    value_stride_h,
    key_stride_t,
    key_stride_h,
    query_stride_t,
    query_stride_h,
    length,
    num_rows,
    num_tokens,
    query_scale,
    eps,
    HEADS: tl.constexpr,
    SHARING: tl.constexpr,
    KD: tl.constexpr,
    VD: tl.constexpr,
    KEYS: tl.constexpr,  # KD, padded to a power of two
    COLUMNS: tl.constexpr,
    DELTA: tl.constexpr,
    ALL: tl.constexpr,
    NONE: tl.constexpr,
    SAVES: tl.constexpr,
    CHECK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    key_head = head // SHARING
    d = tl.arange(0, KEYS)
    v = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_value = d < KD, v < VD
    tile = d[:, None] * VD + v[None, :]
    inside = is_key[:, None] & is_value[None, :]

    row = tl.load(start_rows_ptr + i).to(tl.int64)
    if CHECK:
        tl.device_assert((row >= 0) & (row < num_rows), "start_rows: not a row of the pool")
    state = tl.load(states_ptr + (row * HEADS + head) * KD * VD + tile, mask=inside, other=0.0)
    said = tl.zeros([COLUMNS], tl.float32)

    j = 0
    while j < length:
        token = tl.load(paths_ptr + i * length + j).to(tl.int64)
        if CHECK:
            tl.device_assert(token < num_tokens, "paths: not a token")
        if token >= 0:
            key_at = key_ptr + token * key_stride_t + key_head * key_stride_h + d
            query_at = query_ptr + token * query_stride_t + key_head * query_stride_h + d
            value_at = value_ptr + token * value_stride_t + head * value_stride_h + v
            key = tl.load(key_at, mask=is_key, other=0.0).to(tl.float32)
            query = tl.load(query_at, mask=is_key, other=0.0).to(tl.float32)
            value = tl.load(value_at, mask=is_value, other=0.0).to(tl.float32)
            decay = tl.load(decay_ptr + token * HEADS + head).to(tl.float32)
            step = tl.load(step_ptr + token * HEADS + head).to(tl.float32)
            if DELTA:
                key = key * tl.rsqrt(tl.sum(key * key, 0) + eps)
                query = query * tl.rsqrt(tl.sum(query * query, 0) + eps) * query_scale
            state = state * tl.exp(decay)
            if DELTA:
                value = value - tl.sum(state * key[:, None], 0)
            state = state + key[:, None] * (step * value)[None, :]
            if not NONE:
                said = tl.sum(state * query[:, None], 0)
            if ALL:
                tl.store(out_ptr + (token * HEADS + head) * VD + v, said, mask=is_value)
        j += 1
        for s in tl.static_range(SAVES):
            target = tl.load(save_rows_ptr + i * SAVES + s).to(tl.int64)
            if (tl.load(save_lens_ptr + i * SAVES + s) == j) & (target > 0):
                if CHECK:
                    tl.device_assert(target < num_rows, "save_rows: not a row of the pool")
                tl.store(states_ptr + (target * HEADS + head) * KD * VD + tile, state, mask=inside)
    if (not ALL) & (not NONE):
        tl.store(out_ptr + (i * HEADS + head) * VD + v, said, mask=is_value)


def gated_recurrence_triton(
    states: Tensor,
    start_rows: Tensor,
    paths: Tensor,
    tokens: TokenInputs,
    delta: bool,
    outputs: str,
    saves: Saves | None,
) -> Tensor | None:
    """States in fp32; values, keys and queries of any strides: those with a last axis in one piece are not copied."""
    (p, length), (num_rows, heads, kd, vd) = paths.shape, states.shape
    refuse_beyond(WIDEST_KEY, key_dim=kd)
    assert states.is_contiguous(), "a row of the pool lies together"
    value, key, query = (unit_stride(x) for x in (tokens.value, tokens.key, tokens.query))
    num_tokens, key_heads = key.shape[:2]
    rows_out = {"all": num_tokens, "last": p, "none": 0}[outputs]
    out = torch.zeros(rows_out, heads, vd, dtype=torch.float32, device=states.device)
    keys = next_power_of_2(kd)
    columns = min(max(TILE // keys, 1), next_power_of_2(vd))
    if p:
        _gated_recurrence[(p, heads, ceil_div(vd, columns))](
            states, start_rows.contiguous(), paths.contiguous(), value, key, query,
            tokens.decay.contiguous(), tokens.step.contiguous(), out,
            *((paths, paths) if saves is None else (saves.rows.contiguous(), saves.lens.contiguous())),
            *value.stride()[:2], *key.stride()[:2], *query.stride()[:2],
            length, num_rows, num_tokens, kd**-0.5, NORM_EPS,
            HEADS=heads, SHARING=heads // key_heads, KD=kd, VD=vd, KEYS=keys, COLUMNS=columns,
            DELTA=delta, ALL=outputs == "all", NONE=outputs == "none", SAVES=0 if saves is None else saves.rows.shape[1],
            CHECK=debug_kernels(), debug=debug_kernels(), enable_fp_fusion=False,
        )  # fmt: skip
    return None if outputs == "none" else out
