"""One program per request, buffer and stretch of a slot: it reads the whole path before it writes any of it."""

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.dispatch import ceil_div, debug_kernels, next_power_of_2
from spec_v2.kernels.move_kv.reference import SlotBuffers

MOST_BUFFERS = 65_535  # the second axis of a CUDA grid


@triton.jit
@no_type_check
def _move_accepted_kv(
    addresses_ptr,  # [buffers]
    slots_ptr,  # [b, n], any strides
    accept_index_ptr,  # [b, w], any strides
    slots_stride_b,
    slots_stride_n,
    index_stride_b,
    index_stride_w,
    slot_words,
    num_slots,
    N: tl.constexpr,
    W: tl.constexpr,
    PATH: tl.constexpr,  # W, padded to a power of two
    TILE: tl.constexpr,
    WORD: tl.constexpr,
    CHECK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, PATH)
    node = tl.load(accept_index_ptr + i * index_stride_b + j * index_stride_w, mask=j < W, other=-1)
    if CHECK:
        tl.device_assert(node < N, "accept_index: not a node of the tree")
    moves = (node >= 0) & (node != j)
    source = tl.load(slots_ptr + i * slots_stride_b + node * slots_stride_n, mask=moves, other=0).to(tl.int64)
    target = tl.load(slots_ptr + i * slots_stride_b + j * slots_stride_n, mask=moves, other=0).to(tl.int64)
    if CHECK:
        tl.device_assert((source >= 0) & (source < num_slots), "slots: source outside of the pool")
        tl.device_assert((target >= 0) & (target < num_slots), "slots: target outside of the pool")

    buffer = tl.load(addresses_ptr + tl.program_id(1)).to(tl.pointer_type(WORD))
    word = tl.program_id(2).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = moves[:, None] & (word < slot_words)[None, :]
    kept = tl.load(buffer + source[:, None] * slot_words + word[None, :], mask=mask)
    tl.debug_barrier()  # another thread of this program may still have to read what this one overwrites
    tl.store(buffer + target[:, None] * slot_words + word[None, :], kept, mask=mask)


def move_accepted_kv_triton(buffers: SlotBuffers, slots: Tensor, accept_index: Tensor) -> None:
    """Any strides, slot ids of any integer type. One launch for each size of slot that the pool has."""
    b, w = accept_index.shape
    if b == 0:
        return
    path = next_power_of_2(w)
    for group in buffers.groups:
        if len(group.addresses) > MOST_BUFFERS:
            raise ValueError(f"buffers={len(group.addresses)}: one launch moves at most {MOST_BUFFERS}")
        word = next(
            t
            for t in (tl.int64, tl.int32, tl.int16, tl.int8)
            if group.slot_bytes * 8 % t.primitive_bitwidth == 0
        )
        slot_words = group.slot_bytes * 8 // word.primitive_bitwidth
        tile = max(32, min(next_power_of_2(slot_words), 2048 // path))
        _move_accepted_kv[(b, len(group.addresses), ceil_div(slot_words, tile))](
            group.addresses, slots, accept_index, *slots.stride(), *accept_index.stride(),
            slot_words, len(buffers.tensors[0]),
            N=slots.shape[1], W=w, PATH=path, TILE=tile, WORD=word, CHECK=debug_kernels(), debug=debug_kernels(),
        )  # fmt: skip
