"""Indexing along the rows, column by column."""

import torch
from jaxtyping import Int
from torch import Tensor

from spec_v2.types import NextDraft


def publish_rows_reference(
    rows: Int[Tensor, " b"], seq_lens: Int[Tensor, " b"], new_seq_lens: Int[Tensor, " rows"]
) -> None:
    """One scatter."""
    new_seq_lens[rows] = torch.where(rows > 0, seq_lens, 0)


def gather_rows_reference(
    rows: Int[Tensor, " b"],
    new_seq_lens: Int[Tensor, " rows"],
    bonus_tokens: Int[Tensor, " rows"],
    drafts: NextDraft,
) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"], NextDraft]:
    """Six gathers."""
    return (
        new_seq_lens[rows],
        bonus_tokens[rows],
        NextDraft(
            topk_p=drafts.topk_p[rows],
            topk_index=drafts.topk_index[rows],
            hidden_states=drafts.hidden_states[rows],
            draft_probs=drafts.draft_probs[rows],
        ),
    )


def stash_rows_reference(
    rows: Int[Tensor, " b"],
    predict: Int[Tensor, "b w"],
    accept_lens: Int[Tensor, " b"],
    new_seq_lens: Int[Tensor, " b"],
    next_draft: NextDraft,
    bonus_tokens: Int[Tensor, " rows"],
    drafts: NextDraft,
    history: Int[Tensor, "rows width"],
) -> None:
    """Five scatters, and the history. The bonus is the last emitted token."""
    newest = (accept_lens[:, None] - 1).clamp(min=0)
    bonus_tokens[rows] = predict.gather(1, newest)[:, 0]
    drafts.topk_p[rows] = next_draft.topk_p
    drafts.topk_index[rows] = next_draft.topk_index
    drafts.hidden_states[rows] = next_draft.hidden_states
    drafts.draft_probs[rows] = next_draft.draft_probs
    if history.shape[1]:
        first = new_seq_lens - accept_lens + 1
        positions = first[:, None] + torch.arange(predict.shape[1], device=predict.device)
        history[rows[:, None], positions.clamp(max=history.shape[1] - 1)] = predict
