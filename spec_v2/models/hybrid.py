"""Recurrent layers of transformers' models, run on our states: gated delta nets, Mamba-2, short convolutions.

transformers' classes stay, with their projections, norms and weights. While an engine runs a model, each recurrent mixer's
`forward` is one of the functions below: they do what the class does, but hand the convolution and the recurrence to the
forward's `states`, which know prompts, chains and trees. Without a forward batch a mixer is its class's own again, so the
model can be used as before at the same time.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType, MethodType
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from spec_v2.kernels.gated_recurrence import TokenInputs


@runtime_checkable
class States(Protocol):
    """What a mixer asks of a forward. Tokens lie side by side, whatever they are part of."""

    def convolve(
        self,
        layer: int,
        x: Float[Tensor, "t c"],
        weight: Float[Tensor, "c k"],
        bias: Float[Tensor, " c"] | None,
        *,
        silu: bool,
    ) -> Float[Tensor, "t c"]: ...

    def recur(self, layer: int, tokens: TokenInputs, *, delta: bool) -> Float[Tensor, "t heads vd"]: ...


def gated_delta_net(
    mixer: Any,
    mixed: Float[Tensor, "t c"],
    gate: Float[Tensor, "t heads vd"],
    b: Float[Tensor, "t heads"],
    a: Float[Tensor, "t heads"],
    states: States,
) -> Float[Tensor, "t h"]:
    """The gated delta rule (Yang et al. 2024, arXiv 2412.06464) behind a short convolution of queries, keys and values."""
    layer, key_dim = int(mixer.layer_idx), mixer.key_dim
    mixed = _convolve(mixer.conv1d, layer, mixed, states, silu=True)
    query, key, value = mixed.split([key_dim, key_dim, mixer.value_dim], -1)
    decay = -_wide(mixer.A_log).exp() * F.softplus(_wide(a) + mixer.dt_bias)
    tokens = TokenInputs(
        value=value.unflatten(1, (-1, mixer.head_v_dim)),
        key=key.unflatten(1, (-1, mixer.head_k_dim)),
        query=query.unflatten(1, (-1, mixer.head_k_dim)),
        decay=decay,
        step=_wide(b.sigmoid()),
    )
    said = states.recur(layer, tokens, delta=True).to(mixed.dtype)
    normed = mixer.norm(said.flatten(0, 1), gate.flatten(0, 1))
    return mixer.out_proj(normed.view(len(mixed), -1))  # type: ignore[no-any-return]


def qwen3_next(mixer: Any, hidden_states: Float[Tensor, "1 t h"], states: States) -> Float[Tensor, "t h"]:
    """Two projections whose columns are sorted by key head."""
    query, key, value, gate, b, a = mixer.fix_query_key_value_ordering(
        mixer.in_proj_qkvz(hidden_states), mixer.in_proj_ba(hidden_states)
    )
    mixed = torch.cat([x[0].flatten(1) for x in (query, key, value)], -1)
    return gated_delta_net(mixer, mixed, gate[0], b[0], a[0], states)


def qwen3_5(mixer: Any, hidden_states: Float[Tensor, "1 t h"], states: States) -> Float[Tensor, "t h"]:
    """Four projections, columns in order."""
    x = hidden_states[0]
    gate = mixer.in_proj_z(x).unflatten(1, (-1, mixer.head_v_dim))
    return gated_delta_net(mixer, mixer.in_proj_qkv(x), gate, mixer.in_proj_b(x), mixer.in_proj_a(x), states)


def mamba2(mixer: Any, hidden_states: Float[Tensor, "1 t h"], states: States) -> Float[Tensor, "t h"]:
    """Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): the state is transformers' transposed, `state_size` by `head_dim`."""
    layer, groups, inner = int(mixer.layer_idx), mixer.n_groups, mixer.intermediate_size
    projected = mixer.in_proj(hidden_states[0])
    gate, mixed, dt = projected.split([inner, mixer.conv_dim, mixer.num_heads], -1)
    mixed = _convolve(mixer.conv1d, layer, mixed, states, silu=True)
    x, b, c = mixed.split([inner, groups * mixer.ssm_state_size, groups * mixer.ssm_state_size], -1)
    dt = F.softplus(dt + mixer.dt_bias.to(dt.dtype)).clamp(*mixer.time_step_limit)
    x = x.unflatten(1, (-1, mixer.head_dim))
    tokens = TokenInputs(
        value=x,
        key=b.unflatten(1, (groups, -1)),
        query=c.unflatten(1, (groups, -1)),
        decay=-_wide(mixer.A_log).exp() * _wide(dt),
        step=_wide(dt),
    )
    said = states.recur(layer, tokens, delta=False) + mixer.D[:, None] * _wide(x)
    return mixer.out_proj(mixer.norm(said.flatten(1), gate).to(projected.dtype))  # type: ignore[no-any-return]


def short_conv(mixer: Any, hidden_states: Float[Tensor, "1 t h"], states: States) -> Float[Tensor, "t h"]:
    """LFM2's gated short convolution: a window of inputs is all that it remembers."""
    before, after, x = mixer.in_proj(hidden_states[0]).chunk(3, -1)
    x = _convolve(mixer.conv, int(mixer.layer_idx), before * x, states, silu=False)
    return mixer.out_proj(after * x)  # type: ignore[no-any-return]


Mixer = Callable[[Any, Tensor, States], Tensor]
MIXERS: Mapping[str, Mixer] = MappingProxyType(
    {
        "Qwen3NextGatedDeltaNet": qwen3_next,
        "Qwen3_5GatedDeltaNet": qwen3_5,
        "Qwen3_5MoeGatedDeltaNet": qwen3_5,
        "BambaMixer": mamba2,
        "GraniteMoeHybridMambaLayer": mamba2,
        "Lfm2ShortConv": short_conv,
        "Lfm2MoeShortConv": short_conv,
    }
)
"""Recurrent layers that run here, by the name of transformers' class."""

_lent: dict[int, tuple[nn.Module, int]] = {}  # id(mixer) -> mixer, engines that run it


def lend_mixers(model: nn.Module) -> None:
    """Run the recurrent layers of `model` on our states, where a forward has some. Ended by `return_mixers`."""
    for mixer in _mixers(model):
        _, users = _lent.get(id(mixer), (mixer, 0))
        _lent[id(mixer)] = (mixer, users + 1)
        mixer.forward = MethodType(_forward, mixer)


def return_mixers(model: nn.Module) -> None:
    """Give the layers their own forward back, when the last engine that runs them is closed."""
    for mixer in _mixers(model):
        _, users = _lent.pop(id(mixer))
        if users > 1:
            _lent[id(mixer)] = (mixer, users - 1)
        else:
            del mixer.forward


def _mixers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__ in MIXERS]


def _forward(
    self: Any, hidden_states: Tensor, *args: Any, forward_batch: Any = None, **kwargs: Any
) -> Tensor:
    """A mixer's forward: ours with a forward batch, else the class's own."""
    if forward_batch is None:
        return type(self).forward(self, hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
    if forward_batch.states is None:
        raise RuntimeError(f"{type(self).__name__} needs states, and this forward has none: pass a StateView")
    return MIXERS[type(self).__name__](self, hidden_states, forward_batch.states)[None]


def _convolve(
    conv: nn.Conv1d, layer: int, x: Float[Tensor, "t c"], states: States, *, silu: bool
) -> Float[Tensor, "t c"]:
    return states.convolve(layer, x, conv.weight[:, 0], conv.bias, silu=silu)


def _wide(x: Tensor) -> Tensor:
    """In fp32, as transformers computes recurrences; float64 stays float64."""
    return x if x.dtype == torch.float64 else x.float()
