"""`k` times the arg-max, whose ties go to the lowest index."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def top_k_reference(probs: Float[Tensor, "r v"], k: int) -> tuple[Float[Tensor, "r k"], Int[Tensor, "r k"]]:
    """Values and ids, best first. `probs` are finite and not negative; ids of one row are distinct."""
    left = probs.clone() if k > 1 else probs
    values, ids = [], []
    for i in range(k):
        best = left.argmax(-1, keepdim=True)
        ids.append(best)
        values.append(probs.gather(-1, best))
        if i + 1 < k:
            left.scatter_(-1, best, -1.0)  # below every probability, so a taken id never comes again
    return torch.cat(values, -1), torch.cat(ids, -1)
