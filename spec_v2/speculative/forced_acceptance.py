"""Forced acceptance: every step accepts as many drafts as it was told to. For timing, never for texts.

The time of a step hangs on shapes and on how much is accepted, not on what the tokens say. So untrained weights of
the right shape tell how fast a trained draft model would be at a given accept length. What comes out is the
drafter's text with the target's own token after each run of drafts, and everything that reports such a run says so.
SGLang has the same under the name of simulated accept length.
"""

import logging

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from spec_v2.server_args import ServerArgs
from spec_v2.types import DraftTree, TreeShape

_LOG = logging.getLogger("spec_v2")


def say_if_forced(args: ServerArgs) -> None:
    """One line in the log, so that nobody takes such an engine's texts for the model's."""
    if args.speculative_simulated_accept_length is not None:
        _LOG.warning(
            "speculative_simulated_accept_length=%d: forced acceptance, for timing; texts are not the model's",
            args.speculative_simulated_accept_length,
        )


def force_acceptance(
    tree: DraftTree,
    visible: Bool[Tensor, "b n n"],
    target_tokens: Int[Tensor, "b n"],
    shape: TreeShape,
) -> tuple[Int[Tensor, "b w"], Int[Tensor, "b w"], Int[Tensor, " b"]]:
    """(`accept_index`, `predict`, `accept_lens`) as `verify_tree` gives them, for `simulated_accept_length` tokens.

    Accepts the path to the lowest-numbered node that lies `simulated_accept_length - 1` drafts below the root. A
    tree that is not as deep (NGRAM found less, the best nodes lie higher) gives its deepest path instead. The bonus is what the target
    says after the path. `visible`: the ancestors of each node, itself included.
    """
    assert shape.simulated_accept_length is not None
    num_drafts = shape.simulated_accept_length - 1
    b, n = tree.tokens.shape
    steps = torch.arange(shape.longest_path + 1, device=visible.device)
    depths = visible.sum(-1) - 1
    # a parent has a lower number than its children, so the first node that is deep enough is not deeper
    last = depths.clamp(max=num_drafts).argmax(1, keepdim=True)
    on_path = visible.gather(1, last[:, :, None].expand(b, 1, n))
    found = (depths[:, None, :] == steps[:, None]) & on_path  # [b, w, n], at most one node per depth
    is_there, node = found.any(2), found.int().argmax(2)
    accept_lens = is_there.sum(1)
    drafts = torch.nn.functional.pad(tree.tokens.gather(1, node)[:, 1:], (0, 1))
    bonus = target_tokens.gather(1, last)
    place = steps - (accept_lens[:, None] - 1)  # 0 at the bonus
    predict = torch.where(place < 0, drafts, torch.where(place == 0, bonus, -1))
    return torch.where(is_there, node, -1), predict, accept_lens
