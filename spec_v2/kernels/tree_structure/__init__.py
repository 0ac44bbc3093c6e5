"""What follows from `parents`: depth of each node, and which nodes it may attend to."""

from spec_v2.kernels.tree_structure.reference import ancestor_mask, node_depths

__all__ = ["ancestor_mask", "node_depths"]
