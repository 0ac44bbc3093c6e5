"""Draft by copying: find where the newest tokens occurred before, and offer what followed (prompt lookup, Saxena 2023).

The history of a request is its trie: the children of a suffix of length `d` are the tokens that followed its
earlier occurrences. Everything is a tensor of fixed shape, so nothing waits for the device, nothing has to be
kept in step with retraction or abort, and a request sees its own tokens only.

A corpus shared by all requests is opt-in: it stands before each history, its documents separated by `NOTHING`.

BFS mode, as in SGLang: longer matches first; of equal ones level by level, newest occurrence first; a match of
length `d` may branch into at most `breadth(d)` occurrences, wide for short matches and narrow for long ones. PROB mode
counts occurrences instead; it has no kernel and takes the reference everywhere.

Bytes moved: 8 for each known token of a request and of the corpus (again from cache while a place goes on agreeing), and
`20 * b * n` for the tree.
"""

from jaxtyping import Int
from torch import Tensor

from spec_v2.kernels import dispatch
from spec_v2.kernels.ngram_tree.reference import (
    NOTHING,
    NgramShape,
    match_tree,
    ngram_tree_reference,
    suffix_match_lens,
)
from spec_v2.types import DraftTree

__all__ = ["NOTHING", "NgramShape", "match_tree", "ngram_tree", "suffix_match_lens"]


def ngram_tree(
    history: Int[Tensor, "rows width"],
    corpus: Int[Tensor, " corpus"] | None,
    rows: Int[Tensor, " b"],
    seq_lens: Int[Tensor, " b"],
    max_seq_len: int,
    ngram: NgramShape,
    num_nodes: int,
) -> DraftTree:
    """The tree under each newest token, which is at position `seq_lens` of its row. `max_seq_len` bounds those.

    Nodes without a use are padding: parent -1, never reached. With one node nothing is drafted, but the match is still
    looked for: it says when to draft again.
    """
    args = (history, corpus, rows, seq_lens, max_seq_len, ngram, num_nodes)
    if dispatch.runs_triton(history) and not ngram.by_frequency:
        from spec_v2.kernels.ngram_tree.triton_kernel import ngram_tree_triton

        return ngram_tree_triton(*args)
    return ngram_tree_reference(*args)
