"""Two scatters by torch_npu's operator, with 32-bit slot ids."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def write_kv_npu(
    key_buffer: Float[Tensor, "slots heads key_dim"],
    value_buffer: Float[Tensor, "slots heads value_dim"],
    slots: Int[Tensor, " t"],
    key: Float[Tensor, "t heads key_dim"],
    value: Float[Tensor, "t heads value_dim"],
) -> None:
    """Of equal slots (padding) any token stays."""
    index = slots.int()[:, None]
    torch.ops.npu.npu_scatter_nd_update_(key_buffer, index, key)
    torch.ops.npu.npu_scatter_nd_update_(value_buffer, index, value)
