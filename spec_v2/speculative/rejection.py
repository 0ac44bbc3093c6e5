"""Drafting and verifying for rejection sampling: proposals are drawn, and their probabilities are kept.

Chains only. Three independent coins per place: drawing a draft, accepting it, and the token after a rejection
never share one.
"""

from dataclasses import replace

from jaxtyping import Float, Int
from torch import Tensor

from spec_v2.kernels.accept_chain import accept_chain
from spec_v2.kernels.sample_nodes import SamplingInputs, inverse_cdf, node_distributions, position_coins
from spec_v2.types import DraftTree

DRAFT_SALT = 0x44524146
ACCEPT_SALT = 0x41434350
BONUS_SALT = 0x424F4E55


def propose(
    logits: Float[Tensor, "b v"], positions: Int[Tensor, " b"], sampling: SamplingInputs
) -> tuple[Int[Tensor, "b 1"], Float[Tensor, "b v"]]:
    """Draw a draft token for `positions`, and the distribution it was drawn from. Greedy rows: a point mass."""
    wide = logits.float().nan_to_num(0.0)
    probs = node_distributions(wide[:, None], replace(sampling, any_filter=False))[:, 0]
    coins = position_coins(sampling.seeds, positions, DRAFT_SALT)
    return inverse_cdf(probs, coins)[:, None], probs


def accept_by_rejection(
    logits: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], tree: DraftTree, sampling: SamplingInputs
) -> tuple[Int[Tensor, "b w"], Int[Tensor, "b w"], Int[Tensor, " b"]]:
    """`accept_index`, `predict`, `accept_lens` of a chain. `positions`: of the token that each node chooses."""
    b, n = positions.shape
    probs = node_distributions(logits, sampling)
    accept_coins = position_coins(
        sampling.seeds[:, None].expand(b, n - 1), positions[:, : n - 1], ACCEPT_SALT
    )
    # one coin is enough for the bonus wherever the chain breaks: the next step begins at another place
    bonus_coins = position_coins(sampling.seeds, positions[:, 0], BONUS_SALT)
    return accept_chain(
        drafted=tree.tokens[:, 1:],
        draft_probs=tree.draft_probs.to(probs.dtype),
        target_probs=probs,
        accept_coins=accept_coins,
        bonus_coins=bonus_coins,
    )
