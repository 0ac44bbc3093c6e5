"""All that happens to an attention layer's projections before the attention: norms of the heads, rotary positions, KV write.

One launch in the place of twelve or more. Rotary positions turn dimension `j` and `j + rotary_dim / 2` of a head against each
other (Su et al. 2021, arXiv 2104.09864, in the layout of GPT-NeoX); dimensions from `rotary_dim` on pass unchanged.
Rounded where transformers rounds: each product, then their sum.

Bytes moved: queries, keys and values once in and once out,
`2 * t * (heads * dim + kv_heads * (dim + value_dim))` numbers, plus `2 * t * rotary_dim` of `cos` and `sin`. The inputs
are parts of one product's output; they are read where they lie, and keys and values go straight to their slots.
"""

from jaxtyping import Float, Int
from torch import Tensor

from spec_v2.kernels import floats
from spec_v2.kernels.rotary_kv_write.reference import HeadNorms, rotary_kv_write_reference

__all__ = ["HeadNorms", "rotary_kv_write"]


def rotary_kv_write(
    query: Float[Tensor, "t heads dim"],
    key: Float[Tensor, "t kv_heads dim"],
    value: Float[Tensor, "t kv_heads value_dim"],
    angles: tuple[Float[Tensor, "t rotary_dim"], Float[Tensor, "t rotary_dim"]] | None,
    slots: Int[Tensor, " t"],
    keys: Float[Tensor, "num_slots kv_heads dim"],
    values: Float[Tensor, "num_slots kv_heads value_dim"],
    norms: HeadNorms | None = None,
) -> Float[Tensor, "t heads dim"]:
    """Rotated queries, contiguous; token `i`'s rotated key and its value are in slot `slots[i]` of `keys` and `values`.

    `angles`: `(cos, sin)`; None leaves positions out. `norms`: the RMS norm that each head of queries and keys goes
    through first. Slots differ, but for the padding slot 0, which then holds any of its tokens. Raises ValueError for
    dtypes or widths that don't fit.
    """
    _check(query, key, value, angles, keys, values)
    if floats.runs_triton(query):
        from spec_v2.kernels.rotary_kv_write.triton_kernel import rotary_kv_write_triton

        return rotary_kv_write_triton(query, key, value, angles, slots, keys, values, norms)
    return rotary_kv_write_reference(query, key, value, angles, slots, keys, values, norms)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
) -> None:
    dtypes = [x.dtype for x in (query, key, value, keys, values, *(angles or ()))]
    if len(set(dtypes)) > 1:
        raise ValueError(f"query, key, value, keys, values, cos, sin are {dtypes}: convert them to one dtype")
    if angles is not None:
        width = angles[0].shape[1]
        if width % 2 or width > query.shape[2]:
            raise ValueError(f"rotary_dim={width}: give an even width of at most dim={query.shape[2]}")
