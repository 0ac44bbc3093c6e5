"""One program per row, the row in registers: at few rows it is the time of one load, one sum and one store."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.dispatch import next_power_of_2, refuse_beyond
from spec_v2.kernels.floats import unit_stride
from spec_v2.kernels.pdl import after_kernel_ahead, pdl_options

NUMBERS_PER_WARP = 512  # two loads of 16 bytes per thread in bf16
WIDEST_ROW = 1 << 16


@triton.jit
@no_type_check
def _rms_norm(
    x_ptr,  # [t, H], rows in one piece
    residual_ptr,  # [t, H], rows in one piece; read with ADD
    weight_ptr,  # [H]
    total_ptr,  # [t, H], out with ADD
    normed_ptr,  # [t, H], out
    x_stride_t,
    residual_stride_t,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    inside = h < H
    dtype = normed_ptr.dtype.element_ty
    # here, and not where it is used: no kernel of a step writes it, so that it can come before anything else
    weight = tl.load(weight_ptr + h, mask=inside, other=0.0).to(tl.float32)
    after_kernel_ahead(PDL)
    x = tl.load(x_ptr + token * x_stride_t + h, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + token * residual_stride_t + h, mask=inside, other=0.0)
        total = (residual.to(tl.float32) + x).to(dtype)
        tl.store(total_ptr + token * H + h, total, mask=inside)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    normed = (x * scale).to(dtype).to(tl.float32)
    tl.store(normed_ptr + token * H + h, (weight * normed).to(dtype), mask=inside)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Any strides; rows in one piece are not copied."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(unit_stride(x), None, weight, None, normed, eps)
    return normed


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Any strides; rows in one piece are not copied."""
    total, normed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(unit_stride(x), unit_stride(residual), weight, total, normed, eps)
    return total, normed


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, total: Tensor | None, normed: Tensor, eps: float
) -> None:
    t, h = x.shape
    refuse_beyond(WIDEST_ROW, hidden_size=h)
    if t == 0:
        return
    block = next_power_of_2(h)
    _rms_norm[(t,)](
        x, x if residual is None else residual, unit_stride(weight), normed if total is None else total, normed,
        x.stride(0), 0 if residual is None else residual.stride(0), eps,
        H=h, BLOCK=block, ADD=residual is not None, num_warps=min(max(block // NUMBERS_PER_WARP, 1), 32),
        enable_fp_fusion=False, **pdl_options(x),
    )  # fmt: skip
