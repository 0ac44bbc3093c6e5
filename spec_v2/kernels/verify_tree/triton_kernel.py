"""One program per request: the tree in registers, one level after the other."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.dispatch import next_power_of_2


@triton.jit
@no_type_check
def _verify_tree(
    tokens_ptr,  # [b, n], any strides
    parents_ptr,  # [b, n], any strides
    target_tokens_ptr,  # [b, n], any strides
    accept_index_ptr,  # [b, w], out
    predict_ptr,  # [b, w], out
    accept_lens_ptr,  # [b], out
    tokens_stride_b,
    tokens_stride_n,
    parents_stride_b,
    parents_stride_n,
    target_stride_b,
    target_stride_n,
    N: tl.constexpr,
    W: tl.constexpr,
    NODES: tl.constexpr,  # N, padded to a power of two
):
    i = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, NODES)
    is_node = nodes < N
    tokens = tl.load(tokens_ptr + i * tokens_stride_b + nodes * tokens_stride_n, mask=is_node, other=-1)
    parents = tl.load(parents_ptr + i * parents_stride_b + nodes * parents_stride_n, mask=is_node, other=-1)

    node = 0
    accept_len = 0
    for j in range(W):
        # N: there is no child with that token, and nothing is a child of N
        wanted = tl.load(
            target_tokens_ptr + i * target_stride_b + node * target_stride_n, mask=node < N, other=-1
        )
        alive = node < N
        accept_len += alive.to(tl.int32)
        tl.store(accept_index_ptr + i * W + j, tl.where(alive, node, -1).to(tl.int64))
        tl.store(predict_ptr + i * W + j, tl.where(alive, wanted, -1))
        follows = (parents == node) & (tokens == wanted) & is_node
        node = tl.min(tl.where(follows, nodes, N), 0)
    tl.store(accept_lens_ptr + i, accept_len.to(tl.int64))


def verify_tree_triton(
    tokens: Tensor, parents: Tensor, target_tokens: Tensor, longest_path: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Any strides."""
    b, n = tokens.shape
    w = longest_path + 1
    accept_index, predict = torch.empty(2, b, w, dtype=torch.long, device=tokens.device)
    accept_lens = torch.empty(b, dtype=torch.long, device=tokens.device)
    if b:
        _verify_tree[(b,)](
            tokens, parents, target_tokens, accept_index, predict, accept_lens,
            *tokens.stride(), *parents.stride(), *target_tokens.stride(), N=n, W=w, NODES=next_power_of_2(n),
        )  # fmt: skip
    return accept_index, predict, accept_lens
