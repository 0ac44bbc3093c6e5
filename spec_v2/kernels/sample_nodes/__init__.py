"""The target's token after each node: arg-max, or the inverse CDF at a coin from (request seed, position).

The coin belongs to the place, not to the step, so a seed gives the same tokens however many were drafted.
"""

from spec_v2.kernels.sample_nodes.reference import (
    SamplingInputs,
    inverse_cdf,
    node_probs,
    position_coins,
    processed_probs,
)
from spec_v2.kernels.sample_nodes.reference import sample_nodes_reference as sample_nodes

__all__ = ["SamplingInputs", "inverse_cdf", "node_probs", "position_coins", "processed_probs", "sample_nodes"]
