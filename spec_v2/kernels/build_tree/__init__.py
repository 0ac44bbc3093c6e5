"""From all drafted candidates to the tree that the target verifies: the best `num_nodes - 1`, closed upwards.

Method: EAGLE-2 (Li et al. 2024, arXiv 2406.16858), re-ranking by the product of draft probabilities.

Bytes moved: reads `20 * b * c` (token, score and parent of each candidate; scores again from cache to be ranked),
writes `20 * b * n`.
"""

from jaxtyping import Float, Int
from torch import Tensor

from spec_v2.kernels import dispatch
from spec_v2.kernels.build_tree.reference import build_tree_reference
from spec_v2.types import DraftTree

__all__ = ["build_tree"]


def build_tree(
    *,
    root_tokens: Int[Tensor, " b"],
    tokens: Int[Tensor, "b c"],
    scores: Float[Tensor, "b c"],
    parents: Int[Tensor, "b c"],
    num_nodes: int,
) -> DraftTree:
    """Keep the `num_nodes - 1` best of `c` candidates, in candidate order, under the root.

    `parents` are candidate numbers, -1 for children of the root; a parent comes before its children and
    scores no less, so the chosen set contains the parent of each of its members. Ties go to the lowest candidate.
    Raises ValueError where there are fewer candidates than the tree has places for.
    """
    if not 1 <= num_nodes <= tokens.shape[1] + 1:
        raise ValueError(
            f"num_nodes={num_nodes}: {tokens.shape[1]} candidates under a root make 1 to {tokens.shape[1] + 1}"
        )
    if dispatch.runs_triton(tokens):
        from spec_v2.kernels.build_tree.triton_kernel import build_tree_triton

        return build_tree_triton(root_tokens, tokens, scores, parents, num_nodes)
    return build_tree_reference(
        root_tokens=root_tokens, tokens=tokens, scores=scores, parents=parents, num_nodes=num_nodes
    )
