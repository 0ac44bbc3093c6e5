"""Step 3, draft-extend: the draft model reads what was accepted, and learns the first level of its next tree.

Draft KV written while drafting was provisional; here it is written again from the accepted tokens and, for
shifted drafts, the target's own hidden states. The shape does not depend on how much was accepted: all `w`
rows run, rows past `accept_lens` are garbage that no row before them can see.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spec_v2.kernels.row_slots import extend_inputs
from spec_v2.kernels.sample_nodes import SamplingInputs
from spec_v2.mem_cache.kv_cache_builder import KvCache
from spec_v2.model_executor.forward_batch import extend_forward_batch, window_forward_batch
from spec_v2.model_executor.model_runner import ModelRunner
from spec_v2.model_executor.recurrence import chain_states, commit_states, prefill_states
from spec_v2.speculative.draft_tree import draft_lens, first_level
from spec_v2.speculative.verify import PrefillOutput, place_prompts
from spec_v2.types import NextDraft, PromptStaging, StatePlan, StepInputs, TreeShape, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class LateTokens:
    """Tokens that were emitted steps ago, as the part of a `Verdict` that a draft model reads."""

    predict: Int[Tensor, "b w"]
    accept_lens: Int[Tensor, " b"]
    new_seq_lens: Int[Tensor, " b"]
    hidden_states: Float[Tensor, "b w h"]


def draft_extend(
    draft: ModelRunner,
    cache: KvCache,
    inputs: StepInputs,
    verdict: Verdict | LateTokens,
    shape: TreeShape,
    sampling: SamplingInputs,
    shifted: bool,
    max_seq_len: int,
) -> NextDraft:
    """Run the `w` emitted tokens through the draft; the row of the last accepted one gives the next draft."""
    b, w = verdict.predict.shape
    start = draft_lens(inputs, shifted)
    read = extend_inputs(cache.row_table.slots, inputs.rows, start, verdict.predict, verdict.accept_lens)
    states = chain_states(cache.draft_states, inputs.rows, w)
    forward_batch = window_forward_batch(
        kv_pool=cache.draft_pool,
        row_table=cache.row_table,
        rows=inputs.rows,
        prefix_lens=start,
        max_prefix_len=max_seq_len + 1,
        keys_ahead=(0 if shifted else 1) + tokens_ahead(verdict),
        window_slots=reserved_slots(read.slots, verdict.accept_lens, verdict),
        window_positions=read.positions,
        states=states,
    )
    out = draft.forward(
        read.input_ids.flatten(),
        read.positions.flatten(),
        forward_batch,
        logits_at=read.newest,
        target_hidden=verdict.hidden_states.flatten(0, 1) if shifted else None,
    )
    place = torch.arange(w, device=start.device)
    read_index = torch.where(place < verdict.accept_lens[:, None], place, -1)
    commit_states(states, read_index, verdict.accept_lens)
    hidden = out.hidden_states[read.newest] if shifted else out.hidden_states[:b, :0]
    return first_level(draft, out.logits, hidden, shape, verdict.new_seq_lens, sampling.to(start.device))


def tokens_ahead(verdict: Verdict | LateTokens) -> int:
    """Tokens of the window beyond the step's lengths. Late ones lie within them, and what is behind those is nobody's."""
    return verdict.predict.shape[1] if isinstance(verdict, Verdict) else 0


def reserved_slots(
    slots: Int[Tensor, "b w"], lens: Int[Tensor, " b"], verdict: Verdict | LateTokens
) -> Int[Tensor, "b w"]:
    """The slots of a window, of which `lens` tokens count. Late tokens have a wider window than a step: where it ends
    nothing is reserved for the request, and what does not count goes to the padding slot."""
    if isinstance(verdict, Verdict):
        return slots
    return torch.where(torch.arange(slots.shape[1], device=slots.device) < lens[:, None], slots, 0)


def prefill_draft(
    draft: ModelRunner,
    cache: KvCache,
    prompt: PromptStaging,
    target_output: PrefillOutput,
    shape: TreeShape,
    sampling: SamplingInputs,
    shifted: bool,
) -> NextDraft:
    """The draft's side of a prefill.

    Shifted: token `p + 1` at position `p`, with the target's hidden state of position `p`. Unshifted: the
    tokens as they are. Either way the last one is the token after the chunk: the next one of the prompt, or
    the one just sampled.
    """
    device = cache.row_table.slots.device
    states = prompt.states if shifted or prompt.states is None else _with_sampled(prompt.states)
    rows, input_ids, positions, last = place_prompts(prompt, device)
    next_ids = prompt.next_ids.to(device, non_blocking=True)
    after = torch.where(next_ids < 0, target_output.verdict.predict[:, 0], next_ids)
    if shifted:
        extend_lens = prompt.extend_lens
        input_ids = input_ids.roll(-1).index_copy(0, last, after)
    else:
        extend_lens = tuple(length + 1 for length in prompt.extend_lens)
        input_ids = _append_to_each(input_ids, prompt.extend_lens, after)
        positions = _append_to_each(positions, prompt.extend_lens, positions[last] + 1)
        last = last + torch.arange(1, len(extend_lens) + 1, device=device)
    forward_batch = extend_forward_batch(
        kv_pool=cache.draft_pool,
        row_table=cache.row_table,
        rows=rows,
        prefix_lens=prompt.prefix_lens,
        extend_lens=extend_lens,
        states=prefill_states(cache.draft_states, states, extend_lens),
    )
    out = draft.forward(
        input_ids,
        positions,
        forward_batch,
        logits_at=last,
        target_hidden=target_output.hidden_states if shifted else None,
    )
    hidden = out.hidden_states[last] if shifted else out.hidden_states[last, :0]
    return first_level(
        draft, out.logits, hidden, shape, target_output.verdict.new_seq_lens, sampling.to(device)
    )


def _with_sampled(plan: StatePlan) -> StatePlan:
    """The request's own state of an unshifted draft: with the token just sampled, but not with the first token of the
    next chunk, which that chunk runs again."""
    pairs = zip(plan.save_lens, plan.is_last, strict=True)
    return replace(plan, save_lens=tuple((own + is_last, *others) for (own, *others), is_last in pairs))


def _append_to_each(flat: Tensor, lens: tuple[int, ...], values: Tensor) -> Tensor:
    """Put `values[i]` behind the `i`-th run of `flat`."""
    runs = zip(flat.split(lens), values.split(1), strict=True)
    return torch.cat([part for run in runs for part in run])
