"""Step 1, draft: grow a tree of likely continuations with a draft model.

Each round runs the draft on a frontier of `k` nodes, scores their `k * k` children by the product of
probabilities along the path, and takes the best `k` as the next frontier (EAGLE-2, Li et al. 2024). A node
attends to the request's prefix and to its real ancestors, never to what another branch left behind.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spec_v2.kernels.build_tree import build_tree
from spec_v2.kernels.draft_frontier import Frontier, expand_frontier, start_frontier
from spec_v2.kernels.row_slots import place_window
from spec_v2.kernels.sample_nodes import SamplingInputs
from spec_v2.kernels.top_k import top_k_probs
from spec_v2.mem_cache.kv_cache_builder import KvCache
from spec_v2.model_executor.forward_batch import window_forward_batch
from spec_v2.model_executor.model_runner import ModelOutput, ModelRunner
from spec_v2.model_executor.recurrence import StateView, tree_states
from spec_v2.speculative.rejection import propose
from spec_v2.types import DraftTree, NextDraft, StepInputs, TreeShape


def draft_lens(inputs: StepInputs, shifted: bool) -> Tensor:
    """KV-ready length of the draft model, in tokens.

    A shifted draft (EAGLE) keeps token `p + 1` in slot `p`; an unshifted one (STANDALONE) keeps token `p` in
    slot `p` and has the bonus token's KV already, so it runs one position ahead of the target.
    """
    return inputs.seq_lens if shifted else inputs.seq_lens + 1


def root_only(inputs: StepInputs) -> DraftTree:
    """The tree of plain decoding: nothing but the bonus token."""
    root = inputs.bonus_tokens[:, None]
    return DraftTree(
        tokens=root,
        parents=torch.full_like(root, -1),
        scores=torch.ones_like(root, dtype=torch.float32),
        match_lens=torch.zeros_like(inputs.bonus_tokens),
        draft_probs=torch.empty(len(root), 0, 0, device=root.device),
    )


def grow_tree(
    draft: ModelRunner,
    cache: KvCache,
    inputs: StepInputs,
    shape: TreeShape,
    sampling: SamplingInputs,
    shifted: bool,
    max_seq_len: int,
) -> DraftTree:
    """`num_steps - 1` draft forwards; the first level came with the previous step's draft-extend."""
    k = shape.topk
    start = draft_lens(inputs, shifted)
    positions, slots = place_window(
        cache.row_table.slots, inputs.rows, start, (shape.num_steps - 1) * k, per_position=k
    )

    states: StateView | None = None

    def run(step: int, frontier: Frontier) -> ModelOutput:
        nonlocal states
        states = tree_states(cache.draft_states, inputs.rows, frontier.visible, step + 1, earlier=states)
        window = (step + 1) * k  # draft nodes so far
        forward_batch = window_forward_batch(
            kv_pool=cache.draft_pool,
            row_table=cache.row_table,
            rows=inputs.rows,
            prefix_lens=start,
            max_prefix_len=max_seq_len + 1,
            keys_ahead=window if shifted else window + 1,
            window_slots=slots[:, :window],
            window_positions=positions[:, :window],
            visible=frontier.visible,
            states=states,
        )
        return draft.forward(
            frontier.tokens.flatten(),
            positions[:, step * k : window].flatten(),
            forward_batch,
            target_hidden=frontier.hidden_states.flatten(0, 1) if shifted else None,
        )

    return grow_levels(draft, inputs, inputs.next_draft, shape, sampling.to(start.device), run, shifted)


def grow_levels(
    draft: ModelRunner,
    inputs: StepInputs,
    first: NextDraft,
    shape: TreeShape,
    sampling: SamplingInputs,
    run: Callable[[int, Frontier], ModelOutput],
    recurrent: bool,
) -> DraftTree:
    """The levels below `first`, and of all of them the best nodes.

    `run(step, frontier)` runs the draft on a frontier. `recurrent`: its children start from what the draft made of it.
    """
    # it may come from a step that did not know this one's shape: as wide as any may be, best first
    tokens, probabilities = first.topk_index[:, : shape.topk], first.topk_p[:, : shape.topk]
    frontier, candidates = start_frontier(tokens, probabilities, first.hidden_states, shape.num_steps)
    all_probs = [first.draft_probs]
    for step in range(shape.num_steps - 1):
        out = run(step, frontier)
        # the draft of a node at `seq_lens + step + 1` is the node's own child
        child_p, child_tokens, probs = choose(draft, out.logits, shape, inputs.seq_lens, step + 2, sampling)
        all_probs.append(probs)
        hidden = out.hidden_states if recurrent else out.hidden_states[:, :0]
        frontier = expand_frontier(frontier, candidates, step + 1, child_p, child_tokens, hidden)

    tree = build_tree(
        root_tokens=inputs.bonus_tokens,
        tokens=candidates.tokens,
        scores=candidates.scores,
        parents=candidates.parents,
        num_nodes=shape.num_draft_tokens,
    )
    return replace(tree, draft_probs=torch.stack(all_probs, 1)) if shape.rejection_sampling else tree


def choose(
    draft: ModelRunner,
    logits: Float[Tensor, "r v"],
    shape: TreeShape,
    seq_lens: Int[Tensor, " b"],
    ahead: int,
    sampling: SamplingInputs,
) -> tuple[Float[Tensor, "r k"], Int[Tensor, "r k"], Float[Tensor, "r dv"]]:
    """Children of each node: probabilities, target ids, and for rejection sampling the whole distribution.

    The children are at `seq_lens + ahead`.
    """
    if shape.rejection_sampling:  # of chains: one node to a request
        ids, probs = propose(logits, seq_lens + ahead, sampling)
        return probs.gather(1, ids), ids, probs
    top_p, ids = top_k_probs(logits, shape.topk, draft.target_ids)
    return top_p, ids, logits.new_empty(len(logits), 0, dtype=torch.float32)


def first_level(
    draft: ModelRunner,
    logits: Float[Tensor, "b v"],
    hidden_states: Float[Tensor, "b h"],
    shape: TreeShape,
    seq_lens: Int[Tensor, " b"],
    sampling: SamplingInputs,
) -> NextDraft:
    """The first level of the next tree, from the draft's output at the newest token, whose position is `seq_lens`."""
    topk_p, topk_index, probs = choose(draft, logits, shape, seq_lens, 1, sampling)
    return NextDraft(topk_p=topk_p, topk_index=topk_index, hidden_states=hidden_states, draft_probs=probs)


def no_draft(verdict_rows: int, device: torch.device, dtype: torch.dtype) -> NextDraft:
    """What a worker without a draft model passes on: nothing, `verdict_rows` times."""
    return NextDraft(
        topk_p=torch.empty(verdict_rows, 0, device=device),
        topk_index=torch.empty(verdict_rows, 0, dtype=torch.long, device=device),
        hidden_states=torch.empty(verdict_rows, 0, dtype=dtype, device=device),
        draft_probs=torch.empty(verdict_rows, 0, device=device),
    )
