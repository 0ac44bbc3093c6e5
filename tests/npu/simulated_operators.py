"""The two operators of torch_npu that spec_v2 calls, simulated: computed by torch on the CPU.

They take what torch_npu's documentation says that the real ones take, and refuse the rest, so that a call which
hardware would refuse fails here too. One liberty: float64, in which tests compare tokens exactly.
"""

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float64)
ATTENTION = (
    "npu_fused_infer_attention_score(Tensor query, Tensor key, Tensor value, *, Tensor? atten_mask=None, "
    "SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, Tensor? block_table=None, "
    'int num_heads=1, float scale=1.0, str input_layout="BSH", int num_key_value_heads=0, int sparse_mode=0, '
    "int block_size=0) -> (Tensor, Tensor)"
)
SCATTER = "npu_scatter_nd_update_(Tensor(a!) input, Tensor indices, Tensor updates) -> Tensor(a!)"


def define_operators() -> torch.library.Library:
    """Define both under `torch.ops.npu`. They exist for as long as what is returned does."""
    library = torch.library.Library("npu", "DEF")
    library.define(ATTENTION)
    library.define(SCATTER)
    library.impl("npu_fused_infer_attention_score", fused_infer_attention_score, "CPU")
    library.impl("npu_scatter_nd_update_", scatter_nd_update_, "CPU")
    return library


def scatter_nd_update_(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """`input[indices[i, 0]] = updates[i]`."""
    demand(indices.dtype == torch.int32, "indices are int32 here: int64 ones go to a slower processor")
    demand(indices.dim() == 2 and indices.shape[1] == 1, "indices are [n, 1]")
    demand(updates.shape == (len(indices), *input.shape[1:]), "one row of updates for each index")
    demand(updates.dtype == input.dtype, "updates have the input's dtype")
    return input.index_copy_(0, indices[:, 0].long(), updates)


def fused_infer_attention_score(
    query, key, value, *, atten_mask=None, actual_seq_lengths=None, actual_seq_lengths_kv=None, block_table=None,
    num_heads=1, scale=1.0, input_layout="BSH", num_key_value_heads=0, sparse_mode=0, block_size=0,
):  # fmt: skip
    """Attention over pages. Keys from `actual_seq_lengths_kv[i]` on are not read, whatever the mask says."""
    demand(input_layout == "BSND" and sparse_mode == 1, "simulated for BSND with a whole mask only")
    demand(actual_seq_lengths is None, "all queries count")
    b, q, heads, dim = query.shape
    check_pages(query, key, value, block_table, block_size, num_heads, num_key_value_heads)
    capacity = block_table.shape[1] * block_size
    lengths = actual_seq_lengths_kv
    demand(lengths is not None and len(lengths) == b, "with pages each request's KV length is given")
    demand(all(0 <= n <= capacity for n in lengths), f"lengths {lengths}: a block table row holds {capacity}")
    demand(atten_mask.dtype in (torch.bool, torch.int8, torch.uint8), "the mask is bool, int8 or uint8")
    demand(atten_mask.shape == (b, 1, q, capacity), f"the mask is [{b}, 1, {q}, {capacity}]")
    demand(all(x.is_contiguous() for x in (query, key, value, atten_mask)), "all are contiguous")

    out = torch.zeros_like(query)
    for i, length in enumerate(lengths):
        slots = (block_table[i].long()[:, None] * block_size + torch.arange(block_size)).flatten()[:length]
        k, v = (
            x.flatten(0, 1)[slots]
            .unflatten(1, (num_key_value_heads, dim))
            .repeat_interleave(heads // num_key_value_heads, 1)
            for x in (key, value)
        )
        logits = torch.einsum("qhd,mhd->hqm", query[i], k) * scale
        logits = logits.masked_fill(atten_mask[i, :, :, :length].bool(), -torch.inf)
        out[i] = torch.einsum("hqm,mhd->qhd", logits.softmax(-1), v)
    return out, query.new_zeros(1)


def check_pages(query, key, value, block_table, block_size, num_heads, num_key_value_heads):
    b, q, heads, dim = query.shape
    demand(query.dtype in DTYPES and query.dtype == key.dtype == value.dtype, f"dtype {query.dtype}")
    demand(heads == num_heads and heads % num_key_value_heads == 0, "heads are a multiple of KV heads")
    demand(heads // num_key_value_heads <= 64, "at most 64 heads to a KV head")
    demand(dim % 16 == 0 and dim <= 512, f"a head of {dim}: a multiple of 16, at most 512")
    demand(key.shape == value.shape, "keys and values have the same shape")
    demand(key.dim() == 3 and key.shape[1] == block_size, "pages are [pages, block_size, KV heads * dim]")
    demand(key.shape[2] == num_key_value_heads * dim <= 65535, "a token's keys: at most 65535 numbers")
    demand(key.numel() < 2**31, "a pool has less than 2**31 numbers")
    unit = 16 if q == 1 else 128
    demand(0 < block_size <= 512 and block_size % unit == 0, f"block_size {block_size}: a multiple of {unit}")
    demand(block_table.dtype == torch.int32, "the block table is int32")
    demand(block_table.dim() == 2 and len(block_table) == b, "the block table has a row for each request")


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"simulated NPU operator: {what}")
