"""Runs a transformers causal LM, or a draft head with the same interface, on paged KV."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from spec_v2.model_executor.attention import NAME, GeometryProbe, NotOnSlots, register
from spec_v2.model_executor.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """`logits` of the tokens asked for, in the model's dtype; `hidden_states` of all tokens.

    The hidden states are those after the last norm, or with `aux_layers` the inputs of those layers side by side.
    """

    logits: Float[Tensor, "r v"]
    hidden_states: Float[Tensor, "t h"]


class ModelRunner:
    """A model, what it needs per token (`geometry`) and per request (`state_geometry`), and one way to call it.

    `known_mixers`: class names of the recurrent layers that could have been ours, for errors to list. Raises ValueError
    at construction where the model's attention wants something that we don't honour, does not go through transformers'
    attention interface, or scales its positions by the running length; and where a layer is recurrent and not ours.
    """

    def __init__(
        self,
        model: Any,
        context_length: int,
        field: str = "model_path",
        aux_layers: tuple[int, ...] = (),
        known_mixers: Collection[str] = (),
    ) -> None:
        register()
        self.model = model
        self.context_length = context_length
        self._configs = _switch_attention(self.model)
        self._last_hidden: Tensor | None = None
        self._is_mine = False  # the forward that runs is ours: engines may share a model
        # A mask that is 4-D already is handed on as it is. Without one transformers reads the positions on the
        # host to see whether they are packed sequences, which would wait for the device in every forward.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=next(model.parameters()).device)
        self._aux: dict[int, Tensor] = {}
        self._hooks = [self.model.get_decoder().register_forward_hook(self._keep_hidden)]
        for place, index in enumerate(aux_layers):  # a shallow target may name one layer twice
            layer = self.model.get_decoder().layers[index]
            keep = partial(self._keep_aux, place)
            self._hooks.append(layer.register_forward_pre_hook(keep, with_kwargs=True))
        try:
            probe = probe_attention(self.model, field, known_mixers)
        except BaseException:
            self.detach()
            raise
        self.geometry, self.attention_options = probe.geometry, probe.options
        self.state_geometry = probe.states.layers
        self.vocab_size = int(self.model.config.vocab_size)
        self.hidden_size = int(getattr(self.model, "recurrent_size", None) or self.model.config.hidden_size)
        # of the hidden states that a forward gives
        self.output_width = int(self.model.config.hidden_size) * max(len(aux_layers), 1)
        # ids in the target's vocabulary, of a head whose vocabulary is a part of it
        self.target_ids: Tensor | None = getattr(self.model, "target_ids", None)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype  # type: ignore[no-any-return]

    def forward(
        self,
        input_ids: Int[Tensor, " t"],
        positions: Int[Tensor, " t"],
        forward_batch: ForwardBatch,
        logits_at: Int[Tensor, " r"] | None = None,
        target_hidden: Float[Tensor, "t h"] | None = None,
        module: int | None = None,
    ) -> ModelOutput:
        """One forward over `t` tokens. `logits_at` picks the tokens whose logits are wanted (None: all).

        `module`: which one of a draft model that has one for each draft step.
        `positions` beyond the context are clamped: only drafts that cannot be emitted any more have them.
        """
        extra: dict[str, Any] = {}
        if logits_at is not None:
            extra["logits_to_keep"] = logits_at
        if target_hidden is not None:
            extra["target_hidden"] = target_hidden[None]
        if module is not None:
            extra["module"] = module
        self._is_mine = True
        try:
            output = self.model(
                input_ids=input_ids[None],
                attention_mask=self._no_mask,
                position_ids=positions.clamp(max=self.context_length - 1)[None],
                use_cache=False,
                forward_batch=forward_batch,
                **extra,
            )
        finally:
            self._is_mine = False
        hidden, self._last_hidden = self._last_hidden, None
        assert hidden is not None
        return ModelOutput(output.logits[0], hidden[0])

    def detach(self) -> None:
        """Give the model its own attention back."""
        for hook in self._hooks:
            hook.remove()
        _give_back(self._configs)
        self._configs = []

    def _keep_hidden(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._is_mine:
            return
        self._last_hidden = output.last_hidden_state
        if self._aux:
            self._last_hidden = torch.cat([self._aux[i] for i in sorted(self._aux)], -1)
            self._aux.clear()

    def _keep_aux(self, place: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_mine:
            self._aux[place] = args[0] if args else kwargs["hidden_states"]


_CACHES = {
    "cache",
    "cache_params",
    "past_key_values",
    "past_key_value",
}  # transformers' names for it, old and new

_lent: dict[int, tuple[Any, str, int]] = {}  # id(config) -> config, its own attention, runners that use ours


def _switch_attention(model: Any) -> list[Any]:
    """Set our attention in every config of the model. Returns the configs, for `_give_back`."""
    found = {
        id(c): c for c in (getattr(module, "config", None) for module in model.modules()) if c is not None
    }
    configs = [c for c in found.values() if hasattr(c, "_attn_implementation")]
    for config in configs:
        _, own, users = _lent.get(id(config), (config, config._attn_implementation, 0))
        _lent[id(config)] = (config, own, users + 1)
        config._attn_implementation = NAME
    return configs


def _give_back(configs: list[Any]) -> None:
    """The last runner on a config puts its own attention back, whatever order they are closed in."""
    for config in configs:
        _, own, users = _lent.pop(id(config))
        if users > 1:
            _lent[id(config)] = (config, own, users - 1)
        else:
            config._attn_implementation = own


@contextmanager
def on_slots(model: Any) -> Iterator[None]:
    """The model calls our attention while the context is open."""
    register()
    configs = _switch_attention(model)
    try:
        yield
    finally:
        _give_back(configs)


def probe_attention(model: Any, field: str, known_mixers: Collection[str] = ()) -> GeometryProbe:
    """Run two tokens through the model and see what each layer's attention, or its recurrence, is given.

    The model must be on our attention. Raises ValueError where it wants something that we don't honour.
    """
    name, config = type(model).__name__, model.config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = {r.get("rope_type") for r in (rope, *rope.values()) if isinstance(r, dict)}
    if refused := kinds & {"dynamic", "longrope"}:
        raise ValueError(
            f"{field}={name}: rope_type={refused.pop()!r} changes with the running length, so cached keys "
            "would go stale; use a model with a fixed rope_type (default, linear, llama3, yarn)"
        )
    probe = GeometryProbe()
    device = next(model.parameters()).device
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    positions = torch.arange(2, device=device)[None]
    try:
        with torch.no_grad():
            model(input_ids=ids, position_ids=positions, use_cache=False, forward_batch=probe)
    except NotOnSlots:
        raise ValueError(
            f"{field}={name}: it does not hand keywords on to its attention; use a model that does"
        ) from None
    if probe.unknown:
        raise ValueError(
            f"{field}={name}: its attention also wants {sorted(probe.unknown)}, which spec_v2 does not honour; "
            "use a model whose attention is plain softmax over keys (sliding windows, softcap, sinks are fine)"
        )
    num_layers = int(config.num_hidden_layers)
    num_ours = len({*probe.layers, *probe.states.layers}) + probe.num_readers
    strangers = _stateful_strangers(model, probe, known_mixers)
    if strangers or num_ours != num_layers:
        raise ValueError(
            f"{field}={name}: {num_ours} of {num_layers} layers call transformers' attention interface or are recurrent "
            f"layers that are supported; not supported: {', '.join(strangers) or 'the others'}. Use an attention-only "
            f"causal LM, or one whose recurrent layers are among {', '.join(known_mixers) or 'none'}"
        )
    return probe


def _stateful_strangers(model: Any, probe: GeometryProbe, known_mixers: Collection[str]) -> list[str]:
    """Class names of the parts of layers that keep something in a cache, and would keep it there and not with us.

    A layer may have one beside its attention, so counting layers does not find them.
    """
    attending = {id(module) for module in probe.modules}

    def is_ours(module: nn.Module) -> bool:
        return id(module) in attending or type(module).__name__ in known_mixers

    return sorted(
        {
            type(module).__name__
            for module in model.modules()
            if getattr(module, "layer_idx", None) is not None
            and _CACHES & set(signature(module.forward).parameters)
            and not any(map(is_ours, module.modules()))
        }
    )
