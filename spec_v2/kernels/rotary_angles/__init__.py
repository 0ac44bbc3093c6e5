"""Cosine and sine of every rotary angle (Su et al. 2021, arXiv 2104.09864), as transformers lays them out.

`angle[i, j] = positions[i] * inv_freq[j]` in fp32; each half of the width holds all of them:
`cos[i] = cos(angle[i]) * scaling, cos(angle[i]) * scaling`.

Bytes moved: writes `4 * t * half` numbers; one launch in the place of eight.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spec_v2.kernels import floats
from spec_v2.kernels.rotary_angles.reference import rotary_angles_reference

__all__ = ["rotary_angles"]


def rotary_angles(
    positions: Int[Tensor, " t"], inv_freq: Float[Tensor, " half"], scaling: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "t rotary_dim"], Float[Tensor, "t rotary_dim"]]:
    """`(cos, sin)` in `dtype`, twice as wide as `inv_freq` (radians per token). `scaling` multiplies both."""
    if floats.runs_triton(positions, dtype):
        from spec_v2.kernels.rotary_angles.triton_kernel import rotary_angles_triton

        return rotary_angles_triton(positions, inv_freq, scaling, dtype)
    return rotary_angles_reference(positions, inv_freq, scaling, dtype)
