"""A program computes one token's outputs, or moves one path's windows, for a stretch of channels."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.dispatch import ceil_div, debug_kernels, next_power_of_2
from spec_v2.kernels.floats import unit_stride

CHANNELS = 256  # of a program


@triton.jit
@no_type_check
def _causal_conv(
    x_ptr,  # [tokens, c], rows in one piece
    windows_ptr,  # [rows, k - 1, c]
    rows_ptr,  # [t]
    taps_ptr,  # [t, k]
    weight_ptr,  # [c, k]
    bias_ptr,  # [c], read with BIAS
    out_ptr,  # [t, c], out
    x_stride,
    num_tokens,
    num_rows,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    CHECK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    row = tl.load(rows_ptr + token).to(tl.int64)
    if CHECK:
        tl.device_assert((row >= 0) & (row < num_rows), "rows: not a row of the pool")
    window_ptr = windows_ptr + row * (TAPS - 1) * C + c

    total = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + c, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(TAPS):
        tap = tl.load(taps_ptr + token * TAPS + j).to(tl.int64)
        if CHECK:
            tl.device_assert((tap < num_tokens) & (tap > -TAPS), "taps: no such input")
        # one of the two is read; bounds, since the interpreter refuses a mask made of a tensor and a scalar
        new_end = tl.where(tap >= 0, C, 0)
        new = tl.load(x_ptr + tap * x_stride + c, mask=c < new_end, other=0.0).to(tl.float32)
        old = tl.load(window_ptr + (TAPS - 1 + tap) * C, mask=(c >= new_end) & inside, other=0.0).to(
            tl.float32
        )
        weight = tl.load(weight_ptr + c * TAPS + j, mask=inside, other=0.0).to(tl.float32)
        total += (new + old) * weight
    dtype = out_ptr.dtype.element_ty
    out = total.to(dtype)
    if SILU:
        wide = out.to(tl.float32)
        out = (wide / (1.0 + tl.exp(-wide))).to(dtype)
    tl.store(out_ptr + token * C + c, out, mask=inside)


@triton.jit
@no_type_check
def _save_windows(
    x_ptr,  # [tokens, c], rows in one piece
    windows_ptr,  # [rows, k - 1, c], read and written
    start_rows_ptr,  # [p]
    taps_ptr,  # [t, k]
    save_tokens_ptr,  # [p, s]
    save_rows_ptr,  # [p, s]
    x_stride,
    num_tokens,
    num_rows,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    SAVES: tl.constexpr,
    ENTRIES: tl.constexpr,  # SAVES * (TAPS - 1), padded to a power of two
    BLOCK: tl.constexpr,
    CHECK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.arange(0, ENTRIES)
    save, place = entry // (TAPS - 1), entry % (TAPS - 1)
    row = tl.load(save_rows_ptr + i * SAVES + save, mask=save < SAVES, other=0).to(tl.int64)
    start_row = tl.load(start_rows_ptr + i).to(tl.int64)
    saves = row > 0
    token = tl.load(save_tokens_ptr + i * SAVES + save, mask=saves, other=0).to(tl.int64)
    if CHECK:
        tl.device_assert((row >= 0) & (row < num_rows), "save_rows: not a row of the pool")
        tl.device_assert((token >= 0) & (token < num_tokens), "save_tokens: not a token")
    tap = tl.load(taps_ptr + token * TAPS + place + 1, mask=saves, other=0).to(tl.int64)

    inside = saves[:, None] & (c < C)[None, :]
    is_new = (tap >= 0)[:, None]
    new = tl.load(x_ptr + tap[:, None] * x_stride + c[None, :], mask=inside & is_new, other=0.0)
    window_ptr = windows_ptr + start_row * (TAPS - 1) * C
    old_at = (TAPS - 1 + tap[:, None]) * C + c[None, :]
    old = tl.load(window_ptr + old_at, mask=inside & (tap < 0)[:, None], other=0.0)
    kept = tl.where(is_new, new, old.to(new.dtype))
    tl.debug_barrier()  # another thread of this program may still have to read what this one overwrites
    target = (row[:, None] * (TAPS - 1) + place[:, None]) * C + c[None, :]
    tl.store(windows_ptr + target, kept.to(windows_ptr.dtype.element_ty), mask=inside)


def causal_conv_triton(
    x: Tensor, windows: Tensor, rows: Tensor, taps: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
) -> Tensor:
    """Any strides of `x`; its rows in one piece are not copied."""
    (t, num_taps), c = taps.shape, x.shape[1]
    out = torch.empty(t, c, dtype=x.dtype, device=x.device)
    if t == 0:
        return out
    x, block = unit_stride(x), min(CHANNELS, next_power_of_2(c))
    assert windows.is_contiguous(), "a row of the pool lies together"
    _causal_conv[(t, ceil_div(c, block))](
        x, windows, rows.contiguous(), taps.contiguous(), weight.contiguous(), x if bias is None else bias.contiguous(), out,
        x.stride(0), len(x), len(windows), C=c, TAPS=num_taps, BLOCK=block, BIAS=bias is not None, SILU=silu,
        CHECK=debug_kernels(), debug=debug_kernels(), enable_fp_fusion=False,
    )  # fmt: skip
    return out


def save_windows_triton(
    x: Tensor, windows: Tensor, start_rows: Tensor, taps: Tensor, save_tokens: Tensor, save_rows: Tensor
) -> None:
    """Any strides of `x`; its rows in one piece are not copied."""
    (p, saves), c, num_taps = save_rows.shape, x.shape[1], taps.shape[1]
    if p == 0 or num_taps == 1:
        return
    x, block = unit_stride(x), min(CHANNELS, next_power_of_2(c))
    assert windows.is_contiguous(), "a row of the pool lies together"
    _save_windows[(p, ceil_div(c, block))](
        x, windows, start_rows.contiguous(), taps.contiguous(), save_tokens.contiguous(), save_rows.contiguous(),
        x.stride(0), len(x), len(windows), C=c, TAPS=num_taps, SAVES=saves,
        ENTRIES=next_power_of_2(saves * (num_taps - 1)), BLOCK=block, CHECK=debug_kernels(), debug=debug_kernels(),
    )  # fmt: skip
