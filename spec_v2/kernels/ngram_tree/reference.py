"""All places of all histories at once; chains are merged by comparing each with each."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from spec_v2.types import DraftTree

NOTHING = -2  # equals no token
NO_TOKEN = -3  # equals nothing in a history


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramShape:
    """`max_trie_depth`: longest suffix looked for, in tokens. Breadths: occurrences followed per match length.

    `by_frequency`: PROB mode; of equally long matches the continuations that occurred most come first.
    """

    max_trie_depth: int
    min_bfs_breadth: int
    max_bfs_breadth: int
    by_frequency: bool = False

    @property
    def num_chains(self) -> int:
        """Occurrences looked at. Counting needs more of them than following does."""
        return 4 * self.max_bfs_breadth if self.by_frequency else self.max_bfs_breadth


def suffix_match_lens(
    history: Int[Tensor, "b m"], last: Int[Tensor, " b"], max_depth: int
) -> Int[Tensor, "b m"]:
    """How many tokens up to each place agree with the newest ones (`last`: position of the newest).

    At most `max_depth`; 0 from `last` on, so a match never runs into itself.
    """
    m = history.shape[1]
    # the newest tokens, oldest first; what is no token, or before the first, agrees with nothing
    places = last[:, None] + torch.arange(1 - max_depth, 1, device=history.device)
    newest = history.gather(1, places.clamp(min=0))
    newest = torch.where((places >= 0) & (newest >= 0), newest, NO_TOKEN)
    # all windows of that length at once: a match ends at the first disagreement, seen from the window's end
    windows = torch.nn.functional.pad(history, (max_depth - 1, 0), value=NOTHING).unfold(1, max_depth, 1)
    disagreeing = torch.where(
        windows == newest[:, None], 0, torch.arange(1, max_depth + 1, device=history.device)
    )
    lengths = max_depth - disagreeing.amax(2)
    return torch.where(torch.arange(m, device=history.device) < last[:, None], lengths, 0)


def match_tree(
    history: Int[Tensor, "b m"], last: Int[Tensor, " b"], ngram: NgramShape, num_nodes: int
) -> DraftTree:
    """The draft tree under the newest token. Nodes without a use are padding: parent -1, never reached."""
    lengths = suffix_match_lens(history, last, ngram.max_trie_depth)
    m = history.shape[1]
    num_chains = min(ngram.num_chains, m)
    # longest match first, newest first among equals; the keys of real matches are distinct
    key = torch.where(lengths > 0, lengths * m + torch.arange(m, device=history.device), -1)
    key, places = key.topk(num_chains, dim=1)
    lengths = lengths.gather(1, places) * (key >= 0)
    chains_kept = _within_breadth(lengths, ngram)

    positions = places[:, :, None] + 1 + torch.arange(num_nodes - 1, device=history.device)
    known = (positions <= last[:, None, None]) & chains_kept[:, :, None]
    tokens = history.gather(1, positions.clamp(max=m - 1).flatten(1)).view_as(positions)
    known = known & (tokens >= 0).cummin(2).values  # a document of a corpus ends
    return _merge_chains(history.gather(1, last[:, None]), tokens, known, lengths, ngram, num_nodes)


def _within_breadth(lengths: Int[Tensor, "b c"], ngram: NgramShape) -> Bool[Tensor, "b c"]:
    """Which occurrences their match length has room for. `lengths` fall along a row."""
    if ngram.by_frequency:  # all are counted; the budget of nodes chooses
        return lengths > 0
    span = max(ngram.max_trie_depth - 1, 1)
    narrowing = (ngram.max_bfs_breadth - ngram.min_bfs_breadth) * (lengths - 1)
    breadth = ngram.max_bfs_breadth - torch.div(narrowing, span, rounding_mode="floor")
    rank = (lengths[:, :, None] == lengths[:, None, :]).tril(-1).sum(-1)
    return (lengths > 0) & (rank < breadth.clamp(min=1))


def _merge_chains(
    root: Int[Tensor, "b 1"],
    tokens: Int[Tensor, "b c d"],
    known: Bool[Tensor, "b c d"],
    lengths: Int[Tensor, "b c"],
    ngram: NgramShape,
    num_nodes: int,
) -> DraftTree:
    """Merge chains that begin alike, keep the first `num_nodes - 1` nodes in BFS order."""
    b, c, d = tokens.shape
    device = tokens.device
    # the first chain that agrees with this one down to depth t owns the node that they share
    agree = (tokens[:, :, None] == tokens[:, None, :]) & known[:, :, None] & known[:, None, :]
    agree = agree.int().cumprod(-1)  # [b, c, c, d]
    owner = agree.argmax(2)
    is_node = known & (owner == torch.arange(c, device=device)[:, None])

    depth = torch.arange(d, device=device)
    # PROB: the fraction of occurrences that go this way, which falls along a path as parents come first
    rarity = c - agree.sum(2) if ngram.by_frequency else torch.zeros_like(owner)
    order = ((ngram.max_trie_depth - lengths)[:, :, None] * (c + 1) + rarity) * d + depth
    order = order * c + torch.arange(c, device=device)[:, None]
    order = torch.where(is_node, order, torch.iinfo(torch.int64).max).flatten(1)
    ranked = order.argsort(dim=1, stable=True)
    number = torch.empty_like(ranked).scatter_(1, ranked, torch.arange(c * d, device=device).expand(b, -1))

    above = torch.cat([owner[:, :, :1], owner[:, :, :-1]], 2) * d + (depth - 1).clamp(min=0)
    parents = number.gather(1, above.flatten(1)) + 1
    parents = torch.where((depth == 0).expand(b, c, d).flatten(1), 0, parents)

    chosen = ranked[:, : num_nodes - 1]
    used = is_node.flatten(1).gather(1, chosen)
    padding = num_nodes - 1 - chosen.shape[1]
    node_tokens = torch.where(used, tokens.flatten(1).gather(1, chosen), root)
    node_parents = torch.where(used, parents.gather(1, chosen), -1)
    return DraftTree(
        match_lens=lengths.amax(1),
        draft_probs=torch.empty(b, 0, 0, device=device),
        tokens=torch.cat([root, node_tokens, root.expand(-1, padding)], 1),
        parents=torch.nn.functional.pad(
            torch.cat([torch.full_like(root, -1), node_parents], 1), (0, padding), value=-1
        ),
        scores=torch.nn.functional.pad(
            torch.cat([torch.ones_like(root), used.long()], 1).float(), (0, padding), value=0.0
        ),
    )


def ngram_tree_reference(
    history: Int[Tensor, "rows width"],
    corpus: Int[Tensor, " corpus"] | None,
    rows: Int[Tensor, " b"],
    seq_lens: Int[Tensor, " b"],
    max_seq_len: int,
    ngram: NgramShape,
    num_nodes: int,
) -> DraftTree:
    """The corpus stands before each history. With one node the match is looked for all the same."""
    known, last = history[rows, : max_seq_len + 1], seq_lens
    if corpus is not None:
        known = torch.cat([corpus.expand(len(known), -1), known], 1)
        last = last + len(corpus)
    if num_nodes > 1:
        return match_tree(known, last, ngram, num_nodes)
    root = known.gather(1, last[:, None])
    return DraftTree(
        tokens=root,
        parents=torch.full_like(root, -1),
        scores=torch.ones_like(root, dtype=torch.float32),
        match_lens=suffix_match_lens(known, last, ngram.max_trie_depth).amax(1),
        draft_probs=torch.empty(len(root), 0, 0, device=root.device),
    )
