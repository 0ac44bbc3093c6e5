"""Multi-layer EAGLE: one MTP module per draft step (DeepSeek-V3, arXiv 2412.19437). Chains only.

Module `i` keeps at entry `p` what it made of token `p + 1 + i` and of what module `i - 1` said at `p` (module 0: the target's
hidden state). So all modules that draft stand at the newest entry, `L - 1`, and each needs the token that the one
before it has just drafted:

    module 0 at L - 1    token L, the bonus token        says draft 1, for position L + 1
    module 1 at L - 1    draft 1                         says draft 2, for position L + 2
    ...

They run in draft-extend, where all of that is at hand; `draft` only lays out the chain.

Module `i`'s newest `i` entries, `L - i .. L - 1`, are made of drafts. They are provisional: the next draft-extend writes them
again, when the tokens are known. Its window for module `i` therefore begins at `L - i`: one entry earlier than that of
module `i - 1`, whose output it reads. That one output, of entry `L - i`, was final in the step before and is carried
over in the request's row (`NextDraft.hidden_states`, one for each module but the last). Windows end where EAGLE's does.

What a module keeps of a page depends on the `num_steps` tokens behind it. So keys of the prefix cache hold that many more
tokens (for EAGLE it is one): then all that is shared is final for every module, nobody writes it again, and whoever
finds it starts with all modules right behind it. Keeping module `i`'s entry where its token is would need pairs only, but
module `i` would then need an output of module `i - 1` from before the prefix, which is in no cache.
"""

from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spec_v2.kernels.row_slots import place_window
from spec_v2.kernels.sample_nodes import SamplingInputs
from spec_v2.mem_cache.kv_cache_builder import KvCache
from spec_v2.model_executor.forward_batch import extend_forward_batch, window_forward_batch
from spec_v2.model_executor.model_runner import ModelRunner
from spec_v2.scheduler.schedule_batch import ScheduleBatch
from spec_v2.scheduler.streams import Pending
from spec_v2.speculative.base_spec_worker import BaseSpecWorker
from spec_v2.speculative.draft_extend import LateTokens, reserved_slots, tokens_ahead
from spec_v2.speculative.draft_tree import choose, root_only
from spec_v2.speculative.verify import PrefillOutput
from spec_v2.types import DraftTree, ForwardMode, NextDraft, PromptStaging, StepInputs, TreeShape, Verdict


@final
class MultiLayerEagleWorkerV2(BaseSpecWorker):
    """Drafts a chain of `num_steps` tokens with `num_steps` forwards, each of another module, in draft-extend.

    A step that drafts less uses the first of them. All modules run nevertheless, so that their KV is there when a later
    step drafts more; after steps that draft nothing they run once for all of them.
    """

    follows_shape = True

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        assert self.draft_runner is not None
        assert self.shape.topk == 1
        assert self.shape.num_draft_tokens == self.shape.num_steps + 1
        self._draft = self.draft_runner

    @property
    def keeps_target_hidden(self) -> bool:
        return True

    def catch_up(self, batch: ScheduleBatch, inputs: Pending[Any]) -> Pending[Any]:
        sampling = batch.sampling_info.sampling
        return self._catch_up(inputs, extend_modules, self.shape, sampling, batch.max_seq_len)

    def draft(self, batch: ScheduleBatch, inputs: Pending[Any]) -> Pending[DraftTree]:
        batch.forward_mode = ForwardMode.DRAFT
        shape = self.shape_for(batch)
        if shape.drafts:
            batch.spec_info = self.stream.launch(lay_out_chain, inputs, shape.num_steps, label="draft")
        else:
            batch.spec_info = self.stream.launch(root_only, inputs, label="draft")
        return batch.spec_info  # type: ignore[no-any-return]

    def draft_extend(
        self, batch: ScheduleBatch, inputs: Pending[Any], verdict: Pending[Verdict]
    ) -> Pending[NextDraft]:
        batch.forward_mode, batch.spec_info = ForwardMode.DRAFT_EXTEND, verdict
        if not self.shape_for(batch).drafts:
            return self._remember(batch, inputs, verdict)
        return self.stream.launch(
            extend_modules,
            self._draft,
            self.cache,
            inputs,
            verdict,
            self.shape,
            batch.sampling_info.sampling,
            batch.max_seq_len,
            label="draft_extend",
        )

    def prefill_draft(
        self, batch: ScheduleBatch, output: Pending[PrefillOutput], verdict: Pending[Verdict]
    ) -> Pending[NextDraft]:
        self._forget(batch)
        return self.stream.launch(
            prefill_modules,
            self._draft,
            self.cache,
            batch.spec_info,
            output,
            self.future_map.hidden_states,
            self.shape,
            batch.sampling_info.sampling,
            label="draft_extend",
        )


# -- draft -------------------------------------------------------------------------------------------------


def lay_out_chain(inputs: StepInputs, num_steps: int) -> DraftTree:
    """The first `num_steps` drafts that the modules have left, one below the other under the bonus token."""
    given, b = inputs.next_draft, len(inputs.rows)
    tokens = torch.cat([inputs.bonus_tokens[:, None], given.topk_index[:, :num_steps]], 1)
    scores = given.topk_p[:, :num_steps].nan_to_num(0.0).cumprod(1)
    return DraftTree(
        tokens=tokens,
        parents=torch.arange(-1, num_steps, device=tokens.device).repeat(b, 1),
        scores=torch.cat([torch.ones_like(scores[:, :1]), scores], 1),
        match_lens=torch.zeros_like(inputs.bonus_tokens),
        draft_probs=given.draft_probs.view(b, num_steps, -1)
        if given.draft_probs.shape[1]
        else given.draft_probs.new_empty(b, 0, 0),
    )


# -- draft-extend ------------------------------------------------------------------------------------------


def extend_modules(
    draft: ModelRunner,
    cache: KvCache,
    inputs: StepInputs,
    verdict: Verdict | LateTokens,
    shape: TreeShape,
    sampling: SamplingInputs,
    max_seq_len: int,
) -> NextDraft:
    """All modules, one after the other. Module `i` runs `w + i` entries; behind the newest one they are garbage.

    `tokens`, `hidden` and `newest` are the window of the module that runs; the next one's is made of them and its output.
    """
    b, w = verdict.predict.shape
    sampling = sampling.to(inputs.rows.device)
    first_of_request = torch.arange(b, device=inputs.rows.device)
    carried = _by_module(inputs.next_draft.hidden_states, shape.num_steps)
    start, newest = inputs.seq_lens, verdict.accept_lens - 1
    tokens, hidden = verdict.predict.clamp(min=0), verdict.hidden_states.to(draft.dtype)
    chain = Chain()

    for module in range(shape.num_steps):
        if module:
            # a text shorter than that has no such entry: its window begins at 0 again
            is_there = inputs.seq_lens >= module
            start = torch.where(is_there, start - 1, start)
            tokens, hidden, newest = _next_window(
                tokens, hidden, newest, chain.tokens[-1], carried[:, module - 1], is_there
            )
        positions, slots = place_window(cache.row_table.slots, inputs.rows, start, w + module)
        forward_batch = window_forward_batch(
            kv_pool=cache.draft_pool,
            row_table=cache.row_table,
            rows=inputs.rows,
            prefix_lens=start,
            max_prefix_len=max_seq_len,
            window_slots=reserved_slots(slots, newest + 1, verdict),
            window_positions=positions,
            keys_ahead=tokens_ahead(verdict),
        )
        out = draft.forward(
            tokens.flatten(),
            positions.flatten(),
            forward_batch,
            logits_at=first_of_request * (w + module) + newest,
            target_hidden=hidden.flatten(0, 1),
            module=module,
        )
        hidden = out.hidden_states.unflatten(0, (b, w + module))
        chain.add(*choose(draft, out.logits, shape, verdict.new_seq_lens, module + 1, sampling))
        # the next step's window of the next module begins here
        final = (verdict.new_seq_lens - (module + 1) - start).clamp(min=0)
        chain.carried.append(hidden[first_of_request, final])
    return chain.next_draft()


def _next_window(
    tokens: Int[Tensor, "b win"],
    hidden: Float[Tensor, "b win h"],
    newest: Int[Tensor, " b"],
    drafted: Int[Tensor, " b"],
    carried: Float[Tensor, "b h"],
    is_there: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The window of the next module: one entry earlier, each entry's token the one after.

    So it holds the same tokens and then the new draft, and the outputs behind the carried one. Where there is no entry
    before (`is_there` False) the outputs stay where they are and the tokens move up.
    """
    b, win = tokens.shape
    places = torch.arange(win + 1, device=tokens.device) + (~is_there)[:, None]
    tokens = torch.cat([tokens, tokens.new_zeros(b, 2)], 1).scatter(1, newest[:, None] + 1, drafted[:, None])
    hidden = torch.cat([carried[:, None], hidden, carried[:, None]], 1)
    hidden = hidden.gather(1, places[:, :, None].expand(-1, -1, hidden.shape[2]))
    return tokens.gather(1, places), hidden, newest + is_there


class Chain:
    """What the modules leave for the next step, as it grows."""

    def __init__(self) -> None:
        self.tokens: list[Int[Tensor, " b"]] = []
        self.carried: list[Float[Tensor, "b h"]] = []
        self._probs: list[Float[Tensor, "b 1"]] = []
        self._distributions: list[Float[Tensor, "b dv"]] = []

    def add(
        self,
        topk_p: Float[Tensor, "b 1"],
        topk_index: Int[Tensor, "b 1"],
        distribution: Float[Tensor, "b dv"],
    ) -> None:
        self.tokens.append(topk_index[:, 0])
        self._probs.append(topk_p)
        self._distributions.append(distribution)

    def next_draft(self) -> NextDraft:
        """All drafts, and all carried outputs but the last module's, which nobody reads."""
        nothing = self.carried[0][:, :0]
        return NextDraft(
            topk_p=torch.cat(self._probs, 1),
            topk_index=torch.stack(self.tokens, 1),
            hidden_states=torch.cat([nothing, *self.carried[:-1]], 1),
            draft_probs=torch.cat(self._distributions, 1),
        )


def _by_module(carried: Float[Tensor, "b h"], num_steps: int) -> Float[Tensor, "b modules width"]:
    """What a row carries, by the module that said it."""
    return carried.view(len(carried), num_steps - 1, -1) if num_steps > 1 else carried[:, None]


# -- prefill -----------------------------------------------------------------------------------------------


def prefill_modules(
    draft: ModelRunner,
    cache: KvCache,
    prompt: PromptStaging,
    target_output: PrefillOutput,
    carried_rows: Float[Tensor, "rows h"],
    shape: TreeShape,
    sampling: SamplingInputs,
) -> NextDraft:
    """The same over prompts or chunks of them, whose lengths the host knows.

    A chunk that goes on from another begins as a decode step does, `module` entries earlier, as far as that chunk's
    prefill reached; a first chunk begins where the prompt does, or a cached prefix ends, with all modules.
    `carried_rows`: the column of the rows in which an earlier chunk has left what it carries over.
    """
    device = cache.row_table.slots.device
    rows, input_ids, next_ids = (
        x.to(device, non_blocking=True) for x in (prompt.rows, prompt.input_ids, prompt.next_ids)
    )
    sampling = sampling.to(device)
    verdict = target_output.verdict
    after = torch.where(next_ids < 0, verdict.predict[:, 0], next_ids)
    carried = _by_module(carried_rows[rows], shape.num_steps)
    # by request: known tokens from the chunk's second on, and the outputs that the next module reads
    known = [
        torch.cat([ids[1:], last])
        for ids, last in zip(input_ids.split(prompt.extend_lens), after.split(1), strict=True)
    ]
    hidden = list(target_output.hidden_states.to(draft.dtype).split(prompt.extend_lens))
    back = [0] * len(known)  # entries before the chunk at which the module begins
    chain = Chain()

    for module in range(shape.num_steps):
        if module:
            known = [torch.cat(pair) for pair in zip(known, chain.tokens[-1].split(1), strict=True)]
            for i, resumed in enumerate(prompt.resumed_lens):
                if back[i] < min(module, resumed):
                    back[i] += 1
                    hidden[i] = torch.cat([carried[i, module - 1 : module], hidden[i]])
        starts = tuple(prefix - n for prefix, n in zip(prompt.prefix_lens, back, strict=True))
        lens = tuple(length + n for length, n in zip(prompt.extend_lens, back, strict=True))
        forward_batch = extend_forward_batch(
            kv_pool=cache.draft_pool,
            row_table=cache.row_table,
            rows=rows,
            prefix_lens=starts,
            extend_lens=lens,
        )
        spans = zip(starts, lens, strict=True)
        positions = torch.cat([torch.arange(start, start + length) for start, length in spans])
        last = torch.tensor(lens).cumsum(0) - 1
        out = draft.forward(
            torch.cat([ids[module - n :] for ids, n in zip(known, back, strict=True)]),
            positions.to(device, non_blocking=True),
            forward_batch,
            logits_at=last.to(device, non_blocking=True),
            target_hidden=torch.cat(hidden),
            module=module,
        )
        hidden = list(out.hidden_states.split(lens))
        chain.add(*choose(draft, out.logits, shape, verdict.new_seq_lens, module + 1, sampling))
        chain.carried.append(torch.stack([said[max(len(said) - 1 - module, 0)] for said in hidden]))
    return chain.next_draft()
