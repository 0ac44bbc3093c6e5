"""RMS norm (Zhang and Sennrich 2019, arXiv 1910.07467), alone or together with the residual sum that it reads.

Rounded where transformers' Llama rounds: `weight * (x * rsqrt(mean(x^2) + eps)).to(dtype)`, the inner part in fp32
(float64 stays float64), the sum rounded before it is normed.

Bytes moved: a row is read and written once, `2 * t * h` numbers; with the sum `4 * t * h`. The weight is read by every
row and stays in the cache.
"""

from jaxtyping import Float
from torch import Tensor

from spec_v2.kernels import floats
from spec_v2.kernels.rms_norm.reference import add_rms_norm_reference, rms_norm_reference

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: Float[Tensor, "t h"], weight: Float[Tensor, " h"], eps: float) -> Float[Tensor, "t h"]:
    """Each row of `x`, normed. Raises ValueError where the dtypes differ."""
    _check(x, x, weight)
    if floats.runs_triton(x):
        from spec_v2.kernels.rms_norm.triton_kernel import rms_norm_triton

        return rms_norm_triton(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(
    x: Float[Tensor, "t h"], residual: Float[Tensor, "t h"], weight: Float[Tensor, " h"], eps: float
) -> tuple[Float[Tensor, "t h"], Float[Tensor, "t h"]]:
    """`residual + x`, and that normed. Raises ValueError where the dtypes differ."""
    _check(x, residual, weight)
    if floats.runs_triton(x):
        from spec_v2.kernels.rms_norm.triton_kernel import add_rms_norm_triton

        return add_rms_norm_triton(x, residual, weight, eps)
    return add_rms_norm_reference(x, residual, weight, eps)


def _check(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    if not x.dtype == residual.dtype == weight.dtype:
        raise ValueError(
            f"x is {x.dtype}, residual {residual.dtype}, weight {weight.dtype}: convert them to one dtype"
        )
