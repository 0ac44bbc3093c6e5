"""One program per request, or per 256 entries that are written."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.dispatch import ceil_div, debug_kernels, next_power_of_2
from spec_v2.kernels.row_slots.reference import ExtendInputs

WRITES = 256


@triton.jit
@no_type_check
def _write_slots(
    row_slots_ptr,  # [rows, width], out
    rows_ptr,  # [t]
    positions_ptr,  # [t]
    slots_ptr,  # [t]
    stride_row,
    num_rows,
    width,
    T,
    TILE: tl.constexpr,
    CHECK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    row = tl.load(rows_ptr + t, mask=t < T, other=0).to(tl.int64)
    position = tl.load(positions_ptr + t, mask=t < T, other=0)
    slot = tl.load(slots_ptr + t, mask=t < T, other=0)
    if CHECK:
        tl.device_assert((row >= 0) & (row < num_rows), "rows: not a row of the table")
        tl.device_assert((position >= 0) & (position < width), "positions: outside of the row")
        tl.device_assert((slot >= 0) & (slot < 2147483648), "slots: outside of what the table can hold")
    tl.store(row_slots_ptr + row * stride_row + position, slot, mask=t < T)


@triton.jit
@no_type_check
def _place_window(
    row_slots_ptr,  # [rows, width]
    rows_ptr,  # [b]
    starts_ptr,  # [b], unless GIVEN
    given_ptr,  # [b, win], read with GIVEN: positions, any strides
    predict_ptr,  # [b, win], read with EXTEND
    accept_lens_ptr,  # [b], read with EXTEND
    positions_ptr,  # [b, win], out unless GIVEN
    slots_ptr,  # [b, win], out
    input_ids_ptr,  # [b, win], out with EXTEND
    newest_ptr,  # [b], out with EXTEND
    stride_row,
    given_stride_b,
    given_stride_q,
    num_rows,
    width,
    PER_POSITION: tl.constexpr,
    LENGTH: tl.constexpr,
    WINDOW: tl.constexpr,  # LENGTH, padded to a power of two
    GIVEN: tl.constexpr,
    EXTEND: tl.constexpr,
    CHECK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, WINDOW)
    in_window = j < LENGTH
    row = tl.load(rows_ptr + i).to(tl.int64)
    if GIVEN:
        place = tl.load(given_ptr + i * given_stride_b + j * given_stride_q, mask=in_window, other=0)
    else:
        start = tl.load(starts_ptr + i)
        place = start + j
        tl.store(positions_ptr + i * LENGTH + j, start + j // PER_POSITION, mask=in_window)
    if CHECK:
        tl.device_assert((row >= 0) & (row < num_rows), "rows: not a row of the table")
        tl.device_assert(place >= 0, "positions: negative")
    slot = tl.load(row_slots_ptr + row * stride_row + tl.minimum(place, width - 1), mask=in_window, other=0)
    tl.store(slots_ptr + i * LENGTH + j, slot.to(tl.int64), mask=in_window)
    if EXTEND:
        token = tl.load(predict_ptr + i * LENGTH + j, mask=in_window, other=0)
        tl.store(input_ids_ptr + i * LENGTH + j, tl.maximum(token, 0), mask=in_window)
        tl.store(newest_ptr + i, i * LENGTH + tl.load(accept_lens_ptr + i) - 1)


def write_slots_triton(row_slots: Tensor, rows: Tensor, positions: Tensor, slots: Tensor) -> None:
    """Each row of the table must lie together."""
    assert row_slots.stride(1) == 1, "a row of the table lies together"
    t = len(rows)
    if t == 0:
        return
    _write_slots[(ceil_div(t, WRITES),)](
        row_slots, rows.contiguous(), positions.contiguous(), slots.contiguous(),
        row_slots.stride(0), *row_slots.shape, t, TILE=WRITES, CHECK=debug_kernels(), debug=debug_kernels(),
    )  # fmt: skip


def slots_at_triton(row_slots: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """Any strides of the positions."""
    slots = torch.empty(positions.shape, dtype=torch.long, device=positions.device)
    _launch(row_slots, rows, positions.shape[1], given=positions, slots=slots)
    return slots


def place_window_triton(
    row_slots: Tensor, rows: Tensor, starts: Tensor, length: int, per_position: int = 1
) -> tuple[Tensor, Tensor]:
    """One launch for the positions and the slots."""
    positions, slots = torch.empty(2, len(rows), length, dtype=torch.long, device=starts.device)
    _launch(
        row_slots, rows, length, starts=starts, positions=positions, slots=slots, per_position=per_position
    )
    return positions, slots


def extend_inputs_triton(
    row_slots: Tensor, rows: Tensor, starts: Tensor, predict: Tensor, accept_lens: Tensor
) -> ExtendInputs:
    """The same launch, and the tokens."""
    b, w = predict.shape
    input_ids, positions, slots = torch.empty(3, b, w, dtype=torch.long, device=predict.device)
    newest = torch.empty(b, dtype=torch.long, device=predict.device)
    extend = (predict.contiguous(), accept_lens.contiguous(), input_ids, newest)
    _launch(row_slots, rows, w, starts=starts, positions=positions, slots=slots, extend=extend)
    return ExtendInputs(input_ids, positions, slots, newest)


def _launch(
    row_slots: Tensor,
    rows: Tensor,
    length: int,
    *,
    slots: Tensor,
    starts: Tensor | None = None,
    given: Tensor | None = None,
    positions: Tensor | None = None,
    per_position: int = 1,
    extend: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> None:
    assert row_slots.stride(1) == 1, "a row of the table lies together"
    if slots.numel() == 0:
        return
    nothing = slots  # a pointer that the kernel does not use
    predict, accept_lens, input_ids, newest = extend or (nothing, nothing, nothing, nothing)
    _place_window[(len(rows),)](
        row_slots, rows.contiguous(), nothing if starts is None else starts.contiguous(),
        nothing if given is None else given, predict, accept_lens,
        nothing if positions is None else positions, slots, input_ids, newest,
        row_slots.stride(0), *(slots if given is None else given).stride(), *row_slots.shape,
        PER_POSITION=per_position, LENGTH=length, WINDOW=next_power_of_2(length),
        GIVEN=given is not None, EXTEND=extend is not None, CHECK=debug_kernels(), debug=debug_kernels(),
    )  # fmt: skip
