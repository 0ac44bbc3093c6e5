"""What a recurrent layer has to know about one forward, and the commit that follows it.

A forward is a set of paths: lists of tokens that go on from a row's state, one after the other. A prompt is a path, a chain
is a path, and in a tree every node is the end of one: its ancestors from the root on, and itself. So a node starts from its
parent's state, and siblings know nothing of each other.

A prefill saves the states that its paths end with. Drafts may be rejected, so a verification saves none: it keeps what each
token brought (`LayerInputs`), and `commit_states` walks the accepted path once more when it is known. That costs a
second walk over a few tokens. A state for every node would take sixty times the room with Qwen3-Next's sizes
(docs/decisions/0007).
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spec_v2.kernels.causal_conv import causal_conv, save_windows
from spec_v2.kernels.gated_recurrence import Saves, TokenInputs, gated_recurrence
from spec_v2.mem_cache.state_pool import StateGeometry, StatePool
from spec_v2.types import StatePlan


@dataclass(slots=True)
class LayerInputs:
    """What the tokens of a forward brought to one layer: to its convolution, and to its recurrence if it has one."""

    x: Float[Tensor, "t c"]
    tokens: TokenInputs | None = None
    delta: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StateView:
    """One forward's paths over flat token numbers. `rows[i]` is the row whose state request `i` goes on from.

    `token_rows`, `taps`: for the convolution, of each token that runs (see `causal_conv`). `path_rows`, `paths`: for the
    recurrence. `emit`: whether paths are disjoint and speak at each token ("all") or at their ends ("last"). `save_tokens`:
    the last token of each save. `earlier`: of a drafter's tree, what the nodes of the rounds before brought.
    """

    pool: StatePool
    rows: Int[Tensor, " b"]
    token_rows: Int[Tensor, " t"]
    taps: Int[Tensor, "t k"]
    path_rows: Int[Tensor, " p"]
    paths: Int[Tensor, "p l"]
    emit: str
    saves: Saves | None = None
    save_tokens: Int[Tensor, "b s"] | None = None
    earlier: dict[int, LayerInputs] = field(default_factory=dict)
    inputs: dict[int, LayerInputs] = field(default_factory=dict)

    def convolve(
        self,
        layer: int,
        x: Float[Tensor, "t c"],
        weight: Float[Tensor, "c k"],
        bias: Float[Tensor, " c"] | None,
        *,
        silu: bool,
    ) -> Float[Tensor, "t c"]:
        """The short convolution of this forward's tokens, each over its own path."""
        windows = self.pool.windows[layer]
        known = self.earlier.get(layer)
        x = x if known is None else self._joined(known.x, x)
        self.inputs[layer] = LayerInputs(x)
        out = causal_conv(x, windows, self.token_rows, self.taps, weight, bias, silu)
        if self.saves is not None and self.save_tokens is not None:
            save_windows(x, windows, self.rows, self.taps, self.save_tokens, self.saves.rows)
        return out

    def recur(self, layer: int, tokens: TokenInputs, *, delta: bool) -> Float[Tensor, "t heads vd"]:
        """The recurrence over this forward's tokens, each from its parent's state."""
        known = self.earlier.get(layer)
        if known is not None and known.tokens is not None:
            pairs = zip(_parts(known.tokens), _parts(tokens), strict=True)
            tokens = TokenInputs(*(self._joined(old, new) for old, new in pairs))
        self.inputs[layer].tokens, self.inputs[layer].delta = tokens, delta
        out = gated_recurrence(
            self.pool.states[layer],
            self.path_rows,
            self.paths,
            tokens,
            delta=delta,
            outputs="last" if self.emit == "last" else "all",
            saves=self.saves,
        )
        assert out is not None
        return out

    def _joined(self, old: Float[Tensor, "t0 ..."], new: Float[Tensor, "t1 ..."]) -> Float[Tensor, "t ..."]:
        """The tokens of earlier rounds and of this one, request by request."""
        b = len(self.rows)
        return torch.cat([old.unflatten(0, (b, -1)), new.unflatten(0, (b, -1))], 1).flatten(0, 1)


class StateProbe:
    """Stands in for a view once, at load: records what each recurrent layer keeps."""

    def __init__(self) -> None:
        self.layers: dict[int, StateGeometry] = {}

    def convolve(
        self,
        layer: int,
        x: Float[Tensor, "t c"],
        weight: Float[Tensor, "c k"],
        bias: Float[Tensor, " c"] | None,
        *,
        silu: bool,
    ) -> Float[Tensor, "t c"]:
        """Zeros."""
        self.layers[layer] = StateGeometry(x.shape[1], weight.shape[1])
        return torch.zeros_like(x)

    def recur(self, layer: int, tokens: TokenInputs, *, delta: bool) -> Float[Tensor, "t heads vd"]:
        """Zeros."""
        conv, (_, heads, value_dim) = self.layers[layer], tokens.value.shape
        self.layers[layer] = StateGeometry(
            conv.conv_channels, conv.num_taps, heads, tokens.key.shape[2], value_dim
        )
        return torch.zeros_like(tokens.value)


def prefill_states(pool: StatePool, plan: StatePlan | None, extend_lens: tuple[int, ...]) -> StateView | None:
    """Prompts, or chunks of them, one after the other; saved as the plan says. None where the pool keeps nothing."""
    if not pool or plan is None:
        return None
    device = next(iter(pool.windows.values())).device
    lens, start_rows, save_rows, save_lens = map(
        torch.tensor, (extend_lens, plan.start_rows, plan.save_rows, plan.save_lens)
    )
    starts = lens.cumsum(0) - lens
    request = torch.repeat_interleave(torch.arange(len(lens)), lens, output_size=sum(extend_lens))
    offsets = torch.arange(sum(extend_lens)) - starts[request]
    columns = torch.arange(max(extend_lens))
    paths = torch.where(columns < lens[:, None], starts[:, None] + columns, -1)
    save_tokens = (starts[:, None] + save_lens - 1).clamp(min=0)
    host = (start_rows, start_rows[request], offsets, paths, save_tokens, save_rows, save_lens)
    rows, token_rows, offsets, paths, save_tokens, save_rows, save_lens = (
        x.to(device, non_blocking=True) for x in host
    )
    return StateView(
        pool=pool,
        rows=rows,
        token_rows=token_rows,
        taps=_taps_behind(offsets, pool.num_taps),
        path_rows=rows,
        paths=paths,
        emit="all",
        saves=Saves(save_rows, save_lens, {length for lens in plan.save_lens for length in lens}),
        save_tokens=save_tokens,
    )


def chain_states(pool: StatePool, rows: Int[Tensor, " b"], length: int) -> StateView | None:
    """Each request runs a chain of `length` tokens behind its state. None where the pool keeps nothing."""
    if not pool:
        return None
    paths = torch.arange(len(rows) * length, device=rows.device).view(-1, length)
    offsets = torch.arange(length, device=rows.device).repeat(len(rows))
    return StateView(
        pool=pool,
        rows=rows,
        token_rows=rows[:, None].expand(-1, length).flatten(),
        taps=_taps_behind(offsets, pool.num_taps),
        path_rows=rows,
        paths=paths,
        emit="all",
    )


def tree_states(
    pool: StatePool,
    rows: Int[Tensor, " b"],
    visible: Bool[Tensor, "b q win"],
    longest_path: int,
    earlier: StateView | None = None,
) -> StateView | None:
    """Each request runs the last `q` nodes of its window, whose ancestors `visible` names. Parents precede children.

    `longest_path`: the most nodes on a path. `earlier`: the view of a drafter's round before, whose nodes come first in
    the window. None where the pool keeps nothing.
    """
    if not pool:
        return None
    b, q, window = visible.shape
    node = torch.arange(window, device=rows.device)
    path = torch.where(visible, node, -1).sort(-1).values[..., -longest_path:]  # -1 first, then root to node
    first = torch.arange(b, device=rows.device)[:, None, None] * window
    paths = torch.where(path >= 0, path + first, -1).flatten(0, 1)
    rows_of_nodes = rows[:, None].expand(-1, q).flatten()
    return StateView(
        pool=pool,
        rows=rows,
        token_rows=rows_of_nodes,
        taps=_taps_of_paths(paths, pool.num_taps),
        path_rows=rows_of_nodes,
        paths=paths,
        emit="last",
        earlier={} if earlier is None else earlier.inputs,
    )


def commit_states(
    view: StateView | None, accept_index: Int[Tensor, "b w"], accept_lens: Int[Tensor, " b"]
) -> None:
    """Make the state after each accepted path the request's own. `accept_index`: nodes, -1 past `accept_lens`."""
    if view is None:
        return
    b = len(accept_lens)
    first = torch.arange(b, device=accept_lens.device)[:, None] * (len(view.token_rows) // b)
    paths = torch.where(accept_index >= 0, accept_index + first, -1)
    saves = Saves(view.rows[:, None], accept_lens[:, None])
    last = paths.gather(1, (accept_lens[:, None] - 1).clamp(min=0))
    for layer, inputs in view.inputs.items():
        save_windows(inputs.x, view.pool.windows[layer], view.rows, view.taps, last, saves.rows)
        if inputs.tokens is not None:
            states = view.pool.states[layer]
            gated_recurrence(
                states, view.rows, paths, inputs.tokens, delta=inputs.delta, outputs="none", saves=saves
            )


def _parts(tokens: TokenInputs) -> tuple[Tensor, ...]:
    return tokens.value, tokens.key, tokens.query, tokens.decay, tokens.step


def _taps_behind(offsets: Int[Tensor, " t"], num_taps: int) -> Int[Tensor, "t k"]:
    """Of tokens that lie one behind the other; `offsets`: tokens of the same request before each."""
    token = torch.arange(len(offsets), device=offsets.device)[:, None]
    back = torch.arange(num_taps - 1, -1, -1, device=offsets.device)
    return torch.where(offsets[:, None] >= back, token - back, offsets[:, None] - back)


def _taps_of_paths(paths: Int[Tensor, "p l"], num_taps: int) -> Int[Tensor, "p k"]:
    """Of the node that each path ends with. What lies before the root is counted from the window's end."""
    depth = (paths >= 0).sum(1, keepdim=True)
    last = F.pad(paths, (num_taps, 0), value=-1)[:, -num_taps:]
    back = torch.arange(num_taps - 1, -1, -1, device=paths.device)
    return torch.where(last >= 0, last, depth - 1 - back)
