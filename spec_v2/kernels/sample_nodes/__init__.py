"""The target's token after each node: arg-max, or the inverse CDF at a coin from (request seed, position).

The coin belongs to the place, not to the step, so a seed gives the same tokens however many were drafted.

Bytes moved: greedy and unfiltered sampling read the `b * n * v` logits once. Filters read them again for each 4 bits of
their dtype, twice: for top-k, then for top-p (8 readings of bf16, mostly from cache), and once more to weigh what is kept.
No row is sorted, and only `node_distributions` writes probabilities.
"""

from jaxtyping import Float, Int
from torch import Tensor

from spec_v2.kernels import dispatch
from spec_v2.kernels.sample_nodes.reference import (
    SamplingInputs,
    inverse_cdf_reference,
    node_distributions_reference,
    position_coins_reference,
    processed_probs,
    sample_nodes_reference,
)

__all__ = [
    "SamplingInputs",
    "inverse_cdf",
    "node_distributions",
    "position_coins",
    "processed_probs",
    "sample_nodes",
]


def sample_nodes(
    logits: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], sampling: SamplingInputs
) -> Int[Tensor, "b n"]:
    """The token at `positions` (absolute, of the token that is sampled), given the logits before it.

    Ties of a greedy row go to the lowest id. Of equal logits the filters rank the lower id first.
    """
    if dispatch.runs_triton(logits):
        from spec_v2.kernels.sample_nodes.triton_kernel import sample_nodes_triton

        return sample_nodes_triton(logits, positions, sampling)
    return sample_nodes_reference(logits, positions, sampling)


def inverse_cdf(weights: Float[Tensor, "r v"], coins: Float[Tensor, " r"]) -> Int[Tensor, " r"]:
    """First id whose running sum exceeds `coin * total`; `0 <= coin < 1`. Its weight is positive.

    A row without a positive weight, or with NaN, gives some id all the same: never one outside of the row.
    """
    if dispatch.runs_triton(weights):
        from spec_v2.kernels.sample_nodes.triton_kernel import sample_probs_triton

        return sample_probs_triton(weights, coins, None)
    return inverse_cdf_reference(weights, coins)


def node_distributions(logits: Float[Tensor, "b n v"], sampling: SamplingInputs) -> Float[Tensor, "b n v"]:
    """What each node's token is drawn from, fp32 (fp64 for fp64 logits); rows sum to 1. Greedy: the arg-max alone."""
    if dispatch.runs_triton(logits):
        from spec_v2.kernels.sample_nodes.probs_kernel import node_distributions_triton

        return node_distributions_triton(logits, sampling)
    return node_distributions_reference(logits, sampling)


def position_coins(
    seeds: Int[Tensor, "*shape"], positions: Int[Tensor, "*shape"], salt: int = 0
) -> Float[Tensor, "*shape"]:
    """A coin in [0, 1) for each (seed, position): 24 bits of a 32-bit avalanche hash, exact in fp32.

    Coins for different purposes have different salts. At most two axes.
    """
    if dispatch.runs_triton(positions):
        from spec_v2.kernels.sample_nodes.probs_kernel import position_coins_triton

        return position_coins_triton(seeds, positions, salt)
    return position_coins_reference(seeds, positions, salt)
