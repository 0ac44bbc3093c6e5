"""What the kernels of a model's layers share: which dtypes they take, and how rows must lie."""

import torch
from torch import Tensor

from spec_v2.kernels import dispatch

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def runs_triton(x: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether the Triton kernel runs; float64 takes the reference. `dtype`: that of the result, if not `x`'s."""
    return dispatch.runs_triton(x) and (dtype or x.dtype) in FLOATS


def unit_stride(x: Tensor) -> Tensor:
    """`x` with its last axis in one piece: itself, where that is so already."""
    return x if x.stride(-1) == 1 else x.contiguous()
