"""The states of recurrent layers, a row per request: what a KV pool is to attention.

A recurrent layer has no entry per token. It has one state that stands for the whole text so far: the newest inputs of its
convolution (`windows`) and, but for a layer that is a convolution alone, a matrix per head (`states`). A request's state
lies in the row that the request owns; behind the requests' rows come rows for snapshots, which the prefix cache owns.

Row 0 is the state of the empty text, all zeros, and is never written: new requests start from it, and so do the rows that
fill a batch up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_v2.mem_cache.kv_pool import zeros


@dataclass(frozen=True, slots=True)
class StateGeometry:
    """What one recurrent layer keeps per request: `num_taps - 1` inputs of each channel, a matrix for each head.

    `num_heads` is 0 where the layer is a convolution alone.
    """

    conv_channels: int
    num_taps: int
    num_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0


class StatePool:
    """`windows[layer]` `[rows, num_taps - 1, channels]` and `states[layer]` `[rows, heads, key_dim, value_dim]`.

    `geometry`: by layer number; a model without recurrent layers has none, and its pool holds nothing. Windows are in the
    model's dtype, states in fp32 (float64 for a float64 model), as transformers computes them. A row is written once per
    forward, when it is known what was accepted: nothing that is drafted ever touches it.
    """

    def __init__(
        self, geometry: dict[int, StateGeometry], num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.geometry = geometry
        self.num_rows = num_rows
        self.windows: dict[int, Tensor] = {}
        self.states: dict[int, Tensor] = {}
        for layer, g in geometry.items():
            self.windows[layer] = zeros((num_rows, g.num_taps - 1, g.conv_channels), dtype, device)
            if g.num_heads:
                shape = (num_rows, g.num_heads, g.key_dim, g.value_dim)
                self.states[layer] = zeros(shape, state_dtype(dtype), device)

    def __bool__(self) -> bool:
        """Whether there is anything to keep."""
        return bool(self.geometry)

    @property
    def num_taps(self) -> int:
        """Inputs that a convolution sees, its newest included; the same in all layers."""
        return next(iter(self.geometry.values())).num_taps

    def buffers(self) -> Sequence[Tensor]:
        """All tensors of the pool, a row per request each."""
        return (*self.windows.values(), *self.states.values())

    def fill_unused(self, value: float) -> None:
        """Fill everything but row 0: with NaN, whatever is read without having been written shows."""
        for buffer in self.buffers():
            buffer[1:].fill_(value)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of a recurrence in a model of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def bytes_per_state(geometry: dict[int, StateGeometry], dtype: torch.dtype) -> int:
    """Bytes of one row over all layers."""
    conv = sum(g.conv_channels * (g.num_taps - 1) for g in geometry.values()) * dtype.itemsize
    matrices = sum(g.num_heads * g.key_dim * g.value_dim for g in geometry.values())
    return conv + matrices * state_dtype(dtype).itemsize
