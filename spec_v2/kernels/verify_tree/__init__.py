"""One traversal: from the root, follow the child that carries the target's token, as long as there is one.

Exact for any drafter (Leviathan et al. 2023; trees: SpecInfer, Miao et al. 2024): what is emitted is the
target's own choice at every node, and the drafts only say how many choices are known at once.

Bytes moved: reads `16 * b * n` (tokens and parents) and `8 * b * w`, writes `16 * b * w + 8 * b`.
"""

from jaxtyping import Int
from torch import Tensor

from spec_v2.kernels import dispatch
from spec_v2.kernels.verify_tree.reference import verify_tree_reference

__all__ = ["verify_tree"]


def verify_tree(
    *,
    tokens: Int[Tensor, "b n"],
    parents: Int[Tensor, "b n"],
    target_tokens: Int[Tensor, "b n"],
    longest_path: int,
) -> tuple[Int[Tensor, "b w"], Int[Tensor, "b w"], Int[Tensor, " b"]]:
    """(`accept_index`, `predict`, `accept_lens`), with `w = longest_path + 1`.

    `target_tokens[i, j]`: what the target says after node `j`. The last emitted token is the bonus. Of
    siblings with the same token the lowest node is taken.
    """
    if dispatch.runs_triton(tokens):
        from spec_v2.kernels.verify_tree.triton_kernel import verify_tree_triton

        return verify_tree_triton(tokens, parents, target_tokens, longest_path)
    return verify_tree_reference(
        tokens=tokens, parents=parents, target_tokens=target_tokens, longest_path=longest_path
    )
