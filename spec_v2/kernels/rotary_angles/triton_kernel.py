"""One program per token."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.dispatch import next_power_of_2
from spec_v2.kernels.floats import unit_stride


@triton.jit
@no_type_check
def _rotary_angles(
    positions_ptr,  # [t]
    inv_freq_ptr,  # [HALF]
    cos_ptr,  # [t, 2 * HALF], out
    sin_ptr,  # [t, 2 * HALF], out
    positions_stride,
    scaling,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < HALF
    position = tl.load(positions_ptr + token * positions_stride).to(tl.float32)
    angle = position * tl.load(inv_freq_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    cos = (tl.cos(angle) * scaling).to(cos_ptr.dtype.element_ty)
    sin = (tl.sin(angle) * scaling).to(sin_ptr.dtype.element_ty)
    row = token * 2 * HALF + lane
    tl.store(cos_ptr + row, cos, mask=inside)
    tl.store(cos_ptr + row + HALF, cos, mask=inside)
    tl.store(sin_ptr + row, sin, mask=inside)
    tl.store(sin_ptr + row + HALF, sin, mask=inside)


def rotary_angles_triton(
    positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Any strides."""
    t, half = len(positions), len(inv_freq)
    cos, sin = (torch.empty(t, 2 * half, dtype=dtype, device=positions.device) for _ in range(2))
    if t > 0:
        _rotary_angles[(t,)](
            positions, unit_stride(inv_freq), cos, sin, positions.stride(0), float(scaling),
            HALF=half, BLOCK=next_power_of_2(half), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return cos, sin
