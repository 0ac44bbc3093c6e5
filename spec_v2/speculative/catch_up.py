"""What a draft model missed while steps did not draft: kept row by row, and read in one forward when it drafts again.

A step without drafts emits one token per request. Draft-extend would read it, at the price of a forward in each such step.
So the token is kept instead, for a shifted draft with the target's hidden state. Reading them later gives the same
KV and the same first level as having read them one by one.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from spec_v2.mem_cache.kv_cache_builder import KvCache
from spec_v2.model_executor.model_runner import ModelRunner
from spec_v2.scheduler.future_map import Unread
from spec_v2.speculative.draft_extend import LateTokens
from spec_v2.types import NextDraft, StepInputs, Verdict


def remember(unread: Unread, inputs: StepInputs, verdict: Verdict) -> NextDraft:
    """Keep the one token of each request. Returns what the rows hold already, of the newest token that was read:
    the next tree starts from what `catch_up` makes of it."""
    rows = inputs.rows
    place = unread.lens[rows].clamp(max=unread.tokens.shape[1] - 1)
    unread.tokens[rows, place] = verdict.predict[:, 0]
    unread.hidden_states[rows, place] = verdict.hidden_states[:, 0, : unread.hidden_states.shape[2]]
    unread.lens[rows] = torch.where(rows > 0, place + 1, 0)  # row 0 fills batches up
    return inputs.next_draft


def forget(unread: Unread, rows: Int[Tensor, " b"]) -> None:
    """Rows whose prompts the draft model is about to read have nothing left to be read."""
    unread.lens.index_fill_(0, rows.to(unread.lens.device, non_blocking=True), 0)


def catch_up(
    unread: Unread,
    draft_extend: Callable[..., NextDraft],
    draft: ModelRunner,
    cache: KvCache,
    inputs: StepInputs,
    *rest: Any,
) -> StepInputs:
    """Let the draft model read what each request has left unread. Returns the inputs with a first level for all.

    It is the worker's own `draft_extend`, called with `rest` behind the tokens, over a wider window. Requests may have
    left different numbers; one that has left none keeps the first level that it came with.
    """
    rows, counts = inputs.rows, unread.lens[inputs.rows]
    is_unread = torch.arange(unread.tokens.shape[1], device=rows.device) < counts[:, None]
    tokens = LateTokens(
        predict=torch.where(is_unread, unread.tokens[rows], -1),
        accept_lens=counts.clamp(min=1),  # who has nothing unread runs one token into its next free entry
        new_seq_lens=inputs.seq_lens,
        # all requests' KV of what is behind the newest token goes to the padding slot, so it must be finite
        hidden_states=torch.where(is_unread[:, :, None], unread.hidden_states[rows], 0),
    )
    before = replace(inputs, seq_lens=inputs.seq_lens - counts)
    found, given = draft_extend(draft, cache, before, tokens, *rest), inputs.next_draft
    unread.lens[rows] = torch.zeros_like(counts)  # a number would be uploaded, which no CUDA graph may do
    missed = (counts > 0)[:, None]
    next_draft = NextDraft(
        topk_p=torch.where(missed, found.topk_p, given.topk_p),
        topk_index=torch.where(missed, found.topk_index, given.topk_index),
        hidden_states=torch.where(missed, found.hidden_states, given.hidden_states),
        draft_probs=given.draft_probs,
    )
    return replace(inputs, next_draft=next_draft)
