"""All paths at once, one token after the other."""

from collections.abc import Collection
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
    """The state after the first `lens[i, j]` columns of path `i` goes to row `rows[i, j]`. Row 0: it goes nowhere.

    `known_lens`: all values of `lens`, where the host knows them; the reference then looks at no others.
    """

    rows: Int[Tensor, "p s"]
    lens: Int[Tensor, "p s"]
    known_lens: Collection[int] | None = None


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
    said, num_tokens = state[:, :, 0], len(tokens.value)
    everything = torch.zeros(num_tokens + 1, *said.shape[1:], dtype=state.dtype, device=state.device)
    kept = states[:1].repeat(0 if saves is None else saves.rows.numel(), 1, 1, 1)
    for j in range(paths.shape[1]):
        said = _step(state, paths[:, j], tokens, delta)
        if outputs == "all":  # the last row is for what was passed over
            everything[torch.where(paths[:, j] >= 0, paths[:, j], num_tokens)] = said
        if saves is not None and (saves.known_lens is None or j + 1 in saves.known_lens):
            here = ((saves.lens == j + 1) & (saves.rows > 0)).flatten()[:, None, None, None]
            kept = torch.where(here, state.repeat_interleave(saves.rows.shape[1], 0), kept)
    if saves is not None:
        states.index_copy_(0, saves.rows.flatten(), kept)
    return {"all": everything[:num_tokens], "last": said, "none": None}[outputs]


def _step(
    state: Float[Tensor, "p heads kd vd"], path: Int[Tensor, " p"], tokens: TokenInputs, delta: bool
) -> Float[Tensor, "p heads vd"]:
    """One token of each path, in place. Returns what it says. A token of -1 has neither decay nor key nor value."""
    is_token = (path >= 0)[:, None, None]

    def of_path(x: Tensor) -> Tensor:
        return torch.where(is_token, x[path.clamp(min=0)].to(state.dtype), 0)

    sharing = tokens.value.shape[1] // tokens.key.shape[1]
    key, query = (of_path(x).repeat_interleave(sharing, 1) for x in (tokens.key, tokens.query))
    value, decay, step = (
        of_path(tokens.value),
        of_path(tokens.decay[..., None]),
        of_path(tokens.step[..., None]),
    )
    if delta:
        key, query = _normed(key), _normed(query) / key.shape[-1] ** 0.5
    state *= decay.exp()[..., None]
    if delta:
        value = value - _apply(state, key)
    state += key[..., None] * (step * value)[..., None, :]
    return _apply(state, query)


def _apply(
    state: Float[Tensor, "p heads kd vd"], x: Float[Tensor, "p heads kd"]
) -> Float[Tensor, "p heads vd"]:
    return (x[..., None, :] @ state)[..., 0, :]


def _normed(x: Float[Tensor, "*n kd"]) -> Float[Tensor, "*n kd"]:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)
