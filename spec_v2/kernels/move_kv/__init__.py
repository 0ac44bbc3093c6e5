"""Move the KV of an accepted path to the front of its window: all layers, keys and values, in one launch.

The pool's tensors differ per layer, so the kernel gets a table of their addresses. Bytes moved: reads and writes the
KV of the accepted nodes that do not lie in their place already; nothing for the others.
"""

from jaxtyping import Int
from torch import Tensor

from spec_v2.kernels import dispatch
from spec_v2.kernels.move_kv.reference import SlotBuffers, move_accepted_kv_reference

__all__ = ["SlotBuffers", "move_accepted_kv"]


def move_accepted_kv(
    buffers: SlotBuffers, slots: Int[Tensor, "b n"], accept_index: Int[Tensor, "b w"]
) -> None:
    """Copy what slot `slots[i, accept_index[i, j]]` holds to slot `slots[i, j]`, in every buffer.

    Past the path `accept_index` is -1 and nothing moves. Sources and targets may overlap: everything is read before
    anything is written. Requests do not share slots.
    """
    if accept_index.shape[1] == 1 or not buffers.tensors:
        return  # a root is where it belongs
    if dispatch.runs_triton(slots):
        from spec_v2.kernels.move_kv.triton_kernel import move_accepted_kv_triton

        return move_accepted_kv_triton(buffers, slots, accept_index)
    return move_accepted_kv_reference(buffers, slots, accept_index)
