"""Drafting and verifying for rejection sampling: proposals are drawn, and their probabilities are kept.

Chains only. Three independent coins per place: drawing a draft, accepting it, and the token after a rejection
never share one.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spec_v2.kernels.accept_chain import accept_chain
from spec_v2.kernels.sample_nodes import SamplingInputs, inverse_cdf, node_probs, position_coins
from spec_v2.types import DraftTree

DRAFT_SALT = 0x44524146
ACCEPT_SALT = 0x41434350
BONUS_SALT = 0x424F4E55


def propose(
    logits: Float[Tensor, "b v"], positions: Int[Tensor, " b"], sampling: SamplingInputs
) -> tuple[Int[Tensor, "b 1"], Float[Tensor, "b v"]]:
    """Draw a draft token for `positions`, and the distribution it was drawn from. Greedy rows: a point mass."""
    wide = logits.float().nan_to_num(0.0)
    temperatures = sampling.temperatures[:, None]
    probs = (wide / torch.where(temperatures > 0, temperatures, 1.0)).softmax(-1)
    best = wide.argmax(-1, keepdim=True)
    probs = torch.where(temperatures > 0, probs, torch.zeros_like(probs).scatter(-1, best, 1.0))
    coins = position_coins(sampling.seeds ^ DRAFT_SALT, positions)
    return inverse_cdf(probs, coins)[:, None], probs


def accept_by_rejection(
    logits: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], tree: DraftTree, sampling: SamplingInputs
) -> tuple[Int[Tensor, "b w"], Int[Tensor, "b w"], Int[Tensor, " b"]]:
    """`accept_index`, `predict`, `accept_lens` of a chain. `positions`: of the token that each node chooses."""
    b, n = positions.shape
    probs = node_probs(logits, sampling)
    greedy = torch.zeros_like(probs).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    probs = torch.where(sampling.temperatures[:, None, None] > 0, probs / probs.sum(-1, keepdim=True), greedy)
    seeds = sampling.seeds[:, None].expand(b, n)
    bonus_coins = position_coins(seeds ^ BONUS_SALT, positions)
    accept_coins = position_coins(seeds ^ ACCEPT_SALT, positions)[:, : n - 1]
    # one coin is enough for the bonus wherever the chain breaks: the next step begins at another place
    return accept_chain(
        drafted=tree.tokens[:, 1:],
        draft_probs=tree.draft_probs.to(probs.dtype),
        target_probs=probs,
        accept_coins=accept_coins,
        bonus_coins=bonus_coins[:, 0],
    )
