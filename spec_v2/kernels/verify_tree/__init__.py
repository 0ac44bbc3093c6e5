"""One traversal: from the root, follow the child that carries the target's token, as long as there is one.

Exact for any drafter (Leviathan et al. 2023; trees: SpecInfer, Miao et al. 2024): what is emitted is the
target's own choice at every node, and the drafts only say how many choices are known at once.
"""

from spec_v2.kernels.verify_tree.reference import verify_tree_reference as verify_tree

__all__ = ["verify_tree"]
