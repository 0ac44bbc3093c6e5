"""As torch computes it."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from spec_v2.kernels.silu_mul.reference import silu_mul_reference


def few_token_linear_reference(
    x: Float[Tensor, "t k"], weight: Float[Tensor, "n k"], bias: Float[Tensor, " n"] | None = None
) -> Float[Tensor, "t n"]:
    """Any number of tokens."""
    return F.linear(x, weight, bias)


def one_token_gated_reference(x: Float[Tensor, "1 k"], weight: Float[Tensor, "i2 k"]) -> Float[Tensor, "1 i"]:
    """The product, then the gate."""
    return silu_mul_reference(*F.linear(x, weight).chunk(2, -1))
