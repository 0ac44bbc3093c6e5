"""All requests one level at a time, without asking the device how far any of them got."""

import torch
from jaxtyping import Int
from torch import Tensor


def verify_tree_reference(
    *,
    tokens: Int[Tensor, "b n"],
    parents: Int[Tensor, "b n"],
    target_tokens: Int[Tensor, "b n"],
    longest_path: int,
) -> tuple[Int[Tensor, "b w"], Int[Tensor, "b w"], Int[Tensor, " b"]]:
    """A request that has stopped repeats its last node, masked by `alive`."""
    b = tokens.shape[0]
    node = torch.zeros(b, 1, dtype=torch.long, device=tokens.device)
    alive = torch.ones(b, 1, dtype=torch.bool, device=tokens.device)
    accept_index, predict = [node], [target_tokens.gather(1, node)]
    for _ in range(longest_path):
        wanted = predict[-1]
        follows = (parents == node) & (tokens == wanted) & alive
        alive = follows.any(1, keepdim=True)
        node = torch.where(alive, follows.int().argmax(1, keepdim=True), node)
        accept_index.append(torch.where(alive, node, -1))
        predict.append(torch.where(alive, target_tokens.gather(1, node), -1))
    index = torch.cat(accept_index, 1)
    return index, torch.cat(predict, 1), (index >= 0).sum(1)
