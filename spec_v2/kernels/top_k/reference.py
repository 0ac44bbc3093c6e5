"""`k` times the arg-max, whose ties go to the lowest index."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def top_k_reference(values: Float[Tensor, "r v"], k: int) -> tuple[Float[Tensor, "r k"], Int[Tensor, "r k"]]:
    """`k` rounds; what was taken becomes -inf, which nothing else is any more, so no id comes twice."""
    # in float64 the stand-in for -inf is below every number of the other dtypes
    left = values.double().clamp(min=torch.finfo(torch.float64).min) if k > 1 else values
    ids = []
    for i in range(k):
        ids.append(left.argmax(-1, keepdim=True))
        if i + 1 < k:
            left.scatter_(-1, ids[-1], -torch.inf)
    chosen = torch.cat(ids, -1)
    return values.gather(-1, chosen), chosen


def top_k_probs_reference(
    logits: Float[Tensor, "r v"], k: int, id_map: Int[Tensor, " v"] | None = None
) -> tuple[Float[Tensor, "r k"], Int[Tensor, "r k"]]:
    """Chosen by logit, not by probability: far from the top, different logits have equal probabilities."""
    wide = logits.float()
    probs = wide.softmax(-1)
    has_softmax = probs[:, :1].isfinite()  # one NaN makes the whole row NaN
    _, ids = top_k_reference(torch.where(has_softmax, wide, 0.0), k)
    top_p = torch.where(has_softmax, probs.gather(-1, ids), 0.0)
    return top_p, ids if id_map is None else id_map[ids]
