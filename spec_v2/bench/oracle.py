"""ORACLE: drafts that replay a recorded continuation, for how fast perfect drafts would be.

A plain greedy run is recorded, then drafted from: no drafter runs, every draft is right, and tau is as large as the
tree allows. It is the upper bound of what drafting can gain, on a text that is the model's own. Built on the public
`register_algorithm`, like any algorithm of one's own.
"""

from typing import Any, final

import torch
from jaxtyping import Int
from torch import Tensor

from spec_v2.bench.contenders import EngineContender, Prompts, Sample
from spec_v2.bench.settings import ORACLE
from spec_v2.engine import Engine
from spec_v2.scheduler.sampling_batch_info import host_tensor
from spec_v2.scheduler.schedule_batch import ScheduleBatch
from spec_v2.scheduler.streams import Pending
from spec_v2.spec_info import register_algorithm
from spec_v2.speculative.base_spec_worker import BaseSpecWorker
from spec_v2.speculative.verify import PrefillOutput
from spec_v2.types import DraftTree, ForwardMode, NextDraft, StepInputs, Verdict

MAX_RECORDINGS = 8


@final
class OracleWorker(BaseSpecWorker):
    """Drafts the chain that a table holds for the request. `remember` says what will be said after a prompt."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        rows, width = self.cache.row_table.slots.shape
        self.table = torch.zeros(rows, width, dtype=torch.long, device=self.cache.row_table.slots.device)
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def remember(self, prompt: tuple[int, ...], continuation: tuple[int, ...]) -> None:
        """Replay this after the prompt; an earlier recording is replaced. Unknown prompts are drafted badly."""
        self._known[tuple(prompt)] = continuation

    def draft(self, batch: ScheduleBatch, inputs: Pending[Any]) -> Pending[DraftTree]:
        batch.forward_mode = ForwardMode.DRAFT
        batch.spec_info = self.stream.launch(
            replay, self.table, inputs, self.shape.num_draft_tokens, label="draft"
        )
        return batch.spec_info  # type: ignore[no-any-return]

    def prefill_draft(
        self, batch: ScheduleBatch, output: Pending[PrefillOutput], verdict: Pending[Verdict]
    ) -> Pending[NextDraft]:
        width = self.table.shape[1]
        texts = [(*req.prompt_ids, *self._known.get(req.prompt_ids, ()))[:width] for req in batch.reqs]
        padded = [token for text in texts for token in (*text, *[0] * (width - len(text)))]
        host = host_tensor(padded, torch.long, self.table.device.type == "cuda").view(-1, width)
        self.stream.launch(write_rows, self.table, batch.rows, host, label="history")
        return super().prefill_draft(batch, output, verdict)


def write_rows(
    table: Int[Tensor, "rows width"], rows: Int[Tensor, " b"], texts: Int[Tensor, "b width"]
) -> None:
    """Put the texts, prompt and continuation by position, into the requests' rows."""
    rows, texts = (x.to(table.device, non_blocking=True) for x in (rows, texts))
    table[rows] = texts


def replay(table: Int[Tensor, "rows width"], inputs: StepInputs, num_nodes: int) -> DraftTree:
    """A chain: the bonus token, at position `seq_lens`, and what the recording holds behind that position."""
    bonus = inputs.bonus_tokens[:, None]
    steps = torch.arange(num_nodes, device=bonus.device)
    places = (inputs.seq_lens[:, None] + steps[1:]).clamp(max=table.shape[1] - 1)
    return DraftTree(
        tokens=torch.cat([bonus, table[inputs.rows[:, None], places]], 1),
        parents=(steps - 1).expand(len(bonus), -1),
        scores=torch.ones(len(bonus), num_nodes, device=bonus.device),
        match_lens=torch.zeros_like(inputs.bonus_tokens),
        draft_probs=torch.empty(len(bonus), 0, 0, device=bonus.device),
    )


def register_oracle() -> None:
    """Make `speculative_algorithm="ORACLE"` known. Calling it again changes nothing."""
    register_algorithm(ORACLE, OracleWorker)


class OracleContender(EngineContender):
    """Records what `plain` says to prompts that it has not met, then replays it.

    A step over many tokens may round a tie the other way than one over a single token. From there on the
    recording would be of another text, so what came out is recorded again until it comes out as recorded.
    """

    def __init__(self, name: str, engine: Engine, plain: EngineContender) -> None:
        super().__init__(name, engine)
        self._plain = plain
        self._recorded: set[tuple[tuple[tuple[int, ...], ...], int]] = set()

    def run(self, prompts: Prompts, max_new_tokens: int, *, ignore_eos: bool = True) -> Sample:
        case = (tuple(prompts), max_new_tokens)
        if case not in self._recorded:
            self._record(prompts, max_new_tokens)
            self._recorded.add(case)
        return super().run(prompts, max_new_tokens, ignore_eos=ignore_eos)

    def _record(self, prompts: Prompts, max_new_tokens: int) -> None:
        """Past the model's own end: an answer that ends there is the beginning of it."""
        worker = self.engine.scheduler.worker
        assert isinstance(worker, OracleWorker)
        is_forced = self.engine.server_args.speculative_simulated_accept_length is not None
        sample = self._plain.run(prompts, max_new_tokens)
        for _ in range(MAX_RECORDINGS):
            texts = [done.output_ids for done in sample.completions]
            for prompt, text in zip(prompts, texts, strict=True):
                worker.remember(prompt, text)
            if is_forced:
                return
            sample = super().run(prompts, max_new_tokens)
            if [done.output_ids for done in sample.completions] == texts:
                return
