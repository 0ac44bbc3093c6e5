"""Gather, then scatter, one buffer after the other."""

from dataclasses import dataclass

import torch
from jaxtyping import Int, Int64
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AddressGroup:
    """Buffers whose slots have the same size: their addresses on the device, and the size in bytes."""

    addresses: Int64[Tensor, " buffers"]
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class SlotBuffers:
    """All tensors of a KV pool, `[num_slots, ...]` each. Addresses stay valid because the tensors are kept."""

    tensors: tuple[Tensor, ...]
    groups: tuple[AddressGroup, ...]

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...]) -> "SlotBuffers":
        """Raises ValueError where a tensor is not contiguous or they disagree on the number of slots."""
        if any(not t.is_contiguous() for t in tensors) or len({len(t) for t in tensors}) > 1:
            raise ValueError("a pool's tensors must be contiguous and have the same number of slots")
        sizes: dict[int, list[int]] = {}
        for t in tensors:
            sizes.setdefault(t[:1].numel() * t.element_size(), []).append(t.data_ptr())
        device = tensors[0].device if tensors else torch.device("cpu")
        return cls(
            tensors,
            tuple(AddressGroup(torch.tensor(a, device=device), size) for size, a in sizes.items() if size),
        )


def move_accepted_kv_reference(
    buffers: SlotBuffers, slots: Int[Tensor, "b n"], accept_index: Int[Tensor, "b w"]
) -> None:
    """Past the path, slot 0 (padding) moves to itself."""
    accepted = accept_index >= 0
    source = torch.where(accepted, slots.gather(1, accept_index.clamp(min=0)), 0).flatten().long()
    target = torch.where(accepted, slots[:, : accept_index.shape[1]], 0).flatten().long()
    for buffer in buffers.tensors:
        buffer.index_copy_(0, target, buffer.index_select(0, source))
