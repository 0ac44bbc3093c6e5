"""Finds the layers that can be fused, checks each against its own module's numbers, and says what was done.

One forward of the unchanged model over a few random tokens records what every part of every layer read and wrote. Each
fused stage then gets the recorded input and must give the recorded output to within the dtype's rounding.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from spec_v2.mem_cache.kv_pool import KvPool, LayerGeometry, RowTable
from spec_v2.model_executor.forward_batch import ForwardBatch, extend_forward_batch
from spec_v2.model_executor.fused import (
    EAGLE3_PARTS,
    LAYER_PARTS,
    FusedEagle3Layer,
    FusedFinalNorm,
    FusedLayer,
    FusedLinear,
    FusedNorm,
    FusedRotary,
    OwnMlp,
    Unfit,
)
from spec_v2.model_executor.model_runner import on_slots, probe_attention
from spec_v2.model_executor.packing import pack_projections, speed_up_linears

_LOG = logging.getLogger("spec_v2")
PREFIX_LENS, EXTEND_LENS = (3, 0), (4, 4)  # tokens of the two requests that are tried
ROUNDINGS = 8  # how many times the dtype's eps a token's result may be off, relative to its length


@dataclass(frozen=True, slots=True)
class FusedReport:
    """Names of the modules that got a fused forward, and why the others did not."""

    fused: tuple[str, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.kept.items():
            by_reason.setdefault(reason, []).append(name)
        lines = [f"{len(self.fused)} modules fused"]
        lines += [
            f"{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)} kept: {reason}"
            for reason, names in by_reason.items()
        ]
        return "; ".join(lines)


def speed_up(model: nn.Module, shared_with: nn.Module | None = None) -> None:
    """What makes a model faster where it is, for one that nobody else uses, but for what it shares with `shared_with`."""
    if next(model.parameters()).device.type == "cpu":
        speed_up_linears(model, shared_with)
    elif next(model.parameters()).is_cuda:  # what is fused are Triton kernels
        _LOG.debug("%s: %s", type(model).__name__, fuse_layers(model))
        fuse_linears(model)


def fuse_linears(model: nn.Module) -> int:
    """Give every plain linear layer the kernel for few tokens, in place. Returns how many got it."""
    linears = [m for m in model.modules() if type(m) is nn.Linear and not _is_fused(m)]
    for linear in linears:
        linear.forward = FusedLinear(linear)  # type: ignore[method-assign, assignment]
    return len(linears)


@torch.no_grad()
def fuse_layers(model: Any, *, on_cpu: bool = False) -> FusedReport:
    """Fuse what can be fused, in place. For a model that nobody else uses; what is fused already stays so.

    A model on a CPU is left alone unless `on_cpu`: there launches cost little, and torch's own operations are as fast.
    Never raises for a model that does not fit: the report says why.
    """
    names = {module: name for name, module in model.named_modules()}
    layers = [m for m in model.modules() if _parts(m) in (LAYER_PARTS, EAGLE3_PARTS) and not _is_fused(m)]
    if next(model.parameters()).device.type == "cpu" and not on_cpu:
        return FusedReport(kept={names[layer]: "on a CPU" for layer in layers})
    pack_projections(model)
    try:
        with on_slots(model):
            trial = Trial(model, layers)
    except ValueError as error:  # its attention wants something that we don't honour
        return FusedReport(kept={names[layer]: str(error) for layer in layers})

    fused, reasons = _build(model, layers, trial)
    for module, forward in fused.items():
        module.forward = forward
    kept = {names[module]: reason for module, reason in reasons.items()}
    return FusedReport(tuple(names[module] for module in fused), kept)


def _parts(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _is_fused(module: nn.Module) -> bool:
    return "forward" in module.__dict__


def _build(
    model: Any, layers: list[nn.Module], trial: "Trial"
) -> tuple[dict[nn.Module, Any], dict[nn.Module, str]]:
    """The new forwards of the modules that can have one, and why others cannot."""
    fused: dict[nn.Module, Any] = {}
    reasons: dict[nn.Module, str] = {}
    decoder = model.get_decoder()
    last_norm, rotary = getattr(decoder, "norm", None), getattr(decoder, "rotary_emb", None)
    builds: list[tuple[nn.Module | None, Callable[[nn.Module], Any]]] = [
        *((layer, trial.layer) for layer in layers),
        (last_norm, trial.final_norm),
        (rotary, trial.rotary),
    ]
    for module, build in builds:
        if module is None or _is_fused(module):
            continue
        try:
            fused[module] = build(module)
        except Unfit as unfit:
            reasons[module] = str(unfit)
        except Exception as error:  # noqa: BLE001 - whatever it is, the module's own forward is right
            reasons[module] = f"{type(error).__name__}: {error}"
    _link([*getattr(decoder, "layers", ()), *([last_norm] if last_norm is not None else [])], fused)
    for forward in fused.values():
        if isinstance(forward, FusedLayer) and isinstance(forward.mlp, OwnMlp):
            reasons[forward.mlp.module] = forward.mlp.reason
    return fused, reasons


def _link(in_order: list[nn.Module], fused: dict[nn.Module, Any]) -> None:
    """Each layer's last sum is computed with the norm that reads it: the next layer's, or the decoder's last."""
    for module, following in pairwise(in_order):
        layer, reader = fused.get(module), fused.get(following)
        if layer is not None and reader is not None:
            layer.next_norm = reader if isinstance(reader, FusedNorm) else reader.input_norm


@dataclass(frozen=True, slots=True)
class Seen:
    """One call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    def argument(self, place: int, name: str) -> Any:
        return self.args[place] if place < len(self.args) else self.kwargs[name]


class Trial:
    """What the unchanged model read and wrote in one forward, and fused parts that were held against it."""

    def __init__(self, model: Any, layers: list[nn.Module]) -> None:
        probe = probe_attention(model, "model_path")
        if probe.num_readers:
            raise ValueError("its attention reads another model's KV")
        self.options = probe.options
        parameter = next(model.parameters())
        self.batch = _random_batch(probe.geometry, parameter.dtype, parameter.device)
        self.seen: dict[nn.Module, Seen] = {}

        def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.seen[module] = Seen(args, kwargs, output)

        decoder = model.get_decoder()
        watched = [part for layer in layers for part in (layer, *layer.children())]
        watched += [m for m in (getattr(decoder, "norm", None), getattr(decoder, "rotary_emb", None)) if m]
        hooks = [module.register_forward_hook(keep, with_kwargs=True) for module in watched]
        try:
            model(**_random_inputs(model, parameter), forward_batch=self.batch, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()

    def layer(self, module: Any) -> FusedLayer:
        """The module's fused forward, each of its stages checked. Raises Unfit."""
        is_eagle3 = _parts(module) == EAGLE3_PARTS
        fused = (FusedEagle3Layer if is_eagle3 else FusedLayer)(module, self.options)
        residual = self.seen[module].argument(*((1, "hidden") if is_eagle3 else (0, "hidden_states")))
        self._check_norm(fused.input_norm)
        if isinstance(fused, FusedEagle3Layer):
            self._check_norm(fused.hidden_norm)
        attended = self._check_attention(fused)
        after = self.seen[fused.post_norm.module]
        self._check_norm(fused.post_norm)
        total = after.argument(0, "hidden_states")
        _expect_sum("post_attention_layernorm reads", total, residual, attended)
        mlp = self.seen[module.mlp]
        if not isinstance(mlp.output, Tensor):
            raise Unfit("mlp returns more than one tensor")
        expanded = fused.mlp(mlp.argument(0, "hidden_states")[0])
        _expect("mlp", expanded, mlp.output[0])
        _expect_sum("the layer returns", self.seen[module].output, total, mlp.output[0])
        return fused

    def final_norm(self, module: nn.Module) -> FusedFinalNorm:
        """The decoder's last norm. Raises Unfit."""
        fused = FusedFinalNorm(module)
        self._check_norm(fused)
        return fused

    def rotary(self, module: nn.Module) -> FusedRotary:
        """The decoder's rotary module. Raises Unfit."""
        fused, seen = FusedRotary(module), self.seen[module]
        got = fused(*seen.args, **seen.kwargs)
        for name, mine, own in zip(("cos", "sin"), got, seen.output, strict=True):
            _expect(name, mine, own)
        return fused

    def _check_norm(self, fused: FusedNorm) -> None:
        """Alone, and with a sum before it: the recorded input, in two parts whose sum is exact."""
        seen = self.seen[fused.module]
        x = seen.argument(0, "hidden_states")
        name = type(fused.module).__name__
        _expect(name, fused.of(x), seen.output[0])
        total = fused.add(x[0], torch.zeros_like(x))
        _expect(name, fused.of(total), seen.output[0])

    def _check_attention(self, fused: FusedLayer) -> Tensor:
        """Returns what the module's own attention gave."""
        attention = fused.attention
        seen = self.seen[attention.module]
        own = seen.output[0][0]
        pool, slots = self.batch.kv_pool, self.batch.out_slots
        buffers = {"keys": pool.keys[attention.layer], "values": pool.values[attention.layer]}
        written = {name: buffer[slots] for name, buffer in buffers.items()}
        for buffer in buffers.values():
            buffer.index_fill_(0, slots, 0)
        angles = seen.argument(1, "position_embeddings")
        got = attention(seen.argument(0, "hidden_states")[0], angles, self.batch)
        for name, buffer in buffers.items():
            _expect(name, buffer[slots].flatten(1), written[name].flatten(1))
        _expect("self_attn", got, own)
        return own  # type: ignore[no-any-return]


def _random_batch(
    geometry: tuple[LayerGeometry, ...], dtype: torch.dtype, device: torch.device
) -> ForwardBatch:
    """Two requests of a few tokens, one behind a prefix of random KV."""
    lens = [prefix + extend for prefix, extend in zip(PREFIX_LENS, EXTEND_LENS, strict=True)]
    pool = KvPool(geometry, 1 + sum(lens), dtype, device)
    generator = torch.Generator().manual_seed(0)
    for buffer in (*pool.keys, *pool.values):
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    table = RowTable(3, max(lens), device)
    table.slots[1, : lens[0]] = torch.arange(1, 1 + lens[0])
    table.slots[2, : lens[1]] = torch.arange(1 + lens[0], 1 + sum(lens))
    return extend_forward_batch(
        kv_pool=pool,
        row_table=table,
        rows=torch.tensor([1, 2], device=device),
        prefix_lens=PREFIX_LENS,
        extend_lens=EXTEND_LENS,
    )


def _random_inputs(model: Any, parameter: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    t = sum(EXTEND_LENS)
    spans = zip(PREFIX_LENS, EXTEND_LENS, strict=True)
    inputs = {
        "input_ids": torch.randint(model.config.vocab_size, (1, t), generator=generator),
        "position_ids": torch.cat([torch.arange(start, start + n) for start, n in spans])[None],
        # a 4-D mask is handed on as it is, and our attention takes none
        "attention_mask": torch.zeros(1, 1, 1, 1),
    }
    if "target_hidden" in signature(model.forward).parameters:
        hidden = torch.randn(1, t, model.config.hidden_size, generator=generator)
        inputs["target_hidden"] = hidden.to(parameter.dtype)
    return {name: value.to(parameter.device) for name, value in inputs.items()}


def _expect(what: str, got: Tensor, own: Tensor) -> None:
    """Rows of `got` are those of `own`, off by no more than a few roundings of their length. Raises Unfit."""
    if (got.shape, got.dtype) != (own.shape, own.dtype):
        raise Unfit(f"{what} gives {own.dtype} {list(own.shape)}")
    wide, right = got.double(), own.double()
    error = (wide - right).norm(dim=-1)
    bound = ROUNDINGS * torch.finfo(own.dtype).eps * right.norm(dim=-1)
    if not bool((error <= bound).all()):  # NaN fits nowhere
        worst = float((error / right.norm(dim=-1)).max())
        raise Unfit(f"{what} gives other numbers when fused (off by {worst:.1e})")


def _expect_sum(what: str, total: Any, a: Tensor, b: Tensor) -> None:
    """`total` is `a + b`, each element off by no more than its rounding. Raises Unfit."""
    if not isinstance(total, Tensor) or total.shape != a.shape:
        raise Unfit(f"{what} something else than the residual sum")
    wide = a.double() + b.double()
    bound = torch.finfo(a.dtype).eps * (a.abs() + b.abs()).double()
    if not bool(((total.double() - wide).abs() <= bound).all()):
        raise Unfit(f"{what} something else than the residual sum")
