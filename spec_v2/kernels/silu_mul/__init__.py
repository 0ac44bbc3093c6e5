"""The gate of a SwiGLU feed-forward layer (Shazeer 2020, arXiv 2002.05202): `silu(gate) * up`, one launch.

Rounded where transformers rounds: `silu` in fp32 (float64 stays float64), to the dtype, then the product.

Bytes moved: both inputs once and the output, `3 * t * i` numbers. The inputs are the two halves of one product's
output; they are read where they lie.
"""

from jaxtyping import Float
from torch import Tensor

from spec_v2.kernels import floats
from spec_v2.kernels.silu_mul.reference import silu_mul_reference

__all__ = ["silu_mul"]


def silu_mul(gate: Float[Tensor, "t i"], up: Float[Tensor, "t i"]) -> Float[Tensor, "t i"]:
    """`gate * sigmoid(gate) * up`. Raises ValueError where the dtypes differ."""
    if gate.dtype != up.dtype:
        raise ValueError(f"gate is {gate.dtype}, up {up.dtype}: convert them to one dtype")
    if floats.runs_triton(gate):
        from spec_v2.kernels.silu_mul.triton_kernel import silu_mul_triton

        return silu_mul_triton(gate, up)
    return silu_mul_reference(gate, up)
