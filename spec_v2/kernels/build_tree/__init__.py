"""From all drafted candidates to the tree that the target verifies: the best `num_nodes - 1`, closed upwards.

Method: EAGLE-2 (Li et al. 2024, arXiv 2406.16858), re-ranking by the product of draft probabilities.
"""

from spec_v2.kernels.build_tree.reference import build_tree_reference as build_tree

__all__ = ["build_tree"]
