"""Rejection sampling along a chain (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

Accepts more than following the target's own sample does, and keeps the target's distribution, but not the
sample: for a given seed the tokens differ from plain decoding.

Bytes moved: of each request two rows of `v` probabilities, those where its chain breaks, are read once, and one block of
each again; `b * (d + 1)` tokens are written.
"""

from jaxtyping import Float, Int
from torch import Tensor

from spec_v2.kernels import dispatch
from spec_v2.kernels.accept_chain.reference import accept_chain_reference

__all__ = ["accept_chain"]


def accept_chain(
    *,
    drafted: Int[Tensor, "b d"],
    draft_probs: Float[Tensor, "b d v"],
    target_probs: Float[Tensor, "b d+1 v"],
    accept_coins: Float[Tensor, "b d"],
    bonus_coins: Float[Tensor, " b"],
) -> tuple[Int[Tensor, "b d+1"], Int[Tensor, "b d+1"], Int[Tensor, " b"]]:
    """(`accept_index`, `predict`, `accept_lens`), packed to the front, -1 past `accept_lens`.

    `drafted[i, j]` was drawn from `draft_probs[i, j]`; it is accepted with probability min(1, target / draft). After the
    first rejection a token is drawn from what the drafter under-proposed; behind a whole chain, from the target itself.
    Randomness comes in as coins in [0, 1), so the result is a function. Rows of both probabilities sum to 1, and have
    one dtype.
    """
    args = (drafted, draft_probs, target_probs, accept_coins, bonus_coins)
    if dispatch.runs_triton(drafted):
        from spec_v2.kernels.accept_chain.triton_kernel import accept_chain_triton

        return accept_chain_triton(*args)
    return accept_chain_reference(*args)
