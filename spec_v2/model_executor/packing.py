"""Linear layers made faster from outside: projections that read the same input, and weights in the processor's order.

Applied to transformers' modules, and only to models that the engine has loaded itself. The first projection of a
group (q, k, v; gate, up) computes all of them in one product; the others hand out their share. On a CPU in bfloat16 the
weights are then put into the blocked order that oneDNN computes in, once and not at every product: the
same bits come out, in 0.6 times the time at one token and half at eight. Nothing is kept twice.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _First(nn.Module):
    """Computes the whole group, keeps the other shares for the modules that are called next."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [linear.out_features for linear in linears]
        has_bias = linears[0].bias is not None
        with torch.device("meta"):  # made of the members' weights, not of memory of its own
            self.product: nn.Module = nn.Linear(linears[0].in_features, sum(self.sizes), bias=has_bias)
        weight = torch.cat([linear.weight for linear in linears])
        self.product.weight = nn.Parameter(weight, requires_grad=False)
        if has_bias:
            bias = torch.cat([linear.bias for linear in linears])
            self.product.bias = nn.Parameter(bias, requires_grad=False)
        self.shares: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        shares = self.product(x).split(self.sizes, -1)
        first: Tensor = shares[0]
        self.shares = list(shares[1:])
        return first


class _Share(nn.Module):
    """Hands out what the first module computed for this one, once."""

    def __init__(self, first: _First) -> None:
        super().__init__()
        self._first = [first]  # in a list, so that it is no submodule of two parents

    def forward(self, x: Tensor) -> Tensor:
        return self._first[0].shares.pop(0)


def packed_sizes(linear: Any) -> list[int] | None:
    """Columns of each member, if `linear` is the first of a packed group (`linear.product` computes all)."""
    return linear.sizes if isinstance(linear, _First) else None


class _Reordered(nn.Module):
    """A linear layer whose weight is in oneDNN's own order."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        # no parameter: nothing but this product can read it
        self.reordered = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """The weight in its usual order: a copy, for whoever takes rows of it."""
        return self.reordered.to_dense()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.reordered, self.bias, "none", [], "")  # type: ignore[no-any-return]


def speed_up_linears(model: nn.Module, shared_with: nn.Module | None = None) -> None:
    """All of this file, for a model that nobody else uses, but for what it shares with `shared_with`."""
    with torch.no_grad():
        pack_projections(model)
        reorder_weights(model, shared_with)


def pack_projections(model: nn.Module) -> int:
    """Pack every group whose members are plain linears of one kind. Returns how many groups were packed."""
    packed = 0
    for parent in list(model.modules()):
        for names in GROUPS:
            linears = [getattr(parent, name, None) for name in names]
            if any(type(linear) is not nn.Linear for linear in linears):
                continue
            group = [linear for linear in linears if isinstance(linear, nn.Linear)]
            if len({(linear.in_features, linear.bias is None) for linear in group}) > 1:
                continue
            first = _First(group)
            setattr(parent, names[0], first)
            for name in names[1:]:
                setattr(parent, name, _Share(first))
            packed += 1
    return packed


def reorder_weights(model: nn.Module, shared_with: nn.Module | None = None) -> int:
    """Put the weights of linear layers into oneDNN's order, where that helps. Returns how many were.

    A weight that another module reads too stays, as it would be kept twice: an output layer tied to the embedding,
    and what a draft head has from its target (`shared_with`).
    """
    if not _can_reorder():
        return 0
    modules = {*model.modules(), *(shared_with.modules() if shared_with is not None else ())}
    readers = Counter(id(p) for module in modules for p in module._parameters.values())
    of_target = set(shared_with.modules()) if shared_with is not None else set()
    reordered = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child in of_target:
                continue
            if readers[id(child.weight)] == 1 and _gains(child.weight):
                setattr(parent, name, _Reordered(child.weight, child.bias))
                reordered += 1
    return reordered


def _gains(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16


def _can_reorder() -> bool:
    """Whether this torch, on this processor, has the product and it gives the bits of the ordinary one."""
    ops: Any = torch.ops.mkldnn
    try:
        if not torch.backends.mkldnn.is_available() or not ops._is_mkldnn_bf16_supported():
            return False
        weight = torch.linspace(-1, 1, 48 * 80).view(48, 80).bfloat16()
        x = torch.linspace(-2, 2, 3 * 80).view(1, 3, 80).bfloat16()
        return torch.equal(_Reordered(weight, None)(x), nn.functional.linear(x, weight))
    except (AttributeError, RuntimeError):
        return False
