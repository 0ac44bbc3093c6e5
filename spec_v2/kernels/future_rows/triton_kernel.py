"""A program copies a stretch of one request's wide columns; the first one of each request does the narrow ones too."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.dispatch import ceil_div, debug_kernels, next_power_of_2
from spec_v2.types import NextDraft

TILE = 1024


@triton.jit
@no_type_check
def _publish_rows(
    rows_ptr,  # [b]
    seq_lens_ptr,  # [b]
    new_seq_lens_ptr,  # [rows], out
    num_rows,
    B,
    TILE: tl.constexpr,
    CHECK: tl.constexpr,
):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.load(rows_ptr + i, mask=i < B, other=0)
    if CHECK:
        tl.device_assert((row >= 0) & (row < num_rows), "rows: not a row of the table")
    length = tl.load(seq_lens_ptr + i, mask=i < B, other=0)
    tl.store(new_seq_lens_ptr + row, tl.where(row > 0, length, 0), mask=i < B)


@triton.jit
@no_type_check
def _copy_row(source_ptr, target_ptr, source_row, target_row, source_stride, target_stride, column, width):
    """Columns `column` of one row; both tables have unit strides along a row."""
    x = tl.load(source_ptr + source_row * source_stride + column, mask=column < width)
    tl.store(target_ptr + target_row * target_stride + column, x, mask=column < width)


@triton.jit
@no_type_check
def _move_rows(
    rows_ptr,  # [b]
    topk_p_ptr,  # the tables: [rows, ...], each with a stride between rows
    topk_index_ptr,
    hidden_ptr,
    probs_ptr,
    batch_topk_p_ptr,  # the batch: [b, ...], likewise
    batch_topk_index_ptr,
    batch_hidden_ptr,
    batch_probs_ptr,
    lens_ptr,  # [rows], read with GATHER; with STASH [b]: new_seq_lens
    bonus_ptr,  # [rows]
    batch_lens_ptr,  # [b], out with GATHER; read with STASH: accept_lens
    batch_bonus_ptr,  # [b], out with GATHER
    predict_ptr,  # [b, w], read with STASH
    history_ptr,  # [rows, width], out with STASH
    topk_p_stride,
    topk_index_stride,
    hidden_stride,
    probs_stride,
    batch_topk_p_stride,
    batch_topk_index_stride,
    batch_hidden_stride,
    batch_probs_stride,
    predict_stride,
    history_stride,
    num_rows,
    hidden_width,
    probs_width,
    history_width,
    K: tl.constexpr,
    TOPK: tl.constexpr,  # K, padded to a power of two
    W: tl.constexpr,
    PATH: tl.constexpr,  # W, padded to a power of two
    TILE: tl.constexpr,
    GATHER: tl.constexpr,
    HISTORY: tl.constexpr,
    CHECK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i).to(tl.int64)
    if CHECK:
        tl.device_assert((row >= 0) & (row < num_rows), "rows: not a row of the table")
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    if GATHER:
        _copy_row(
            hidden_ptr, batch_hidden_ptr, row, i, hidden_stride, batch_hidden_stride, column, hidden_width
        )
        _copy_row(probs_ptr, batch_probs_ptr, row, i, probs_stride, batch_probs_stride, column, probs_width)
    else:
        _copy_row(
            batch_hidden_ptr, hidden_ptr, i, row, batch_hidden_stride, hidden_stride, column, hidden_width
        )
        _copy_row(batch_probs_ptr, probs_ptr, i, row, batch_probs_stride, probs_stride, column, probs_width)

    if tl.program_id(1) == 0:
        k = tl.arange(0, TOPK)
        if GATHER:
            _copy_row(topk_p_ptr, batch_topk_p_ptr, row, i, topk_p_stride, batch_topk_p_stride, k, K)
            _copy_row(
                topk_index_ptr, batch_topk_index_ptr, row, i, topk_index_stride, batch_topk_index_stride, k, K
            )
            tl.store(batch_lens_ptr + i, tl.load(lens_ptr + row))
            tl.store(batch_bonus_ptr + i, tl.load(bonus_ptr + row))
        else:
            _copy_row(batch_topk_p_ptr, topk_p_ptr, i, row, batch_topk_p_stride, topk_p_stride, k, K)
            _copy_row(
                batch_topk_index_ptr, topk_index_ptr, i, row, batch_topk_index_stride, topk_index_stride, k, K
            )
            accept_len = tl.load(batch_lens_ptr + i)
            newest = tl.maximum(accept_len - 1, 0)
            tl.store(bonus_ptr + row, tl.load(predict_ptr + i * predict_stride + newest))
            if HISTORY:
                w = tl.arange(0, PATH)
                token = tl.load(predict_ptr + i * predict_stride + w, mask=w < W, other=-1)
                position = tl.load(lens_ptr + i) - accept_len + 1 + w
                # of the tokens beyond the row the last one stays, as if they were written one after the other
                last = history_width - 1
                writes = (w < W) & ((position < last) | (w == W - 1))
                place = tl.minimum(position, last)
                tl.store(history_ptr + row * history_stride + place, token, mask=writes)


def publish_rows_triton(rows: Tensor, seq_lens: Tensor, new_seq_lens: Tensor) -> None:
    """Row numbers of any integer type."""
    b, tile = len(rows), 128
    if b:
        _publish_rows[(ceil_div(b, tile),)](
            rows.contiguous(), seq_lens.contiguous(), new_seq_lens, len(new_seq_lens), b,
            TILE=tile, CHECK=debug_kernels(), debug=debug_kernels(),
        )  # fmt: skip


def gather_rows_triton(
    rows: Tensor, new_seq_lens: Tensor, bonus_tokens: Tensor, drafts: NextDraft
) -> tuple[Tensor, Tensor, NextDraft]:
    """Tables with unit strides along their rows."""
    b, device = len(rows), rows.device
    lens, bonus = torch.empty(2, b, dtype=torch.long, device=device)

    def empty(table: Tensor) -> Tensor:
        return torch.empty(b, table.shape[1], dtype=table.dtype, device=device)

    batch = NextDraft(
        topk_p=empty(drafts.topk_p),
        topk_index=empty(drafts.topk_index),
        hidden_states=empty(drafts.hidden_states),
        draft_probs=empty(drafts.draft_probs),
    )
    _launch(rows, drafts, batch, (new_seq_lens, bonus_tokens, lens, bonus), gather=True)
    return lens, bonus, batch


def stash_rows_triton(
    rows: Tensor,
    predict: Tensor,
    accept_lens: Tensor,
    new_seq_lens: Tensor,
    next_draft: NextDraft,
    bonus_tokens: Tensor,
    drafts: NextDraft,
    history: Tensor,
) -> None:
    """Tables with unit strides along their rows; the batch's tensors are made so."""
    batch = NextDraft(
        topk_p=_rows_together(next_draft.topk_p),
        topk_index=_rows_together(next_draft.topk_index),
        hidden_states=_rows_together(next_draft.hidden_states),
        draft_probs=_rows_together(next_draft.draft_probs),
    )
    narrow = (new_seq_lens.contiguous(), bonus_tokens, accept_lens.contiguous(), bonus_tokens)
    _launch(rows, drafts, batch, narrow, gather=False, predict=_rows_together(predict), history=history)


def _rows_together(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _launch(
    rows: Tensor,
    drafts: NextDraft,
    batch: NextDraft,
    narrow: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    gather: bool,
    predict: Tensor | None = None,
    history: Tensor | None = None,
) -> None:
    tables = (drafts.topk_p, drafts.topk_index, drafts.hidden_states, drafts.draft_probs)
    of_batch = (batch.topk_p, batch.topk_index, batch.hidden_states, batch.draft_probs)
    assert all(t.stride(1) == 1 or t.shape[1] <= 1 for t in tables), "a row of a table lies together"
    predict = rows[:, None] if predict is None else predict  # pointers that the kernel does not use
    history = predict if history is None else history
    k, hidden_width, probs_width = (t.shape[1] for t in tables[1:])
    w = predict.shape[1]
    if len(rows) == 0:
        return
    _move_rows[(len(rows), max(1, ceil_div(max(hidden_width, probs_width), TILE)))](
        rows.contiguous(), *tables, *of_batch, *narrow, predict, history,
        *(t.stride(0) for t in (*tables, *of_batch, predict, history)),
        len(tables[0]), hidden_width, probs_width, history.shape[1],
        K=k, TOPK=next_power_of_2(k), W=w, PATH=next_power_of_2(w), TILE=TILE,
        GATHER=gather, HISTORY=not gather and history.shape[1] > 0, CHECK=debug_kernels(), debug=debug_kernels(),
    )  # fmt: skip
