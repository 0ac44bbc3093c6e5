"""A program takes a stretch of one row."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.dispatch import ceil_div
from spec_v2.kernels.floats import unit_stride
from spec_v2.kernels.pdl import after_kernel_ahead, pdl_options

BLOCK = 1024  # 16 bytes per thread and input in bf16


@triton.jit
@no_type_check
def _silu_mul(
    gate_ptr,  # [t, I], rows in one piece
    up_ptr,  # [t, I], rows in one piece
    out_ptr,  # [t, I], out
    gate_stride_t,
    up_stride_t,
    I: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_kernel_ahead(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < I
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + token * gate_stride_t + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + token * up_stride_t + i, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + token * I + i, (silu * up).to(dtype), mask=inside)


def silu_mul_triton(gate: Tensor, up: Tensor) -> Tensor:
    """Any strides; rows in one piece are not copied."""
    t, width = gate.shape
    out = torch.empty(t, width, dtype=gate.dtype, device=gate.device)
    if t == 0:
        return out
    gate, up = unit_stride(gate), unit_stride(up)
    _silu_mul[(t, ceil_div(width, BLOCK))](
        gate, up, out, gate.stride(0), up.stride(0), I=width, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
        **pdl_options(gate),
    )  # fmt: skip
    return out
