"""NGRAM: drafts are continuations of earlier occurrences of the newest tokens (prompt lookup, Saxena 2023)."""

from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Int
from torch import Tensor

from spec_v2.kernels.ngram_tree import NOTHING, NgramShape, ngram_tree
from spec_v2.scheduler.schedule_batch import ScheduleBatch
from spec_v2.scheduler.streams import Pending
from spec_v2.server_args import ServerArgs
from spec_v2.speculative.base_spec_worker import BaseSpecWorker
from spec_v2.speculative.verify import PrefillOutput
from spec_v2.types import DraftTree, ForwardMode, NextDraft, PromptStaging, StepInputs, Verdict


@final
class NGRAMWorker(BaseSpecWorker):
    """Drafts from the request's own known tokens, read from its FutureMap row, the newest ones included.

    `corpus`: tokens that all requests may copy from too, documents separated by `NOTHING`; read-only.
    """

    follows_shape = True
    corpus: Int[Tensor, " corpus"] | None = None

    def load_corpus(self, tokenizer: Any) -> None:
        """Read the corpus that the server arguments name."""
        self.corpus = read_corpus(self.server_args, tokenizer, self.future_map.history.device)

    def draft(self, batch: ScheduleBatch, inputs: Pending[Any]) -> Pending[DraftTree]:
        batch.forward_mode = ForwardMode.DRAFT
        args = self.server_args
        ngram = NgramShape(
            max_trie_depth=args.speculative_ngram_max_trie_depth,
            min_bfs_breadth=args.speculative_ngram_min_bfs_breadth,
            max_bfs_breadth=args.speculative_ngram_max_bfs_breadth,
            by_frequency=args.speculative_ngram_match_type == "PROB",
        )
        batch.spec_info = self.stream.launch(
            draft_from_history,
            self.future_map.history,
            self.corpus,
            inputs,
            ngram,
            self.shape_for(batch).num_draft_tokens,
            batch.max_seq_len,
            label="draft",
        )
        return batch.spec_info  # type: ignore[no-any-return]

    def prefill_draft(
        self, batch: ScheduleBatch, output: Pending[PrefillOutput], verdict: Pending[Verdict]
    ) -> Pending[NextDraft]:
        self.stream.launch(
            write_prompts_to_history, self.future_map.history, batch.spec_info, label="history"
        )
        return super().prefill_draft(batch, output, verdict)


def draft_from_history(
    history: Int[Tensor, "rows width"],
    corpus: Int[Tensor, " corpus"] | None,
    inputs: StepInputs,
    ngram: NgramShape,
    num_nodes: int,
    max_seq_len: int,
) -> DraftTree:
    """The tree under each bonus token. `max_seq_len` bounds `seq_lens`, the bonus token's position."""
    return ngram_tree(history, corpus, inputs.rows, inputs.seq_lens, max_seq_len, ngram, num_nodes)


def write_prompts_to_history(history: Int[Tensor, "rows width"], prompt: PromptStaging) -> None:
    """Put all known tokens into the requests' rows: a cached prefix was never computed here, but is known."""
    lens = [sum(span) for span in zip(prompt.prefix_lens, prompt.extend_lens, strict=True)]
    positions = torch.cat([torch.arange(length) for length in lens])
    rows = torch.repeat_interleave(prompt.rows, torch.tensor(lens), output_size=sum(lens))
    host = (rows, positions, prompt.known_ids)
    rows, positions, tokens = (x.to(history.device, non_blocking=True) for x in host)
    history[rows, positions] = tokens


def read_corpus(args: ServerArgs, tokenizer: Any, device: torch.device) -> Int[Tensor, " corpus"]:
    """The corpus of `speculative_ngram_external_corpus_path`, tokenised. Raises ValueError where it cannot be read."""
    name, path = (
        "speculative_ngram_external_corpus_path",
        Path(str(args.speculative_ngram_external_corpus_path)),
    )
    if tokenizer is None:
        raise ValueError(f"{name}={path} is text, but this engine has no tokenizer; pass tokenizer=")
    if not path.is_file():
        raise ValueError(f"{name}={path}: no such file; name a text file with one document a line")
    ids: list[int] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        ids += [*tokenizer(line, add_special_tokens=False)["input_ids"], NOTHING]
        if len(ids) >= args.speculative_ngram_external_corpus_max_tokens:
            break
    ids = ids[: args.speculative_ngram_external_corpus_max_tokens]
    return torch.tensor([*ids, NOTHING], device=device)
