"""Training-time test (EAGLE-3, Li et al. 2025, arXiv 2503.01840): a head is trained on its own drafts, not on features alone.

A chain starts at position `p`. Its step 0 reads the target's features of `p`, like all positions before it; step `i`
reads what step `i - 1` of the same chain said, at position `p + i`. So the keys of step `i` are those of step 0 up to
`p`, and one more for each of the chain's own later steps. All positions start a chain at once: the first part is a
causal mask that is the same in every step, the second one diagonal per step.

The head's own forward runs, the one that inference runs; only its attention function is another.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

NAME = "spec_v2_unrolled"
ALIGNMENT = 8  # columns; rows that start on 16 bytes are what fast matrix products want


@dataclass(slots=True)
class UnrolledKeys:
    """Keys and values of all steps so far, by layer; and the causal mask, which all steps share."""

    of_layer: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    causal: Tensor | None = None

    def add(self, layer: int, keys: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        """All steps' keys and values of a layer, the new ones last."""
        steps = self.of_layer.setdefault(layer, [])
        steps.append((keys, values))
        return steps

    def causal_bias(self, query: Tensor, copies: int) -> Float[Tensor, "rows t"]:
        """0 where step 0's key is at or before the chain's start, else -inf; `copies` times, one below the other."""
        if self.causal is None:
            t = query.shape[2]
            above = torch.full((t, t), -math.inf, dtype=query.dtype, device=query.device).triu(1)
            self.causal = above.repeat(copies, 1)
        return self.causal


def unroll(
    head: Any, tokens: Int[Tensor, "b t"], features: Float[Tensor, "b t f"], num_steps: int
) -> list[Float[Tensor, "b t h"]]:
    """What the head says in each step of the chains that start at every position, before `readout`.

    Row `p` of step `i` has seen `tokens[p + 1 .. p + 1 + i]` and speaks of token `p + 2 + i`. Chains that would run
    over the end of their row read token 0 there; nothing else sees them.
    """
    register()
    use_attention(head, NAME)
    keys = UnrolledKeys()
    no_mask = features.new_zeros(1, 1, 1, 1)  # a mask of four dimensions is handed on as it is
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    states: list[Tensor] = []
    for step in range(num_steps):
        said = head.hidden_states(
            shift(tokens, 1 + step),
            positions + step,
            states[-1] if states else features,
            attention_mask=no_mask,
            unrolled=keys,
            use_cache=False,
        )
        states.append(said)
    return states


def unrolled_attention(
    module: torch.nn.Module,
    query: Float[Tensor, "b heads t d"],
    key: Float[Tensor, "b kv_heads t d"],
    value: Float[Tensor, "b kv_heads t d"],
    attention_mask: Tensor | None,
    *,
    unrolled: UnrolledKeys,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "b t heads d"], None]:
    """Each chain attends to step 0 up to its start and to its own later steps. One softmax over both.

    Scores are written out: for rows of a few hundred tokens that costs little, and needs no kernel of its own.
    """
    refused = [name for name in ("sliding_window", "softcap", "s_aux") if kwargs.get(name) is not None]
    if refused:
        raise ValueError(
            f"the draft model's attention uses {refused[0]}, which training does not know; leave it out"
        )
    steps = unrolled.add(int(module.layer_idx), key, value)  # type: ignore[arg-type]
    (b, heads, t, d), kv_heads = query.shape, key.shape[1]
    sharing = heads // kv_heads
    scale = d**-0.5 if scaling is None else scaling
    first_keys, first_values = (x.reshape(b * kv_heads, t, d) for x in steps[0])
    queries = query.reshape(
        b * kv_heads, sharing * t, d
    )  # heads that share a KV head become rows of one product
    from_features = torch.baddbmm(
        unrolled.causal_bias(query, sharing), queries, first_keys.transpose(1, 2), alpha=scale
    )

    def per_chain(x: Tensor) -> Tensor:
        """A chain's own key or value, once for each head that shares it."""
        return x[:, :, None].expand(-1, -1, sharing, -1, -1).reshape(b * kv_heads, sharing * t, d)

    own = [(queries * per_chain(k)).sum(-1, keepdim=True) * scale for k, _ in steps[1:]]
    filler = from_features.new_full((b * kv_heads, sharing * t, -(t + len(own)) % ALIGNMENT), -math.inf)
    weights = torch.cat([from_features, *own, filler], -1).softmax(-1)
    of_features, of_own = weights.split([t, weights.shape[-1] - t], -1)
    attended = of_features @ first_values
    for weight, (_, v) in zip(of_own.split(1, -1), steps[1:], strict=False):
        attended = attended + weight * per_chain(v)
    return attended.view(b, heads, t, d).transpose(1, 2), None


def shift(tokens: Int[Tensor, "b t"], by: int) -> Int[Tensor, "b t"]:
    """Each place gets the token `by` places later; behind the end it is token 0, which nothing true sees."""
    return torch.nn.functional.pad(tokens[:, by:], (0, min(by, tokens.shape[1])))


def register() -> None:
    """Make the attention function known to transformers. Calling it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, unrolled_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """What a chain sees is decided in the attention function."""


def use_attention(model: torch.nn.Module, name: str) -> None:
    """Let every part of a draft model that has a config of its own attend as `name` says."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = name
