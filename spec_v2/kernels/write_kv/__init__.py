"""Store the keys and values of one layer's new tokens in their slots: one launch.

Bytes moved: reads and writes the KV of `t` tokens once, `4` or `8 * t` bytes of slot ids beside it.
"""

from jaxtyping import Float, Int
from torch import Tensor

from spec_v2.kernels import dispatch
from spec_v2.kernels.write_kv.reference import write_kv_reference

__all__ = ["write_kv"]


def write_kv(
    key_buffer: Float[Tensor, "slots heads key_dim"],
    value_buffer: Float[Tensor, "slots heads value_dim"],
    slots: Int[Tensor, " t"],
    key: Float[Tensor, "t heads key_dim"],
    value: Float[Tensor, "t heads value_dim"],
) -> None:
    """Write token `i` to slot `slots[i]` of both buffers.

    Slots differ, but for the padding slot 0, which then holds any of its tokens.
    """
    if dispatch.runs_triton(key):
        from spec_v2.kernels.write_kv.triton_kernel import write_kv_triton

        return write_kv_triton(key_buffer, value_buffer, slots, key, value)
    if dispatch.runs_npu_operator(key, "npu_scatter_nd_update_"):
        from spec_v2.kernels.write_kv.npu import write_kv_npu

        return write_kv_npu(key_buffer, value_buffer, slots, key, value)
    return write_kv_reference(key_buffer, value_buffer, slots, key, value)
