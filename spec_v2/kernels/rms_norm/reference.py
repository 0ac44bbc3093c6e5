"""The same operations in the same order as transformers' Llama."""

import torch
from jaxtyping import Float
from torch import Tensor


def rms_norm_reference(
    x: Float[Tensor, "*t h"], weight: Float[Tensor, " h"], eps: float
) -> Float[Tensor, "*t h"]:
    """Over the last axis."""
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm_reference(
    x: Float[Tensor, "t h"], residual: Float[Tensor, "t h"], weight: Float[Tensor, " h"], eps: float
) -> tuple[Float[Tensor, "t h"], Float[Tensor, "t h"]]:
    """The norm reads the sum as it was rounded."""
    total = residual + x
    return total, rms_norm_reference(total, weight, eps)
