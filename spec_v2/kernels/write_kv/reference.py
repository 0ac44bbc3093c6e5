"""Two scatters along the slots."""

from jaxtyping import Float, Int
from torch import Tensor


def write_kv_reference(
    key_buffer: Float[Tensor, "slots heads key_dim"],
    value_buffer: Float[Tensor, "slots heads value_dim"],
    slots: Int[Tensor, " t"],
    key: Float[Tensor, "t heads key_dim"],
    value: Float[Tensor, "t heads value_dim"],
) -> None:
    """Of equal slots the last token stays."""
    index = slots.long()  # index_copy_ takes no other type
    key_buffer.index_copy_(0, index, key)
    value_buffer.index_copy_(0, index, value)
