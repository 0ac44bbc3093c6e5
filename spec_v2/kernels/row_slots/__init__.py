"""The row table, `row_slots[row, p]`: which slot holds position `p` of the request that owns the row.

Each function is one launch over a few integers: its time is the launch, not the bytes (8 to 24 per element).
"""

from jaxtyping import Int
from torch import Tensor

from spec_v2.kernels import dispatch
from spec_v2.kernels.row_slots.reference import (
    ExtendInputs,
    extend_inputs_reference,
    place_window_reference,
    slots_at_reference,
    write_slots_reference,
)

__all__ = ["ExtendInputs", "extend_inputs", "place_window", "slots_at", "write_slots"]


def write_slots(
    row_slots: Int[Tensor, "rows width"],
    rows: Int[Tensor, " t"],
    positions: Int[Tensor, " t"],
    slots: Int[Tensor, " t"],
) -> None:
    """Set `row_slots[rows[i], positions[i]] = slots[i]`. No place occurs twice."""
    if dispatch.runs_triton(row_slots):
        from spec_v2.kernels.row_slots.triton_kernel import write_slots_triton

        return write_slots_triton(row_slots, rows, positions, slots)
    return write_slots_reference(row_slots, rows, positions, slots)


def slots_at(
    row_slots: Int[Tensor, "rows width"], rows: Int[Tensor, " b"], positions: Int[Tensor, "b q"]
) -> Int[Tensor, "b q"]:
    """Slots of the given positions, int64. Positions beyond the row's width give its last entry."""
    if dispatch.runs_triton(row_slots):
        from spec_v2.kernels.row_slots.triton_kernel import slots_at_triton

        return slots_at_triton(row_slots, rows, positions)
    return slots_at_reference(row_slots, rows, positions)


def place_window(
    row_slots: Int[Tensor, "rows width"],
    rows: Int[Tensor, " b"],
    starts: Int[Tensor, " b"],
    length: int,
    per_position: int = 1,
) -> tuple[Int[Tensor, "b win"], Int[Tensor, "b win"]]:
    """(positions, slots) of a window behind `starts`, `per_position` tokens to a position (a level of a tree).

    Token `j` is at position `start + j // per_position` and in slot `row_slots[row, start + j]`.
    """
    if dispatch.runs_triton(row_slots):
        from spec_v2.kernels.row_slots.triton_kernel import place_window_triton

        return place_window_triton(row_slots, rows, starts, length, per_position)
    return place_window_reference(row_slots, rows, starts, length, per_position)


def extend_inputs(
    row_slots: Int[Tensor, "rows width"],
    rows: Int[Tensor, " b"],
    starts: Int[Tensor, " b"],
    predict: Int[Tensor, "b w"],
    accept_lens: Int[Tensor, " b"],
) -> ExtendInputs:
    """What a draft model runs to read a verdict: all `w` tokens of each request, whatever was accepted."""
    if dispatch.runs_triton(row_slots):
        from spec_v2.kernels.row_slots.triton_kernel import extend_inputs_triton

        return extend_inputs_triton(row_slots, rows, starts, predict, accept_lens)
    return extend_inputs_reference(row_slots, rows, starts, predict, accept_lens)
