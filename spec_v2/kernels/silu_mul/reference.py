"""As transformers writes it."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


def silu_mul_reference(gate: Float[Tensor, "t i"], up: Float[Tensor, "t i"]) -> Float[Tensor, "t i"]:
    """Two operations, two roundings."""
    return F.silu(gate) * up
