"""One program has a few output features of all tokens and goes along the whole input once.

One token: products and sums in fp32 registers, as tensor cores would be idle for 15 of 16 columns. More: tensor cores, the
weight as the left operand, so that its features fill the rows and the tokens the 16 columns that there must be.
"""

from dataclasses import dataclass, replace
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.dispatch import ceil_div
from spec_v2.kernels.floats import unit_stride
from spec_v2.kernels.pdl import after_kernel_ahead, pdl_options, prefetch_l2

NUMBERS_PER_LINE = tl.constexpr(64)  # a cache line of bf16
LINES = 16  # of each feature, to the L2 cache before the kernel ahead has ended
TOKENS = tl.constexpr(16)  # the fewest columns of a tensor core's product


@dataclass(frozen=True, slots=True)
class Cut:
    """`block_n` features by `block_k` inputs at a time."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@triton.jit
@no_type_check
def _rounded(acc, bias_ptr, n, N, dtype: tl.constexpr, EXTRA_AXIS: tl.constexpr):
    """The sums with their bias, rounded to the dtype; as fp32."""
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        acc += bias[:, None] if EXTRA_AXIS else bias
    return acc.to(dtype).to(tl.float32)


@triton.jit
@no_type_check
def _gate(gate, up, dtype: tl.constexpr):
    """`silu(gate) * up`, rounded after each, as in `silu_mul`."""
    return (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up


@triton.jit
@no_type_check
def _one_token(
    x_ptr,  # [K]
    weight_ptr,  # [N, K], rows in one piece; with GATED [2 N, K]
    bias_ptr,  # [N] or None
    out_ptr,  # [N], out
    N,
    K,
    weight_stride_n,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # rows past the last read the last one again: no mask in the loop
    weight_ptr += tl.minimum(n, N - 1).to(tl.int64)[:, None] * weight_stride_n + k[None, :]
    up_ptr = weight_ptr + tl.full((), N, tl.int64) * weight_stride_n
    # weights were there before any kernel of this step: the first block needs nobody's end
    inside = EVEN_K | (k < K)[None, :]
    weight = tl.load(weight_ptr, mask=inside, other=0.0)
    up_weight = tl.load(up_ptr, mask=inside, other=0.0) if GATED else weight
    after_kernel_ahead(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        ahead = (start + BLOCK_K + k < K)[None, :]
        following = tl.load(weight_ptr + start + BLOCK_K, mask=ahead, other=0.0)
        x = tl.load(x_ptr + start + k, mask=EVEN_K | (start + k < K), other=0.0).to(tl.float32)[None, :]
        acc += weight.to(tl.float32) * x
        if GATED:
            up_following = tl.load(up_ptr + start + BLOCK_K, mask=ahead, other=0.0)
            up += up_weight.to(tl.float32) * x
            up_weight = up_following
        weight = following
    out = _rounded(tl.sum(acc, 1), bias_ptr, n, N, dtype, False)
    if GATED:
        out = _gate(out, tl.sum(up, 1).to(dtype).to(tl.float32), dtype)
    tl.store(out_ptr + n, out.to(dtype), mask=n < N)


@triton.jit
@no_type_check
def _few_tokens(
    x_ptr,  # [t, K], rows in one piece
    weight_ptr,  # [N, K], rows in one piece
    bias_ptr,  # [N] or None
    out_ptr,  # [t, N], out
    t,
    N,
    K,
    x_stride_t,
    weight_stride_n,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    token = tl.arange(0, TOKENS)
    row_ptr = weight_ptr + tl.minimum(n, N - 1).to(tl.int64) * weight_stride_n
    weight_ptr = row_ptr[:, None] + k[None, :]
    x_ptr += token[None, :] * x_stride_t + k[:, None]
    if PDL:  # the loop's loads can't begin yet, but the first blocks of weights can come to the L2 cache
        line = tl.minimum(tl.arange(0, LINES) * NUMBERS_PER_LINE, K - 1)
        prefetch_l2(row_ptr[:, None] + line[None, :])
    after_kernel_ahead(PDL)
    acc = tl.zeros([BLOCK_N, TOKENS], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = EVEN_K | (start + k < K)
        weight = tl.load(weight_ptr + start, mask=inside[None, :], other=0.0)
        x = tl.load(x_ptr + start, mask=(token < t)[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(weight, x, acc)
    out = _rounded(acc, bias_ptr, n, N, dtype, True)
    out_ptr += token[None, :] * N + n[:, None]
    tl.store(out_ptr, out.to(dtype), mask=(token < t)[None, :] & (n < N)[:, None])


def few_token_linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut | None = None) -> Tensor:
    """At most 16 tokens. Any strides; rows in one piece are not copied."""
    (t, width), n = x.shape, len(weight)
    out = torch.empty(t, n, dtype=x.dtype, device=x.device)
    if t == 0 or n == 0:
        return out
    x, weight = unit_stride(x), unit_stride(weight)
    cut = cut or choose_cut(t, n, width)
    if t == 1:
        _launch_one(x, weight, bias, out, cut, gated=False)
        return out
    _few_tokens[(ceil_div(n, cut.block_n),)](
        x, weight, bias, out, t, n, width, x.stride(0), weight.stride(0),
        BLOCK_N=cut.block_n, BLOCK_K=cut.block_k, EVEN_K=width % cut.block_k == 0, STAGES=cut.num_stages, LINES=LINES,
        num_warps=cut.num_warps, **pdl_options(x),
    )  # fmt: skip
    return out


def one_token_gated_triton(x: Tensor, weight: Tensor) -> Tensor:
    """Any strides; rows in one piece are not copied."""
    n = len(weight) // 2
    out = torch.empty(1, n, dtype=x.dtype, device=x.device)
    if n == 0:
        return out
    cut = choose_cut(1, 2 * n, x.shape[1])  # two rows of weights for a feature
    cut = replace(cut, block_n=max(cut.block_n // 2, 1))
    _launch_one(unit_stride(x), unit_stride(weight), None, out, cut, gated=True)
    return out


def _launch_one(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, cut: Cut, *, gated: bool
) -> None:
    n, width = out.shape[1], x.shape[1]
    _one_token[(ceil_div(n, cut.block_n),)](
        x, weight, bias, out, n, width, weight.stride(0),
        BLOCK_N=cut.block_n, BLOCK_K=cut.block_k, EVEN_K=width % cut.block_k == 0, GATED=gated, num_warps=cut.num_warps,
        **pdl_options(x),
    )  # fmt: skip


def choose_cut(t: int, n: int, k: int) -> Cut:
    """The fastest of those tried on an H200, by how many features and inputs there are.

    Few features and inputs: everything is on its way at once, and the fewest steps in a row win. Many: what counts is that
    every multiprocessor has the same to do, and enough of it under way.
    """
    if t == 1:
        if k <= 1024:
            return Cut(2, 1024, 4, 1) if n < 2048 else Cut(16, 512, 8, 1) if n < 16384 else Cut(8, 64, 1, 1)
        if k <= 2048 or n >= 16384:
            return Cut(2, 2048, 4, 1)
        return Cut(2, 1024, 2, 1) if n > 4096 else Cut(8, 512, 8, 1)
    if k <= 1024:
        return Cut(64, 128, 4, 4) if n < 16384 else Cut(64, 64, 4, 6)
    if k <= 2048:
        return Cut(16, 512, 2, 3)
    if n >= 16384:
        return Cut(64, 128, 4, 4)
    return Cut(16, 512, 1, 3) if n > 4096 or k >= 8192 else Cut(64, 128, 4, 6)
