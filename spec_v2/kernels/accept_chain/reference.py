"""Accept a prefix of the drafts, then draw one token from what the drafter under-proposed."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spec_v2.kernels.sample_nodes.reference import inverse_cdf_reference


def accept_chain_reference(
    drafted: Int[Tensor, "b d"],
    draft_probs: Float[Tensor, "b d v"],
    target_probs: Float[Tensor, "b d+1 v"],
    accept_coins: Float[Tensor, "b d"],
    bonus_coins: Float[Tensor, " b"],
) -> tuple[Int[Tensor, "b d+1"], Int[Tensor, "b d+1"], Int[Tensor, " b"]]:
    """All requests at once; `cumprod` ends a chain at its first rejection."""
    d = drafted.shape[1]
    proposed = draft_probs.gather(2, drafted[:, :, None])[:, :, 0]
    wanted = target_probs[:, :d].gather(2, drafted[:, :, None])[:, :, 0]
    accepted = accept_coins.to(wanted.dtype) * proposed < wanted
    num_correct_drafts = accepted.long().cumprod(1).sum(1)

    # behind the last draft there is nothing to subtract: the residual is the target itself
    padded = torch.nn.functional.pad(draft_probs, (0, 0, 0, 1))
    here = num_correct_drafts[:, None, None].expand(-1, 1, target_probs.shape[2])
    target_here = target_probs.gather(1, here)[:, 0]
    residual = (target_here - padded.gather(1, here)[:, 0]).clamp(min=0)
    # a rejection with an empty residual is rounding: both distributions are the same
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target_here)
    bonus = inverse_cdf_reference(residual, bonus_coins.to(residual.dtype))

    places = torch.arange(d + 1, device=drafted.device)
    count = num_correct_drafts[:, None]
    drafts = torch.nn.functional.pad(drafted, (0, 1))
    predict = torch.where(places < count, drafts, torch.where(places == count, bonus[:, None], -1))
    accept_index = torch.where(places <= count, places, -1)
    return accept_index, predict, num_correct_drafts + 1
