"""A step's rows in and out: what resolve gathers, and what stash leaves for the next step, one launch each.

Bytes moved by either: the `h + 2 * k + dv` numbers of a request's draft are read and written once; 8 bytes for each of a
few integers beside.
"""

from jaxtyping import Int
from torch import Tensor

from spec_v2.kernels import dispatch
from spec_v2.kernels.future_rows.reference import (
    gather_rows_reference,
    publish_rows_reference,
    stash_rows_reference,
)
from spec_v2.types import NextDraft

__all__ = ["gather_rows", "publish_rows", "stash_rows"]


def publish_rows(
    rows: Int[Tensor, " b"], seq_lens: Int[Tensor, " b"], new_seq_lens: Int[Tensor, " rows"]
) -> None:
    """Write lengths into their rows of the column `new_seq_lens`. Row 0, which fills batches up, keeps length 0."""
    if dispatch.runs_triton(new_seq_lens):
        from spec_v2.kernels.future_rows.triton_kernel import publish_rows_triton

        return publish_rows_triton(rows, seq_lens, new_seq_lens)
    return publish_rows_reference(rows, seq_lens, new_seq_lens)


def gather_rows(
    rows: Int[Tensor, " b"],
    new_seq_lens: Int[Tensor, " rows"],
    bonus_tokens: Int[Tensor, " rows"],
    drafts: NextDraft,
) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"], NextDraft]:
    """The given rows of each column. `drafts` are the columns of all rows."""
    if dispatch.runs_triton(new_seq_lens):
        from spec_v2.kernels.future_rows.triton_kernel import gather_rows_triton

        return gather_rows_triton(rows, new_seq_lens, bonus_tokens, drafts)
    return gather_rows_reference(rows, new_seq_lens, bonus_tokens, drafts)


def stash_rows(
    rows: Int[Tensor, " b"],
    *,
    predict: Int[Tensor, "b w"],
    accept_lens: Int[Tensor, " b"],
    new_seq_lens: Int[Tensor, " b"],
    next_draft: NextDraft,
    bonus_tokens: Int[Tensor, " rows"],
    drafts: NextDraft,
    history: Int[Tensor, "rows width"],
) -> None:
    """Write a step's outcome into the columns `bonus_tokens`, `drafts` and `history` (width 0: there is none).

    The emitted tokens go to positions `new_seq_lens - accept_lens + 1 ..` of the history, with the -1 behind them, which
    the next step overwrites; a position beyond the row is its last one. Rows differ, but for the padding row 0.
    """
    args = (rows, predict, accept_lens, new_seq_lens, next_draft, bonus_tokens, drafts, history)
    if dispatch.runs_triton(bonus_tokens):
        from spec_v2.kernels.future_rows.triton_kernel import stash_rows_triton

        return stash_rows_triton(*args)
    return stash_rows_reference(*args)
