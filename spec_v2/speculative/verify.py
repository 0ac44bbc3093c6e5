"""Step 2, verify: one target forward over the tree, one traversal, and the accepted path moves to the front.

Also the target's side of a prefill, which is the same question asked of a prompt.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spec_v2.kernels.adjust_logits import TokenCounts, adjust_logits
from spec_v2.kernels.commit_path import commit_path
from spec_v2.kernels.sample_nodes import sample_nodes
from spec_v2.kernels.top_k import top_k
from spec_v2.kernels.tree_structure import place_tree
from spec_v2.kernels.verify_tree import verify_tree
from spec_v2.mem_cache.kv_cache_builder import KvCache
from spec_v2.model_executor.forward_batch import extend_forward_batch, window_forward_batch
from spec_v2.model_executor.model_runner import ModelRunner
from spec_v2.model_executor.recurrence import chain_states, commit_states, prefill_states, tree_states
from spec_v2.scheduler.sampling_batch_info import SamplingBatchInfo
from spec_v2.speculative.forced_acceptance import force_acceptance
from spec_v2.speculative.rejection import accept_by_rejection
from spec_v2.types import DraftTree, PromptStaging, StepInputs, TokenLogprobs, TreeShape, Verdict


def verify(
    target: ModelRunner,
    cache: KvCache,
    inputs: StepInputs,
    tree: DraftTree,
    shape: TreeShape,
    sampling_info: SamplingBatchInfo,
    counts: TokenCounts,
    max_seq_len: int,
    keep_hidden: bool,
) -> Verdict:
    """Run the target on all nodes at once and follow its choices down the tree.

    Node `j` is at position `seq_lens + depth(j)`, in slot `row[seq_lens + j]`. Afterwards the KV and hidden
    states of the accepted path lie at `seq_lens ..`, and recurrent layers are in the state after it, as if those
    tokens had been decoded one by one.
    """
    b, n = tree.tokens.shape
    info = sampling_info.to(inputs.rows.device)
    places = place_tree(tree.parents, inputs.seq_lens, inputs.rows, cache.row_table.slots)
    if shape.is_tree:
        states = tree_states(cache.target_states, inputs.rows, places.visible, shape.longest_path + 1)
    else:
        states = chain_states(cache.target_states, inputs.rows, n)
    forward_batch = window_forward_batch(
        kv_pool=cache.target_pool,
        row_table=cache.row_table,
        rows=inputs.rows,
        prefix_lens=inputs.seq_lens,
        max_prefix_len=max_seq_len,
        window_slots=places.slots,
        window_positions=places.positions,
        visible=places.visible if shape.is_tree else None,
        states=states,
    )
    out = target.forward(tree.tokens.flatten(), places.positions.flatten(), forward_batch)
    logits = out.logits.view(b, n, -1)
    adjusted = adjust_logits(
        logits,
        rows=inputs.rows,
        tokens=tree.tokens,
        visible=places.visible,
        positions=places.next_positions,
        inputs=info.logits,
        counts=counts,
    )
    if shape.rejection_sampling:
        accept_index, predict, accept_lens = accept_by_rejection(
            adjusted, places.next_positions, tree, info.sampling
        )
    else:
        target_tokens = sample_nodes(adjusted, places.next_positions, info.sampling)
        accept_index, predict, accept_lens = verify_tree(
            tokens=tree.tokens,
            parents=tree.parents,
            target_tokens=target_tokens,
            longest_path=shape.longest_path,
        )
        if shape.simulated_accept_length is not None:
            accept_index, predict, accept_lens = force_acceptance(tree, places.visible, target_tokens, shape)
    if shape.is_tree:
        # the draft pool needs no move: draft-extend writes the accepted path anew
        cache.target_pool.move_accepted(places.slots, accept_index)
    commit_states(states, accept_index, accept_lens)
    hidden = out.hidden_states if keep_hidden else out.hidden_states[:, :0]
    path = commit_path(
        accept_index=accept_index,
        accept_lens=accept_lens,
        seq_lens=inputs.seq_lens,
        positions=places.positions,
        hidden_states=hidden.unflatten(0, (b, n)),
    )
    return Verdict(
        predict=predict,
        accept_index=accept_index,
        accept_lens=accept_lens,
        new_seq_lens=path.new_seq_lens,
        draft_depths=path.draft_depths,
        match_lens=tree.match_lens,
        has_numbers=has_numbers(logits, accept_index),
        hidden_states=path.hidden_states,
        logprobs=token_logprobs(logits, accept_index, predict, info.num_logprobs),
    )


def has_numbers(logits: Float[Tensor, "b n v"], accept_index: Int[Tensor, "b w"]) -> Bool[Tensor, " b"]:
    """Whether the target's logits make sense all along the accepted path. A node off the path may have any.

    The largest of a node's logits tells: one NaN makes it NaN, an overflow infinite, and no number at all -infinity.
    """
    largest = logits.amax(-1).gather(1, accept_index.clamp(min=0))  # past the path the root's, once more
    return (largest.abs() < torch.inf).all(1)


def token_logprobs(
    logits: Float[Tensor, "b n v"],
    accept_index: Int[Tensor, "b w"],
    predict: Int[Tensor, "b w"],
    num_logprobs: int,
) -> TokenLogprobs:
    """Log-probabilities along the accepted path. `num_logprobs`: -1 for none, else how many of the most likely."""
    b, w = accept_index.shape
    if num_logprobs < 0:
        nothing = logits.new_empty(b, 0, 0, dtype=torch.float32)
        return TokenLogprobs(chosen=nothing[:, :, 0:0].sum(-1), top=nothing, top_ids=nothing.long())
    path = accept_index.clamp(min=0)
    on_path = logits.gather(1, path[:, :, None].expand(-1, -1, logits.shape[2]))
    logprobs = on_path.float().log_softmax(-1)
    _, top_ids = top_k(logprobs.flatten(0, 1), max(num_logprobs, 1))
    top_ids = top_ids[:, :num_logprobs].view(b, w, num_logprobs)
    return TokenLogprobs(
        chosen=logprobs.gather(2, predict.clamp(min=0)[:, :, None])[:, :, 0],
        top=logprobs.gather(2, top_ids),
        top_ids=top_ids,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOutput:
    """A prefill's verdict (one token per request), and the target's hidden states of all prompt tokens."""

    verdict: Verdict
    hidden_states: Float[Tensor, "t h"]


def prefill_target(
    target: ModelRunner,
    cache: KvCache,
    prompt: PromptStaging,
    sampling_info: SamplingBatchInfo,
    counts: TokenCounts,
    keep_hidden: bool,
) -> PrefillOutput:
    """Run prompts, or chunks of them, and choose the first token of each that is complete."""
    device = cache.row_table.slots.device
    info = sampling_info.to(device)
    rows, input_ids, positions, last = place_prompts(prompt, device)
    forward_batch = extend_forward_batch(
        kv_pool=cache.target_pool,
        row_table=cache.row_table,
        rows=rows,
        prefix_lens=prompt.prefix_lens,
        extend_lens=prompt.extend_lens,
        states=prefill_states(cache.target_states, prompt.states, prompt.extend_lens),
    )
    out = target.forward(input_ids, positions, forward_batch, logits_at=last)
    seq_lens = positions[last] + 1
    logits = out.logits[:, None]
    only_root = torch.ones(len(last), 1, 1, dtype=torch.bool, device=device)
    adjusted = adjust_logits(
        logits,
        rows=rows,
        tokens=input_ids[last][:, None],
        visible=only_root,
        positions=seq_lens[:, None],
        inputs=info.logits,
        counts=counts,
    )
    bonus = sample_nodes(adjusted, seq_lens[:, None], info.sampling)
    emits = prompt.next_ids.to(device, non_blocking=True)[:, None] < 0
    hidden = out.hidden_states if keep_hidden else out.hidden_states[:, :0]
    verdict = Verdict(
        predict=torch.where(emits, bonus, -1),
        accept_index=torch.zeros_like(bonus),
        accept_lens=emits[:, 0].long(),
        new_seq_lens=seq_lens,
        draft_depths=torch.zeros_like(seq_lens),
        match_lens=torch.zeros_like(seq_lens),
        has_numbers=has_numbers(logits, torch.zeros_like(bonus)),
        hidden_states=hidden[last][:, None],
        logprobs=token_logprobs(logits, torch.zeros_like(bonus), bonus, info.num_logprobs),
    )
    return PrefillOutput(verdict=verdict, hidden_states=hidden)


def place_prompts(prompt: PromptStaging, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows, input_ids, positions, index of each request's last token), uploaded."""
    spans = zip(prompt.prefix_lens, prompt.extend_lens, strict=True)
    positions = torch.cat([torch.arange(prefix, prefix + length) for prefix, length in spans])
    last = torch.tensor(prompt.extend_lens).cumsum(0) - 1
    host = (prompt.rows, prompt.input_ids, positions, last)
    rows, input_ids, positions, last = (x.to(device, non_blocking=True) for x in host)
    return rows, input_ids, positions, last
