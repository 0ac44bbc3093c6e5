"""What each decode step drafted and what became of it, kept while somebody asks for it: for figures and notebooks.

`Engine.record_steps()` turns it on. It costs one launch per step, which copies the tree, and a host read of the copy
after the step's event. When it is off, nothing is launched and nothing is kept.
"""

import html
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from torch import Tensor

from spec_v2.observability.markup import ACCEPTED_STYLE, REJECTED_STYLE, tree_list, visible

if TYPE_CHECKING:
    from spec_v2.types import DraftTree, Verdict


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's tree, verdict and row, in memory that the next step does not write. `slots`: the row's first entries."""

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    seq_lens: Tensor
    accept_index: Tensor
    accept_lens: Tensor
    predict: Tensor
    slots: Tensor


def copy_step(
    rows: Tensor, tree: "DraftTree", verdict: "Verdict", row_slots: Tensor, max_seq_len: int
) -> StepTensors:
    """Launched on the forward stream after verify. `rows` are those of the batch. `max_seq_len`: a host bound on the lengths, in tokens."""
    width = min(max_seq_len + tree.tokens.shape[1], row_slots.shape[1])
    return StepTensors(
        tokens=tree.tokens.clone(),
        parents=tree.parents.clone(),
        scores=tree.scores.clone(),
        seq_lens=verdict.new_seq_lens - verdict.accept_lens,
        accept_index=verdict.accept_index.clone(),
        accept_lens=verdict.accept_lens.clone(),
        predict=verdict.predict.clone(),
        slots=row_slots[rows.to(row_slots.device, non_blocking=True), :width],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """One request's part of one decode step. It draws itself in a notebook; `spec_v2.plots` draws it better.

    `seq_len`: KV-ready length before the step, in tokens; node `j` of the tree was written to `slots[seq_len + j]`.
    `tokens`, `parents`, `scores`: the tree as `DraftTree` has it (a parent of -1 below node 0: padding). `accept_index`:
    the accepted path, root first. `emitted`: accepted drafts, then the bonus token. `num_kept`: how many of those came
    before a stop or the end. `pieces`, `emitted_pieces`: the texts of tokens (their ids without a tokenizer).
    """

    step: int
    request_id: int
    seq_len: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...]
    accept_index: tuple[int, ...]
    emitted: tuple[int, ...]
    num_kept: int
    slots: tuple[int, ...]
    pieces: tuple[str, ...]
    emitted_pieces: tuple[str, ...]

    @property
    def accept_len(self) -> int:
        """Tokens that the step emitted, bonus included."""
        return len(self.emitted)

    @property
    def num_correct_drafts(self) -> int:
        """Accepted drafts, bonus excluded."""
        return len(self.emitted) - 1

    @property
    def nodes(self) -> tuple[int, ...]:
        """Numbers of the real nodes: the root and all that have a parent."""
        return tuple(j for j, parent in enumerate(self.parents) if j == 0 or parent >= 0)

    @property
    def num_drafts(self) -> int:
        """Drafts that the tree offered."""
        return len(self.nodes) - 1

    def depth(self, node: int) -> int:
        """Edges between a node and the root."""
        return 0 if self.parents[node] < 0 else 1 + self.depth(self.parents[node])

    def prob(self, node: int) -> float:
        """The drafter's probability of a node after its parent; 1 for the root."""
        above = self.scores[self.parents[node]] if self.parents[node] >= 0 else 1.0
        return self.scores[node] / above if above > 0 else 0.0

    def fate(self, node: int) -> str:
        """ "root", "accepted", "rejected" (the target was asked there and said another), or "not reached"."""
        if node == 0:
            return "root"
        if node in self.accept_index:
            return "accepted"
        return "rejected" if self.parents[node] in self.accept_index else "not reached"

    def __repr__(self) -> str:
        return (
            f"DecodeStep(step={self.step}, request_id={self.request_id}, {self.num_correct_drafts} of "
            f"{self.num_drafts} drafts accepted, emitted {''.join(self.emitted_pieces)!r})"
        )

    def _repr_html_(self) -> str:
        return (
            f"<p>Step {self.step} of request {self.request_id}: {self.num_correct_drafts} of {self.num_drafts} drafts "
            f"accepted, then <i>{html.escape(visible(self.emitted_pieces[-1]))}</i>, the target's own token.</p>"
            + tree_list(self.parents, self._label)
        )

    def _label(self, node: int) -> str:
        text, fate = html.escape(visible(self.pieces[node])), self.fate(node)
        if fate == "root":
            return f"<b>{text}</b>, known before the step"
        if fate == "accepted":
            return f'<b style="{ACCEPTED_STYLE}">&#10003; {text}</b> {self.prob(node):.2f} accepted'
        mark = "&#10007;" if fate == "rejected" else "&#183;"
        return f'<span style="{REJECTED_STYLE}">{mark} {text} {self.prob(node):.2f} {fate}</span>'


class StepLog(Sequence[DecodeStep]):
    """The newest `max_steps` decode steps in the order in which they were committed; one entry per request.

    `decode`: the text of one token id.
    """

    def __init__(self, decode: Callable[[int], str], max_steps: int) -> None:
        self._decode = decode
        self._steps: deque[DecodeStep] = deque(maxlen=max_steps)

    def note(self, step: int, request_id: int, tensors: StepTensors, i: int, num_kept: int) -> None:
        """Keep what step `step` did for the request in row `i` of its batch. Called on the host after its event."""
        accept_len, seq_len = int(tensors.accept_lens[i]), int(tensors.seq_lens[i])
        tokens = tuple(tensors.tokens[i].tolist())
        emitted = tuple(tensors.predict[i, :accept_len].tolist())
        self._steps.append(
            DecodeStep(
                step=step,
                request_id=request_id,
                seq_len=seq_len,
                tokens=tokens,
                parents=tuple(tensors.parents[i].tolist()),
                scores=tuple(tensors.scores[i].tolist()),
                accept_index=tuple(tensors.accept_index[i, :accept_len].tolist()),
                emitted=emitted,
                num_kept=num_kept,
                slots=tuple(tensors.slots[i, : seq_len + len(tokens)].tolist()),
                pieces=tuple(map(self._decode, tokens)),
                emitted_pieces=tuple(map(self._decode, emitted)),
            )
        )

    def of_request(self, request_id: int) -> list[DecodeStep]:
        """The steps of one request, in order."""
        return [s for s in self._steps if s.request_id == request_id]

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> DecodeStep: ...
    @overload
    def __getitem__(self, index: slice) -> list[DecodeStep]: ...
    def __getitem__(self, index: int | slice) -> DecodeStep | list[DecodeStep]:
        return list(self._steps)[index] if isinstance(index, slice) else self._steps[index]

    def __iter__(self) -> Iterator[DecodeStep]:
        return iter(tuple(self._steps))

    def __repr__(self) -> str:
        emitted = sum(s.accept_len for s in self)
        return f"StepLog({len(self)} decode steps, {emitted} tokens)"
