"""Device rows that carry a request from one step to the next.

A request's row is its seat: a step scatters what the next one needs into it, the next step gathers it. So a
batch is a list of row numbers, filter and merge are indexing, and the host never looks at a value.
Row 0 is padding. Everything here runs on the forward stream, launched by the scheduler.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spec_v2.kernels.adjust_logits import TokenCounts
from spec_v2.kernels.future_rows import gather_rows, publish_rows, stash_rows
from spec_v2.scheduler.sampling_batch_info import host_tensor
from spec_v2.scheduler.schedule_batch import ScheduleBatch
from spec_v2.scheduler.streams import Event, Stream
from spec_v2.types import NextDraft, StepInputs, Verdict

POISON = -1
MOST_UNREAD = 64
"""Tokens that a draft model may leave unread while steps do not draft. More would be read in one forward later; their
hidden states are kept until then."""


@dataclass(frozen=True, slots=True)
class Unread:
    """Columns for the newest tokens that the draft model has not read: `lens` of each row, in order from place 0.

    `hidden_states`: the target's, of the token before (width 0 for a draft that does not read them). What lies behind
    `lens` is finite.
    """

    tokens: Int[Tensor, "rows u"]
    hidden_states: Float[Tensor, "rows u h"]
    lens: Int[Tensor, " rows"]


class FutureMap:
    """The rows. `new_seq_lens` is written by `publish`, between verify and draft-extend; the rest by `stash`.

    `host_seq_lens`: on the host, what `new_seq_lens` was when it was published last; None where nobody asks.
    `history` holds the known tokens of each request by position (width 0 where no worker reads it), `unread` those
    that a draft model has yet to read (`unread_width` 0 where it reads each step's at once). With
    `debug`, a row is poisoned once it was read, so a step that reads what nobody wrote is noticed.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        topk: int,
        hidden_size: int,
        history_width: int,
        draft_probs_width: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        debug: bool = False,
        unread_width: int = 0,
        target_hidden_size: int = 0,
    ) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.full((num_rows, *shape), POISON, dtype=torch.long, device=device)

        self.new_seq_lens: Int[Tensor, " rows"] = ints()
        self.bonus_tokens: Int[Tensor, " rows"] = ints()
        self.topk_index: Int[Tensor, "rows k"] = ints(topk)
        self.history: Int[Tensor, "rows width"] = ints(history_width)
        self.topk_p: Float[Tensor, "rows k"] = torch.full((num_rows, topk), torch.nan, device=device)
        self.hidden_states: Float[Tensor, "rows h"] = torch.full(
            (num_rows, hidden_size), torch.nan, dtype=dtype, device=device
        )
        self.draft_probs: Float[Tensor, "rows dv"] = torch.full(
            (num_rows, draft_probs_width), torch.nan, device=device
        )
        self.unread = Unread(
            tokens=torch.zeros(num_rows, unread_width, dtype=torch.long, device=device),
            hidden_states=torch.zeros(num_rows, unread_width, target_hidden_size, dtype=dtype, device=device),
            lens=torch.zeros(num_rows, dtype=torch.long, device=device),
        )
        self.token_counts = TokenCounts(num_rows, vocab_size, device)
        self.publish_ready: Event | None = None
        self.host_seq_lens: Int[Tensor, " rows"] | None = None
        self.debug = debug

    def open_row_0(self) -> None:
        """Let row 0 fill batches up: a request without tokens, again and again."""
        for column in (
            self.new_seq_lens, self.bonus_tokens, self.topk_index, self.history,
            self.topk_p, self.hidden_states, self.draft_probs,
        ):  # fmt: skip
            column[0] = 0

    def publish(self, rows: Int[Tensor, " b"], verdict: Verdict) -> Int[Tensor, " b"]:
        """Make the new lengths known. Returns them, `[b]`, in tokens."""
        rows = rows.to(verdict.new_seq_lens.device, non_blocking=True)
        publish_rows(rows, verdict.new_seq_lens, self.new_seq_lens)
        return verdict.new_seq_lens

    def mirror_on_host(self, pin: bool) -> None:
        """Keep `host_seq_lens` from now on."""
        self.host_seq_lens = host_tensor([POISON] * len(self.new_seq_lens), torch.long, pin)

    def copy_lens_to_host(self) -> None:
        """Start the download; what it brings may be read after `publish_ready`."""
        assert self.host_seq_lens is not None
        self.host_seq_lens.copy_(self.new_seq_lens, non_blocking=True)

    def lens_on_host(self, rows: Int[Tensor, " b"]) -> tuple[int, ...]:
        """The newest lengths of these rows, in tokens. Waits until they are published."""
        assert self.host_seq_lens is not None
        assert self.publish_ready is not None
        self.publish_ready.synchronize()
        return tuple(self.host_seq_lens[rows].tolist())

    def stash(self, rows: Int[Tensor, " b"], verdict: Verdict, next_draft: NextDraft) -> None:
        """Keep what the next step starts from: the bonus token and the first level of its tree."""
        rows = rows.to(verdict.accept_lens.device, non_blocking=True)
        stash_rows(
            rows,
            predict=verdict.predict,
            accept_lens=verdict.accept_lens,
            new_seq_lens=verdict.new_seq_lens,
            next_draft=next_draft,
            bonus_tokens=self.bonus_tokens,
            drafts=self._drafts,
            history=self.history,
        )
        self.token_counts.add(rows, verdict.predict)

    def resolve(self, rows: Int[Tensor, " b"], seq_lens: Int[Tensor, " b"] | None) -> StepInputs:
        """Gather a step's inputs. `seq_lens`: what the synchronous schedule re-applied, or None: from the rows."""
        rows = rows.to(self.new_seq_lens.device, non_blocking=True)
        published, bonus, next_draft = gather_rows(rows, self.new_seq_lens, self.bonus_tokens, self._drafts)
        inputs = StepInputs(
            rows=rows,
            seq_lens=published if seq_lens is None else seq_lens,
            bonus_tokens=bonus,
            next_draft=next_draft,
        )
        if self.debug:
            self._check_and_poison(inputs, published)
        return inputs

    @property
    def _drafts(self) -> NextDraft:
        """The columns that a draft is kept in, all rows of them."""
        return NextDraft(
            topk_p=self.topk_p,
            topk_index=self.topk_index,
            hidden_states=self.hidden_states,
            draft_probs=self.draft_probs,
        )

    def _check_and_poison(self, inputs: StepInputs, published: Tensor) -> None:
        assert bool((published >= 0).all()), f"rows {inputs.rows.tolist()}: a length was not published"
        assert torch.equal(published, inputs.seq_lens), "re-applied lengths differ from the published ones"
        assert bool((inputs.bonus_tokens >= 0).all()), f"rows {inputs.rows.tolist()}: not stashed"
        self.new_seq_lens[inputs.rows] = POISON
        self.bonus_tokens[inputs.rows] = POISON
        self.topk_index[inputs.rows] = POISON
        self.topk_p[inputs.rows] = torch.nan
        self.hidden_states[inputs.rows] = torch.nan
        self.draft_probs[inputs.rows] = torch.nan


def resolve_forward_inputs(batch: ScheduleBatch, future_map: FutureMap, stream: Stream) -> None:
    """Turn the batch's rows into this step's inputs (a launch). Consumes one-shot staging, so it comes before
    isolation: what it takes must stay taken."""
    if batch.forward_mode.is_extend():
        prompt = batch.spec_info = batch.prompt_staging
        batch.prompt_staging = None
        if prompt is not None and prompt.count_reset is not None:
            stream.launch(future_map.token_counts.reset, prompt.count_reset, label="counts")
        return
    batch.spec_info = stream.launch(future_map.resolve, batch.rows, batch.seq_lens, label="resolve")
