"""Two launches, as for a sample: the blocks of a row report what they weigh, then one program per request chooses.

Every program finds for itself where the chain of its request breaks: that is a handful of numbers.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.dispatch import ceil_div, debug_kernels, next_power_of_2, refuse_beyond
from spec_v2.kernels.sample_nodes.triton_kernel import (
    BLOCK,
    LARGEST_ID,
    block_of,
    id_in_block,
    threshold_of,
)


@triton.jit
@no_type_check
def _count_correct(
    drafted_ptr, draft_ptr, target_ptr, coins_ptr, stride_d, draft_stride_d, draft_stride_v, target_stride_n,
    target_stride_v, V, D: tl.constexpr, PATH: tl.constexpr, CHECK: tl.constexpr
):  # fmt: skip
    """How many drafts of one request are accepted; the pointers are its own."""
    j = tl.arange(0, PATH)
    token = tl.load(drafted_ptr + j * stride_d, mask=j < D, other=0)
    if CHECK:
        tl.device_assert((token >= 0) & (token < V), "drafted: not a token of the vocabulary")
    q = tl.load(draft_ptr + j * draft_stride_d + token * draft_stride_v, mask=j < D, other=0.0)
    p = tl.load(target_ptr + j * target_stride_n + token * target_stride_v, mask=j < D, other=0.0)
    coin = tl.load(coins_ptr + j, mask=j < D, other=0.0).to(p.dtype)
    accepted = coin * q < p
    return tl.min(tl.where(accepted | (j >= D), D, j), 0), token


@triton.jit
@no_type_check
def _weights(
    draft_row_ptr, target_row_ptr, ids, draft_stride_v, target_stride_v, V, correct, D: tl.constexpr
):
    """Target and residual of a block. Behind the last draft there is nothing to subtract, and no row to read."""
    p = tl.load(target_row_ptr + ids.to(tl.int64) * target_stride_v, mask=ids < V, other=0.0)
    q = tl.load(
        draft_row_ptr + ids.to(tl.int64) * draft_stride_v, mask=ids < tl.where(correct < D, V, 0), other=0.0
    )
    return p, tl.maximum(p - q, 0.0)


@triton.jit
@no_type_check
def _weigh_residual(
    drafted_ptr,  # [b, d], any strides, as all that follow
    draft_ptr,  # [b, d, v]
    target_ptr,  # [b, d + 1, v]
    coins_ptr,  # [b, d], contiguous
    target_sum_ptr,  # [b, blocks], out
    residual_sum_ptr,  # [b, blocks], out
    stride_b,
    stride_d,
    draft_stride_b,
    draft_stride_d,
    draft_stride_v,
    target_stride_b,
    target_stride_n,
    target_stride_v,
    V,
    num_blocks,
    D: tl.constexpr,
    PATH: tl.constexpr,  # D + 1, padded to a power of two
    BLOCK: tl.constexpr,
    CHECK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    draft_ptr += i * draft_stride_b
    target_ptr += i * target_stride_b
    correct, _ = _count_correct(
        drafted_ptr + i * stride_b, draft_ptr, target_ptr, coins_ptr + i * D, stride_d, draft_stride_d,
        draft_stride_v, target_stride_n, target_stride_v, V, D, PATH, CHECK,
    )  # fmt: skip
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = correct.to(tl.int64)
    p, residual = _weights(
        draft_ptr + place * draft_stride_d, target_ptr + place * target_stride_n, ids, draft_stride_v,
        target_stride_v, V, correct, D,
    )  # fmt: skip
    out = i * num_blocks + tl.program_id(1)
    tl.store(target_sum_ptr + out, tl.sum(p, 0))
    tl.store(residual_sum_ptr + out, tl.sum(residual, 0))


@triton.jit
@no_type_check
def _emit_chain(
    drafted_ptr,  # as above
    draft_ptr,
    target_ptr,
    coins_ptr,
    bonus_coins_ptr,  # [b]
    target_sum_ptr,  # [b, blocks]
    residual_sum_ptr,  # [b, blocks]
    accept_index_ptr,  # [b, d + 1], out
    predict_ptr,  # [b, d + 1], out
    accept_lens_ptr,  # [b], out
    stride_b,
    stride_d,
    draft_stride_b,
    draft_stride_d,
    draft_stride_v,
    target_stride_b,
    target_stride_n,
    target_stride_v,
    V,
    num_blocks,
    D: tl.constexpr,
    PATH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # num_blocks, padded to a power of two
    CHECK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    draft_ptr += i * draft_stride_b
    target_ptr += i * target_stride_b
    correct, drafts = _count_correct(
        drafted_ptr + i * stride_b, draft_ptr, target_ptr, coins_ptr + i * D, stride_d, draft_stride_d,
        draft_stride_v, target_stride_n, target_stride_v, V, D, PATH, CHECK,
    )  # fmt: skip

    b = tl.arange(0, BLOCKS)
    residual_sums = tl.load(residual_sum_ptr + i * num_blocks + b, mask=b < num_blocks, other=0.0)
    target_sums = tl.load(target_sum_ptr + i * num_blocks + b, mask=b < num_blocks, other=0.0)
    # a rejection with an empty residual is rounding: both distributions are the same
    has_residual = tl.sum(residual_sums, 0) > 0
    sums = tl.where(has_residual, residual_sums, target_sums)
    threshold = threshold_of(tl.load(bonus_coins_ptr + i).to(sums.dtype), tl.sum(sums, 0))
    block, before = block_of(sums, b, threshold, num_blocks)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    place = correct.to(tl.int64)
    p, residual = _weights(
        draft_ptr + place * draft_stride_d, target_ptr + place * target_stride_n, ids, draft_stride_v,
        target_stride_v, V, correct, D,
    )  # fmt: skip
    bonus = id_in_block(tl.where(has_residual, residual, p), ids, before, threshold, V)

    j = tl.arange(0, PATH)
    out = i * (D + 1) + j
    emitted = tl.where(j < correct, drafts, tl.where(j == correct, bonus, -1))
    tl.store(accept_index_ptr + out, tl.where(j <= correct, j, -1).to(tl.int64), mask=j <= D)
    tl.store(predict_ptr + out, emitted, mask=j <= D)
    tl.store(accept_lens_ptr + i, (correct + 1).to(tl.int64))


def accept_chain_triton(
    drafted: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    accept_coins: Tensor,
    bonus_coins: Tensor,
    block: int = BLOCK,
) -> tuple[Tensor, Tensor, Tensor]:
    """Any strides of the tokens and of both probabilities."""
    b, d = drafted.shape
    v = target_probs.shape[2]
    if draft_probs.dtype != target_probs.dtype:
        raise ValueError(
            f"draft_probs {draft_probs.dtype}, target_probs {target_probs.dtype}: one dtype is needed"
        )
    refuse_beyond(LARGEST_ID.value - 1, vocabulary=v)
    device = drafted.device
    accept_index, predict = torch.empty(2, b, d + 1, dtype=torch.long, device=device)
    accept_lens = torch.empty(b, dtype=torch.long, device=device)
    if b == 0:
        return accept_index, predict, accept_lens
    num_blocks = ceil_div(v, block)
    sums = torch.empty(2, b, num_blocks, dtype=target_probs.dtype, device=device)
    inputs = (drafted, draft_probs, target_probs, accept_coins.contiguous())
    shape = (*drafted.stride(), *draft_probs.stride(), *target_probs.stride(), v, num_blocks)
    flags = {
        "D": d, "PATH": next_power_of_2(d + 1), "BLOCK": block, "CHECK": debug_kernels(), "debug": debug_kernels(),
        "num_warps": 8,
    }  # fmt: skip
    _weigh_residual[(b, num_blocks)](*inputs, *sums, *shape, **flags)
    _emit_chain[(b,)](
        *inputs, bonus_coins.contiguous(), *sums, accept_index, predict, accept_lens, *shape, **flags,
        BLOCKS=next_power_of_2(num_blocks),
    )  # fmt: skip
    return accept_index, predict, accept_lens
