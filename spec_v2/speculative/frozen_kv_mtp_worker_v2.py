"""FROZEN_KV_MTP: the drafter reads the target's KV and owns none (the way of Gemma 4's assistant models).

Nothing is kept between two steps but the target's hidden state of the newest token that has KV. All of a step's
draft forwards run in `draft`: on the bonus token with that hidden state, then on drafts with the drafter's own state.
They all ask from the last position that has KV, and see that prefix. Prefill and draft-extend run nothing, there is no
draft pool, and prefix keys are plain tokens: there is no draft KV that could depend on the token behind.
"""

from typing import Any, final

import torch
from torch import Tensor

from spec_v2.kernels.draft_frontier import Frontier
from spec_v2.kernels.sample_nodes import SamplingInputs
from spec_v2.mem_cache.kv_cache_builder import KvCache
from spec_v2.mem_cache.kv_pool import LayerGeometry
from spec_v2.model_executor.forward_batch import ForwardBatch, reading_forward_batch
from spec_v2.model_executor.model_runner import ModelOutput, ModelRunner
from spec_v2.models.frozen_kv_mtp import FrozenKvHead
from spec_v2.scheduler.schedule_batch import ScheduleBatch
from spec_v2.scheduler.streams import Pending
from spec_v2.speculative.base_spec_worker import BaseSpecWorker
from spec_v2.speculative.draft_tree import first_level, grow_levels
from spec_v2.speculative.verify import PrefillOutput
from spec_v2.types import DraftTree, ForwardMode, NextDraft, StepInputs, TreeShape, Verdict


@final
class FrozenKVMTPWorkerV2(BaseSpecWorker):
    """Drafts chains and trees with `num_steps` forwards of a head that writes no KV."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        assert self.draft_runner is not None
        check_geometry(self.draft_runner.model, self.target.geometry)
        self._draft = self.draft_runner

    @property
    def keeps_target_hidden(self) -> bool:
        return True

    def draft(self, batch: ScheduleBatch, inputs: Pending[Any]) -> Pending[DraftTree]:
        batch.forward_mode = ForwardMode.DRAFT
        batch.spec_info = self.stream.launch(
            grow_frozen_tree,
            self._draft,
            self.cache,
            inputs,
            self.shape_for(batch),
            batch.sampling_info.sampling,
            batch.max_seq_len,
            label="draft",
        )
        return batch.spec_info  # type: ignore[no-any-return]

    def draft_extend(
        self, batch: ScheduleBatch, inputs: Pending[Any], verdict: Pending[Verdict]
    ) -> Pending[NextDraft]:
        batch.forward_mode, batch.spec_info = ForwardMode.DRAFT_EXTEND, verdict
        return self.stream.launch(keep_newest_hidden, verdict, label="draft_extend")

    def prefill_draft(
        self, batch: ScheduleBatch, output: Pending[PrefillOutput], verdict: Pending[Verdict]
    ) -> Pending[NextDraft]:
        return self.stream.launch(keep_newest_hidden, verdict, label="draft_extend")


def grow_frozen_tree(
    draft: ModelRunner,
    cache: KvCache,
    inputs: StepInputs,
    shape: TreeShape,
    sampling: SamplingInputs,
    max_seq_len: int,
) -> DraftTree:
    """`num_steps` draft forwards over the target's KV of positions `0 .. seq_lens - 1`, which stays as it is."""
    sampling = sampling.to(inputs.rows.device)
    place = (inputs.seq_lens - 1).clamp(min=0)[:, None]

    def read(num_queries: int) -> tuple[Tensor, ForwardBatch]:
        forward_batch = reading_forward_batch(
            kv_pool=cache.target_pool,
            row_table=cache.row_table,
            rows=inputs.rows,
            prefix_lens=inputs.seq_lens,
            max_prefix_len=max_seq_len,
            num_queries=num_queries,
        )
        return place.expand(-1, num_queries).flatten(), forward_batch

    seed = draft.forward(
        inputs.bonus_tokens, *read(1), target_hidden=inputs.next_draft.hidden_states.to(draft.dtype)
    )
    first = first_level(draft, seed.logits, seed.hidden_states, shape, inputs.seq_lens, sampling)
    positions, forward_batch = read(shape.topk)

    def run(step: int, frontier: Frontier) -> ModelOutput:
        return draft.forward(
            frontier.tokens.flatten(),
            positions,
            forward_batch,
            target_hidden=frontier.hidden_states.flatten(0, 1),
        )

    return grow_levels(draft, inputs, first, shape, sampling, run, recurrent=True)


def keep_newest_hidden(verdict: Verdict) -> NextDraft:
    """The target's hidden state of the newest token that has KV: that of the last accepted node, or of the prompt."""
    b, _, h = verdict.hidden_states.shape
    newest = (verdict.accept_lens - 1).clamp(min=0)  # a chunk that emits nothing has one hidden state too
    hidden = verdict.hidden_states.gather(1, newest[:, None, None].expand(b, 1, h))[:, 0]
    nothing = torch.empty(b, 0, device=hidden.device)
    return NextDraft(topk_p=nothing, topk_index=nothing.long(), hidden_states=hidden, draft_probs=nothing)


def check_geometry(head: FrozenKvHead, geometry: tuple[LayerGeometry, ...]) -> None:
    """Raise ValueError where a layer's queries do not fit the KV that it is to read."""
    for layer in head.decoder.layers:
        attention = layer.self_attn
        kept = geometry[attention.layer_idx]  # type: ignore[index,union-attr]
        wanted = attention.num_heads // attention.num_key_value_groups, attention.head_dim, attention.head_dim  # type: ignore[union-attr,operator]
        if (kept.num_kv_heads, kept.key_dim, kept.value_dim) != wanted:
            raise ValueError(
                f"speculative_draft_model_path: the frozen-KV head reads layer {attention.layer_idx} as (heads, key "  # type: ignore[union-attr]
                f"width, value width)={wanted}, but the target keeps {kept}; use a head that was made for this target"
            )
