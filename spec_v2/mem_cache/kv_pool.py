"""The tensors behind the slots: KV of every layer, and the table that says which slots a request has.

Target and draft pools share slot numbers: slot `s` means the same request and place in both.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from spec_v2.kernels.move_kv import SlotBuffers, move_accepted_kv
from spec_v2.kernels.paged_attention.host_lens import HostLens
from spec_v2.kernels.row_slots import slots_at, write_slots
from spec_v2.kernels.write_kv import write_kv


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """What one attention layer keeps per token: KV heads and the widths of a key and a value."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


class KvPool:
    """Keys and values of each layer, `[num_slots, num_kv_heads, dim]`. Slot 0 is padding and stays finite.

    `paged_attention`: whether forwards read it in place, through the row table (True), or gather what they read
    (False). None leaves that to them. `host_lens`: where an operator that reads it in place finds lengths on the host.
    """

    def __init__(
        self, geometry: tuple[LayerGeometry, ...], num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.geometry = geometry
        self.num_slots = num_slots
        self.debug = False  # check slot numbers where they are used, which waits for the device
        self.paged_attention: bool | None = None
        self.host_lens: HostLens | None = None
        self._has_int32_slots = device.type == "npu"  # 64-bit indices go to a slower processor there
        self.keys = [zeros((num_slots, g.num_kv_heads, g.key_dim), dtype, device) for g in geometry]
        self.values = [zeros((num_slots, g.num_kv_heads, g.value_dim), dtype, device) for g in geometry]
        self._buffers = SlotBuffers.of((*self.keys, *self.values))

    def slot_ids(self, slots: Int[Tensor, " t"]) -> Int[Tensor, " t"]:
        """Slots in the width in which this device writes by them."""
        return slots.int() if self._has_int32_slots else slots

    def write(
        self,
        layer: int,
        slots: Int[Tensor, " t"],
        key: Float[Tensor, "t heads key_dim"],
        value: Float[Tensor, "t heads value_dim"],
    ) -> None:
        """Store the KV of `t` tokens of one layer. With `debug`, raises IndexError for a slot that is not there."""
        self.check(slots)
        write_kv(self.keys[layer], self.values[layer], slots, key, value)

    def check(self, slots: Int[Tensor, " t"]) -> None:
        """With `debug`, raises IndexError for a slot that is not there; for whoever writes into the buffers."""
        if self.debug and bool(((slots < 0) | (slots >= self.num_slots)).any()):
            raise IndexError(f"slots {slots.tolist()}: the pool has slots 0 to {self.num_slots - 1}")

    def move(self, source: Int[Tensor, " t"], target: Int[Tensor, " t"]) -> None:
        """Copy slots to slots in all layers. Ranges may overlap: everything is gathered, then scattered."""
        for buffer in (*self.keys, *self.values):
            buffer.index_copy_(0, target, buffer.index_select(0, source))

    def move_accepted(self, slots: Int[Tensor, "b n"], accept_index: Int[Tensor, "b w"]) -> None:
        """Move accepted node `accept_index[i, j]` of each window to its `j`-th slot, in all layers; -1 moves nothing."""
        move_accepted_kv(self._buffers, slots, accept_index)

    def fill_unused(self, value: float, page_size: int) -> None:
        """Fill everything but page 0: with NaN, whatever is read without having been written shows."""
        for buffer in (*self.keys, *self.values):
            buffer[page_size:].fill_(value)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take no time and no memory on a CPU before they are used: numpy has the system's zero pages,
    torch.zeros writes every byte, which is seconds for the default pool."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def bytes_per_slot(geometry: tuple[LayerGeometry, ...], dtype: torch.dtype) -> int:
    """KV bytes of one token over all layers."""
    return sum(g.num_kv_heads * (g.key_dim + g.value_dim) for g in geometry) * dtype.itemsize


class RowTable:
    """`slots[row, p]`: the slot of position `p` of the request that owns `row`. Row 0 is padding: all zeros.

    Written only on the forward stream (`on_stream` says whether the caller is there), so that a write is
    ordered behind every step that still reads the row.
    """

    def __init__(
        self, num_rows: int, width: int, device: torch.device, on_stream: Callable[[], bool] | None = None
    ) -> None:
        self.slots = torch.zeros(num_rows, width, dtype=torch.int32, device=device)
        self.on_stream = on_stream

    @property
    def width(self) -> int:
        return self.slots.shape[1]

    def write(self, rows: Int[Tensor, " t"], positions: Int[Tensor, " t"], slots: Int[Tensor, " t"]) -> None:
        """Set `slots[rows, positions]`; host tensors are taken too. Raises RuntimeError off the stream."""
        if self.on_stream is not None and not self.on_stream():
            raise RuntimeError("row table written off the forward stream: launch the write instead")
        device = self.slots.device
        write_slots(self.slots, *(x.to(device, non_blocking=True) for x in (rows, positions, slots)))

    def at(self, rows: Int[Tensor, " b"], positions: Int[Tensor, "b q"]) -> Int[Tensor, "b q"]:
        """Slots of the given positions. Positions beyond the row's width give its last entry."""
        return slots_at(self.slots, rows, positions)

    def prefix(self, rows: Int[Tensor, " b"], length: int) -> Int[Tensor, "b m"]:
        """Slots of positions 0..length-1 (`length` is a host bound; what lies beyond a prefix is masked)."""
        return self.slots[rows, : min(length, self.width)].long()
