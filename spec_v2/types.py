"""The nouns of one step, in the order in which a step makes them.

Axis letters, the same in every signature of the package:

| letter | means |
| --- | --- |
| `b` | requests in the batch |
| `n` | nodes of a draft tree, root included: `num_draft_tokens` |
| `w` | tokens a step can emit at most: `longest_path + 1` |
| `k` | children proposed per node: `topk` |
| `q` | query tokens of one request in one forward |
| `m` | keys that one request's queries may look at |
| `t` | tokens of one forward, all requests together |
| `v`, `h` | vocabulary, hidden width (`h` is 0 where no hidden state travels) |

Two counts, and no other name for either: `num_correct_drafts` (accepted drafts, bonus excluded) and
`accept_lens = num_correct_drafts + 1` (bonus included). `n` and `w` are equal for a chain only.
"""

import enum
import html
from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from spec_v2.observability.markup import tree_list

MOST_DRAWN = 4  # requests of a tree in a notebook


class ForwardMode(enum.Enum):
    """What a batch is about to do. A worker moves it along within a step; isolation puts it back."""

    EXTEND = "extend"  # prompt tokens
    DECODE = "decode"  # one step of running requests, as the scheduler sees it
    DRAFT = "draft"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND = "draft_extend"

    def is_extend(self) -> bool:
        """True for prefill: the scheduler merges such a batch into the running one."""
        return self is ForwardMode.EXTEND


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """How a step drafts. `is_tree` says which path to take; no code decides that from the widths.

    `longest_path`: drafts on the longest path a tree can have. It is less than `num_steps` where the tree
    has fewer nodes than that. `simulated_accept_length`: tokens that every step accepts by force, bonus
    included; None leaves it to the target.
    """

    num_steps: int
    topk: int
    num_draft_tokens: int
    longest_path: int
    is_tree: bool
    rejection_sampling: bool = False
    simulated_accept_length: int | None = None

    @property
    def drafts(self) -> bool:
        """False where a step is one of plain decoding: its tree is the root alone."""
        return self.num_draft_tokens > 1

    @property
    def setting(self) -> tuple[int, int, int]:
        """(`num_steps`, `topk`, `num_draft_tokens`), the three numbers that people set and plots show."""
        return self.num_steps, self.topk, self.num_draft_tokens


ROOT_ONLY = TreeShape(num_steps=0, topk=1, num_draft_tokens=1, longest_path=0, is_tree=False)
"""The tree of a step that does not draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountReset:
    """What is known of requests with penalties when their prefill begins: rows, and (row, token) pairs."""

    rows: Int[Tensor, " r"]
    prompt_rows: Int[Tensor, " p"]
    prompt_tokens: Int[Tensor, " p"]
    output_rows: Int[Tensor, " o"]
    output_tokens: Int[Tensor, " o"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """Which rows of the state pools a prefill reads and writes.

    Request `i` goes on from the state in `start_rows[i]`: 0 for a new text, a snapshot's after a prefix hit, its own for a
    further chunk. The state after `save_lens[i][j]` of its tokens goes to row `save_rows[i][j]` (0: nowhere). The first
    save is the request's own row after the whole chunk, the others are snapshots for the prefix cache; all requests
    have as many. `is_last[i]`: its prompt ends with this chunk.
    """

    start_rows: tuple[int, ...]
    save_rows: tuple[tuple[int, ...], ...]
    save_lens: tuple[tuple[int, ...], ...]
    is_last: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptStaging:
    """Known tokens in host memory, one request after the other. A prefill consumes them once.

    Request `i` runs its tokens `prefix_lens[i] .. prefix_lens[i] + extend_lens[i] - 1`; KV of those before is
    there; the last `resumed_lens[i]` of those came from earlier chunks of this prefill, not from the prefix cache.
    `next_ids`: the known token after a chunk, or -1 for a last chunk, whose next token is sampled.
    `known_ids`: all tokens of each request up to the end of its chunk (empty where no worker reads them). `states`: None
    for models without recurrent layers.
    """

    rows: Int[Tensor, " b"]
    input_ids: Int[Tensor, " t"]
    prefix_lens: tuple[int, ...]
    extend_lens: tuple[int, ...]
    resumed_lens: tuple[int, ...]
    next_ids: Int[Tensor, " b"]
    known_ids: Int[Tensor, " known"]
    count_reset: CountReset | None
    states: StatePlan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NextDraft:
    """What a drafter leaves for its next step: the first level of the next tree, already known.

    `topk_p` are probabilities, `topk_index` target-vocabulary ids; `hidden_states` is the drafter's own
    recurrent state; `draft_probs` the distribution that the token was drawn from, for rejection sampling. Widths
    that a worker does not use are 0.
    """

    topk_p: Float[Tensor, "b k"]
    topk_index: Int[Tensor, "b k"]
    hidden_states: Float[Tensor, "b h"]
    draft_probs: Float[Tensor, "b dv"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """A step's inputs, gathered from the FutureMap rows of the batch.

    `seq_lens`: KV-ready length before the step, in tokens. `bonus_tokens`: the newest known token, at
    position `seq_lens`, whose target KV does not exist yet.
    """

    rows: Int[Tensor, " b"]
    seq_lens: Int[Tensor, " b"]
    bonus_tokens: Int[Tensor, " b"]
    next_draft: NextDraft


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DraftTree:
    """A draft per request. `parents` is the tree; masks, depths and links are derived from it.

    Node 0 is the root (the bonus token) and parents precede children. A parent of -1 marks the root and,
    in other columns, a padding node, which nothing reaches. `scores`: the product of the drafter's
    probabilities along the node's path (1 for the root, 0 for padding). `match_lens`: for NGRAM, how many of
    the newest tokens were found earlier, drafted from or not; 0 for others. `draft_probs`: for rejection sampling, the
    distribution that each draft of the chain was drawn from (width 0 otherwise).
    """

    tokens: Int[Tensor, "b n"]
    parents: Int[Tensor, "b n"]
    scores: Float[Tensor, "b n"]
    match_lens: Int[Tensor, " b"]
    draft_probs: Float[Tensor, "b d dv"]

    def __repr__(self) -> str:
        b, n = self.tokens.shape
        return f"DraftTree({b} request{'s' * (b != 1)}, {n} nodes each, on {self.tokens.device})"

    def _repr_html_(self) -> str:
        """Each request's tree as nested lists of token ids and path scores, the first requests only."""
        parts = [
            f"<p>{html.escape(repr(self)[1 + len('DraftTree') : -1])}; path scores beside the token ids</p>"
        ]
        for i in range(min(len(self.tokens), MOST_DRAWN)):
            pairs = zip(self.tokens[i].tolist(), self.scores[i].tolist(), strict=True)
            labels = [f"<b>{token}</b> {score:.3f}" for token, score in pairs]
            parts.append(tree_list(self.parents[i].tolist(), labels.__getitem__))
        rest = len(self.tokens) - MOST_DRAWN
        return "".join(parts) + (f"<p>... and {rest} more</p>" if rest > 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of the emitted tokens and the `j` most likely ones in each place.

    Taken from the target's own logits, before penalties, bias and temperature. `lw` is `w`, or 0 where no
    request of the batch asked.
    """

    chosen: Float[Tensor, "b lw"]
    top: Float[Tensor, "b lw j"]
    top_ids: Int[Tensor, "b lw j"]

    def clone(self) -> "TokenLogprobs":
        """The same values in new memory."""
        return TokenLogprobs(chosen=self.chosen.clone(), top=self.top.clone(), top_ids=self.top_ids.clone())


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the target says about a tree.

    `predict`: the emitted tokens, accepted drafts then the bonus, packed to the front, -1 past
    `accept_lens`, which is 0 for a prompt chunk that is not the last: it emits nothing. `accept_index`: the nodes on the accepted path, -1 past `accept_lens`.
    `draft_depths`: the longest path the tree offered, in drafts. `has_numbers`: False where logits on the accepted path were
    NaN or infinite, so that the tokens mean nothing. `hidden_states`: the target's, for the
    nodes of the accepted path (rows past `accept_lens` hold some finite row).
    """

    predict: Int[Tensor, "b w"]
    accept_index: Int[Tensor, "b w"]
    accept_lens: Int[Tensor, " b"]
    new_seq_lens: Int[Tensor, " b"]
    draft_depths: Int[Tensor, " b"]
    match_lens: Int[Tensor, " b"]
    has_numbers: Bool[Tensor, " b"]
    hidden_states: Float[Tensor, "b w h"]
    logprobs: TokenLogprobs

    @property
    def num_correct_drafts(self) -> Int[Tensor, " b"]:
        """Accepted drafts per request, the bonus excluded."""
        return self.accept_lens - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedVerdict:
    """The part of a `Verdict` that the host reads, as one tensor: `predict`, `accept_lens`, `draft_depths`, `match_lens`,
    `has_numbers`."""

    integers: Int[Tensor, "b columns"]
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class HostVerdict:
    """The part of a `Verdict` that the host reads, in host memory."""

    predict: Int[Tensor, "b w"]
    accept_lens: Int[Tensor, " b"]
    draft_depths: Int[Tensor, " b"]
    match_lens: Int[Tensor, " b"]
    has_numbers: Int[Tensor, " b"]
    logprobs: TokenLogprobs
