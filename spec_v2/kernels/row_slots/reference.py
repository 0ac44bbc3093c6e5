"""Indexing, with positions clamped to the row."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExtendInputs:
    """`newest`: of the flattened tokens, the last accepted one of each request. Past `accept_lens` tokens are 0."""

    input_ids: Int[Tensor, "b w"]
    positions: Int[Tensor, "b w"]
    slots: Int[Tensor, "b w"]
    newest: Int[Tensor, " b"]


def write_slots_reference(
    row_slots: Int[Tensor, "rows width"],
    rows: Int[Tensor, " t"],
    positions: Int[Tensor, " t"],
    slots: Int[Tensor, " t"],
) -> None:
    """Slot ids of any integer type."""
    row_slots.index_put_((rows, positions), slots.to(row_slots.dtype))


def slots_at_reference(
    row_slots: Int[Tensor, "rows width"], rows: Int[Tensor, " b"], positions: Int[Tensor, "b q"]
) -> Int[Tensor, "b q"]:
    """Positions are not negative."""
    return row_slots[rows[:, None], positions.clamp(max=row_slots.shape[1] - 1)].long()


def place_window_reference(
    row_slots: Int[Tensor, "rows width"],
    rows: Int[Tensor, " b"],
    starts: Int[Tensor, " b"],
    length: int,
    per_position: int = 1,
) -> tuple[Int[Tensor, "b win"], Int[Tensor, "b win"]]:
    """Row positions are consecutive whatever the positions are."""
    window = torch.arange(length, device=starts.device)
    positions = starts[:, None] + torch.div(window, per_position, rounding_mode="floor")
    return positions, slots_at_reference(row_slots, rows, starts[:, None] + window)


def extend_inputs_reference(
    row_slots: Int[Tensor, "rows width"],
    rows: Int[Tensor, " b"],
    starts: Int[Tensor, " b"],
    predict: Int[Tensor, "b w"],
    accept_lens: Int[Tensor, " b"],
) -> ExtendInputs:
    """The tokens are -1 past `accept_lens`: any id will do there, as nothing before them sees them."""
    b, w = predict.shape
    positions, slots = place_window_reference(row_slots, rows, starts, w)
    newest = torch.arange(b, device=predict.device) * w + accept_lens - 1
    return ExtendInputs(predict.clamp(min=0), positions, slots, newest)
