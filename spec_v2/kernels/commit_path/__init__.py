"""What an accepted path leaves behind: the new lengths, and the hidden states of its nodes at the front.

Bytes moved: reads and writes `b * w * h` hidden numbers once; `8 * b * (n + w + 2)` bytes of indices beside them.
"""

from jaxtyping import Float, Int
from torch import Tensor

from spec_v2.kernels import dispatch
from spec_v2.kernels.commit_path.reference import CommittedPath, commit_path_reference

__all__ = ["CommittedPath", "commit_path"]


def commit_path(
    *,
    accept_index: Int[Tensor, "b w"],
    accept_lens: Int[Tensor, " b"],
    seq_lens: Int[Tensor, " b"],
    positions: Int[Tensor, "b n"],
    hidden_states: Float[Tensor, "b n h"],
) -> CommittedPath:
    """`positions`: of the tree's nodes. Past `accept_lens` the hidden states are the root's."""
    args = (accept_index, accept_lens, seq_lens, positions, hidden_states)
    if dispatch.runs_triton(accept_index):
        from spec_v2.kernels.commit_path.triton_kernel import commit_path_triton

        return commit_path_triton(*args)
    return commit_path_reference(*args)
