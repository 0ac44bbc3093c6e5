"""All paths at once, one token after the other."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

NORM_EPS = 1e-6  # transformers' constant of the gated delta rule


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """What each token brings. A key head serves `heads / key_heads` heads that follow each other.

    `decay` is the logarithm of what is left of the state, at most 0; `step` scales what is added.
    """

    value: Float[Tensor, "t heads vd"]
    key: Float[Tensor, "t key_heads kd"]
    query: Float[Tensor, "t key_heads kd"]
    decay: Float[Tensor, "t heads"]
    step: Float[Tensor, "t heads"]


@dataclass(frozen=True, slots=True)
class Saves:
    """The state after the first `lens[i, j]` columns of path `i` goes to row `rows[i, j]`. Row 0: it goes nowhere."""

    rows: Int[Tensor, "p s"]
    lens: Int[Tensor, "p s"]


def gated_recurrence_reference(
    states: Float[Tensor, "rows heads kd vd"],
    start_rows: Int[Tensor, " p"],
    paths: Int[Tensor, "p l"],
    tokens: TokenInputs,
    delta: bool,
    outputs: str,
    saves: Saves | None,
) -> Float[Tensor, "o heads vd"] | None:
    """Saved states are collected on the way and written at the end, so that no path sees what another one saves."""
    state = states[start_rows]
    said = state[:, :, 0]
    num_tokens = len(tokens.value)
    everything = torch.zeros(num_tokens + 1, *said.shape[1:], dtype=state.dtype, device=state.device)
    kept = states[:1].repeat(0 if saves is None else saves.rows.numel(), 1, 1, 1)
    for j in range(paths.shape[1]):
        at = paths[:, j].clamp(min=0)
        updated, said = _token(state, at, tokens, delta)
        state = torch.where((paths[:, j] >= 0)[:, None, None, None], updated, state)
        if outputs == "all":  # the last row is for what was passed over
            everything[torch.where(paths[:, j] >= 0, paths[:, j], num_tokens)] = said
        if saves is not None:
            here = ((saves.lens == j + 1) & (saves.rows > 0)).flatten()[:, None, None, None]
            kept = torch.where(here, state.repeat_interleave(saves.rows.shape[1], 0), kept)
    if saves is not None:
        states.index_copy_(0, saves.rows.flatten(), kept)
    return {"all": everything[:num_tokens], "last": said, "none": None}[outputs]


def _token(
    state: Float[Tensor, "p heads kd vd"], at: Int[Tensor, " p"], tokens: TokenInputs, delta: bool
) -> tuple[Float[Tensor, "p heads kd vd"], Float[Tensor, "p heads vd"]]:
    """(state after one token of each path, what it says)."""
    wide, sharing = state.dtype, tokens.value.shape[1] // tokens.key.shape[1]
    key = tokens.key[at].to(wide).repeat_interleave(sharing, 1)
    query = tokens.query[at].to(wide).repeat_interleave(sharing, 1)
    value, step = tokens.value[at].to(wide), tokens.step[at].to(wide)[..., None]
    if delta:
        key, query = _normed(key), _normed(query) / key.shape[-1] ** 0.5
    state = state * tokens.decay[at].to(wide).exp()[..., None, None]
    if delta:
        value = value - (state * key[..., None]).sum(-2)
    state = state + key[..., None] * (step * value)[..., None, :]
    return state, (state * query[..., None]).sum(-2)


def _normed(x: Float[Tensor, "*n kd"]) -> Float[Tensor, "*n kd"]:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)
