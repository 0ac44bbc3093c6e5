"""Four torch operations; the kernel is one launch."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CommittedPath:
    """KV-ready lengths after the step, the depth of each tree in drafts, hidden states along the path."""

    new_seq_lens: Int[Tensor, " b"]
    draft_depths: Int[Tensor, " b"]
    hidden_states: Float[Tensor, "b w h"]


def commit_path_reference(
    accept_index: Int[Tensor, "b w"],
    accept_lens: Int[Tensor, " b"],
    seq_lens: Int[Tensor, " b"],
    positions: Int[Tensor, "b n"],
    hidden_states: Float[Tensor, "b n h"],
) -> CommittedPath:
    """Node 0 stands in past the path, so that every row that is handed on is finite."""
    path = accept_index.clamp(min=0)[:, :, None]
    return CommittedPath(
        new_seq_lens=seq_lens + accept_lens,
        draft_depths=positions.amax(1) - seq_lens,
        hidden_states=hidden_states.gather(1, path.expand(-1, -1, hidden_states.shape[2])),
    )
