"""What a draft model missed while steps did not draft: kept row by row, and read in one forward when it drafts again.

A step without drafts emits one token per request. Draft-extend would read it, at the price of a forward in each such step.
So the token is kept instead, for a shifted draft with the target's hidden state. Reading them later gives the same
KV and the same first level as having read them one by one.
"""

from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from spec_v2.kernels.row_slots import extend_inputs
from spec_v2.kernels.sample_nodes import SamplingInputs
from spec_v2.mem_cache.kv_cache_builder import KvCache
from spec_v2.model_executor.model_runner import ModelRunner
from spec_v2.scheduler.future_map import Unread
from spec_v2.speculative.draft_extend import read_window
from spec_v2.speculative.draft_tree import draft_lens
from spec_v2.types import NextDraft, StepInputs, TreeShape, Verdict


def remember(unread: Unread, inputs: StepInputs, verdict: Verdict) -> NextDraft:
    """Keep the one token of each request.

    Returns a first level of zeros. It is nobody's, as the next tree starts from what `catch_up` finds; only the rows
    that fill batches up use it, so it must be a token and finite.
    """
    rows = inputs.rows
    place = unread.lens[rows].clamp(max=unread.tokens.shape[1] - 1)
    unread.tokens[rows, place] = verdict.predict[:, 0]
    unread.hidden_states[rows, place] = verdict.hidden_states[:, 0, : unread.hidden_states.shape[2]]
    unread.lens[rows] = torch.where(rows > 0, place + 1, 0)  # row 0 fills batches up
    given = inputs.next_draft
    return NextDraft(
        topk_p=torch.zeros_like(given.topk_p),
        topk_index=torch.zeros_like(given.topk_index),
        hidden_states=torch.zeros_like(given.hidden_states),
        draft_probs=given.draft_probs,
    )


def forget(unread: Unread, rows: Int[Tensor, " b"]) -> None:
    """Rows whose prompts the draft model is about to read have nothing left to be read."""
    unread.lens[rows.to(unread.lens.device, non_blocking=True)] = 0


def catch_up(
    draft: ModelRunner,
    cache: KvCache,
    inputs: StepInputs,
    unread: Unread,
    shape: TreeShape,
    sampling: SamplingInputs,
    shifted: bool,
    max_seq_len: int,
) -> StepInputs:
    """Let the draft model read what each request has left unread. Returns the inputs with a first level for all.

    It is draft-extend over a wider window. Requests may have left different numbers; one that has left none keeps
    the first level that it came with.
    """
    rows, counts = inputs.rows, unread.lens[inputs.rows]
    start = draft_lens(inputs, shifted) - counts
    read = extend_inputs(cache.row_table.slots, rows, start, unread.tokens[rows], counts.clamp(min=1))
    is_unread = torch.arange(unread.tokens.shape[1], device=rows.device) < counts[:, None]
    # positions behind the newest token are not all reserved: their KV goes to the padding slot, so it must be finite
    read = replace(read, slots=torch.where(is_unread, read.slots, 0))
    hidden = torch.where(is_unread[:, :, None], unread.hidden_states[rows], 0) if shifted else None
    found = read_window(
        draft, cache, rows, start, read, hidden, shape, inputs.seq_lens, sampling, max_seq_len
    )
    unread.lens[rows] = 0
    missed, given = (counts > 0)[:, None], inputs.next_draft
    next_draft = NextDraft(
        topk_p=torch.where(missed, found.topk_p, given.topk_p),
        topk_index=torch.where(missed, found.topk_index, given.topk_index),
        hidden_states=torch.where(missed, found.hidden_states, given.hidden_states),
        draft_probs=given.draft_probs,
    )
    return replace(inputs, next_draft=next_draft)
