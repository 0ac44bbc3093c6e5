"""A program moves a few hidden columns of one request; the first one of each request does its lengths too."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.commit_path.reference import CommittedPath
from spec_v2.kernels.dispatch import ceil_div, debug_kernels, next_power_of_2


@triton.jit
@no_type_check
def _commit_path(
    accept_index_ptr,  # [b, w]
    accept_lens_ptr,  # [b]
    seq_lens_ptr,  # [b]
    positions_ptr,  # [b, n]
    hidden_ptr,  # [b, n, h], any strides
    new_seq_lens_ptr,  # [b], out
    draft_depths_ptr,  # [b], out
    out_hidden_ptr,  # [b, w, h], out
    stride_b,
    stride_n,
    stride_h,
    H,
    N: tl.constexpr,
    W: tl.constexpr,
    NODES: tl.constexpr,  # N, padded to a power of two
    PATH: tl.constexpr,  # W, padded to a power of two
    TILE: tl.constexpr,
    CHECK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        seq_len = tl.load(seq_lens_ptr + i)
        nodes = tl.arange(0, NODES)
        positions = tl.load(positions_ptr + i * N + nodes, mask=nodes < N, other=0)
        tl.store(new_seq_lens_ptr + i, seq_len + tl.load(accept_lens_ptr + i))
        tl.store(draft_depths_ptr + i, tl.max(positions, 0) - seq_len)

    j = tl.arange(0, PATH)
    node = tl.load(accept_index_ptr + i * W + j, mask=j < W, other=0)
    if CHECK:
        tl.device_assert((node >= -1) & (node < N), "accept_index: not a node of the tree")
    node = tl.maximum(node, 0)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = (j < W)[:, None] & (column < H)[None, :]
    hidden = tl.load(
        hidden_ptr + i * stride_b + node[:, None] * stride_n + column[None, :] * stride_h, mask=mask
    )
    tl.store(out_hidden_ptr + (i * W + j[:, None]) * H + column[None, :], hidden, mask=mask)


def commit_path_triton(
    accept_index: Tensor, accept_lens: Tensor, seq_lens: Tensor, positions: Tensor, hidden_states: Tensor
) -> CommittedPath:
    """Any strides of the hidden states."""
    b, w = accept_index.shape
    n, h = hidden_states.shape[1:]
    device = accept_index.device
    new_seq_lens, draft_depths = torch.empty(2, b, dtype=torch.long, device=device)
    out = torch.empty(b, w, h, dtype=hidden_states.dtype, device=device)
    path = next_power_of_2(w)
    tile = max(32, min(next_power_of_2(h), 2048 // path))
    if b:
        _commit_path[(b, max(1, ceil_div(h, tile)))](
            accept_index.contiguous(), accept_lens.contiguous(), seq_lens.contiguous(), positions.contiguous(),
            hidden_states, new_seq_lens, draft_depths, out, *hidden_states.stride(), h,
            N=n, W=w, NODES=next_power_of_2(n), PATH=path, TILE=tile,
            CHECK=debug_kernels(), debug=debug_kernels(),
        )  # fmt: skip
    return CommittedPath(new_seq_lens, draft_depths, out)
