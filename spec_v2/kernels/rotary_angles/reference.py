"""The angles in fp32 whatever the dtype, as in transformers."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def rotary_angles_reference(
    positions: Int[Tensor, " t"], inv_freq: Float[Tensor, " half"], scaling: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "t rotary_dim"], Float[Tensor, "t rotary_dim"]]:
    """Both halves are the same numbers."""
    angles = positions[:, None].float() * inv_freq.float()
    angles = torch.cat([angles, angles], -1)
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)
