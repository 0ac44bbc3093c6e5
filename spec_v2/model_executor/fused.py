"""Decoder layers in eight or nine launches, laid over transformers' own modules from outside.

    norm (with the sum before it) -> q, k, v -> rotary and KV write -> attention -> output projection
    norm (with the sum before it) -> gate, up, silu(gate) * up -> down

The gating is a launch of its own where there is more than one token.
A layer written as separate PyTorch operations launches about 35 kernels; for one token each of them takes longer to start
than to run. Modules keep their places, names, weights and hooks: a fused layer is a `forward` set on the instance
(`del layer.forward` takes it off), which falls back to the module's own wherever no forward batch is given. Layers are
recognised by their parts; `fuse` then compares every stage with the module's own numbers.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from spec_v2.kernels.few_token_linear import MAX_TOKENS, few_token_linear, one_token_gated
from spec_v2.kernels.rms_norm import add_rms_norm, rms_norm
from spec_v2.kernels.rotary_angles import rotary_angles
from spec_v2.kernels.rotary_kv_write import HeadNorms, rotary_kv_write
from spec_v2.kernels.silu_mul import silu_mul
from spec_v2.model_executor.attention import attend_written
from spec_v2.model_executor.forward_batch import ForwardBatch
from spec_v2.model_executor.packing import packed_sizes

LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
EAGLE3_PARTS = {*LAYER_PARTS, "hidden_norm"}
STEADY_ROPES = {"default", "linear", "llama3", "yarn"}  # inverse frequencies that never change


class Unfit(Exception):
    """Why a module keeps its own forward."""


# -- a layer -----------------------------------------------------------------------------------------------


class FusedLayer:
    """The forward of a pre-norm decoder layer. `next_norm` is the norm that reads this layer's output."""

    def __init__(self, layer: Any, options: dict[int, dict[str, Any]]) -> None:
        self.layer = layer
        self.input_norm = FusedNorm(layer.input_layernorm)
        self.attention = FusedAttention(layer.self_attn, options)
        self.post_norm = FusedNorm(layer.post_attention_layernorm)
        self.mlp = fused_mlp(layer.mlp)
        self.next_norm: FusedNorm | None = None

    def __call__(
        self, hidden_states: Float[Tensor, "b t h"], *args: Any, **kwargs: Any
    ) -> Float[Tensor, "b t h"]:
        batch = kwargs.get("forward_batch")
        if not isinstance(batch, ForwardBatch):
            return type(self.layer).forward(self.layer, hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        normed = self.input_norm.of(hidden_states)
        return self.after_input(hidden_states, normed, kwargs["position_embeddings"], batch)

    def after_input(
        self,
        residual: Float[Tensor, "1 t h"],
        normed: Float[Tensor, "t wide"],
        angles: tuple[Tensor, Tensor],
        batch: ForwardBatch,
    ) -> Float[Tensor, "1 t h"]:
        attended = self.attention(normed, angles, batch)
        residual = self.post_norm.add(attended, residual)
        expanded = self.mlp(self.post_norm.of(residual))
        if self.next_norm is None:
            return residual + expanded
        return self.next_norm.add(expanded, residual)


class FusedEagle3Layer(FusedLayer):
    """The forward of EAGLE-3's layer, whose attention reads two normed inputs side by side."""

    def __init__(self, layer: Any, options: dict[int, dict[str, Any]]) -> None:
        super().__init__(layer, options)
        self.hidden_norm = FusedNorm(layer.hidden_norm)

    def __call__(  # type: ignore[override]
        self, embedded: Float[Tensor, "b t h"], hidden: Float[Tensor, "b t h"], rotary: Any, **kwargs: Any
    ) -> Float[Tensor, "b t h"]:
        batch = kwargs.get("forward_batch")
        if not isinstance(batch, ForwardBatch):
            return type(self.layer).forward(self.layer, embedded, hidden, rotary, **kwargs)  # type: ignore[no-any-return]
        both = torch.cat([self.input_norm.of(embedded), self.hidden_norm.of(hidden)], -1)
        return self.after_input(hidden, both, rotary, batch)


# -- its parts ---------------------------------------------------------------------------------------------


class FusedNorm:
    """An RMS norm, computed along with the sum that it reads where that sum is known to be its input.

    `add` returns the sum, a tensor like any other, and keeps its norm until `of` is asked about that very tensor. So
    whoever looks at hidden states between layers sees them, and whoever replaces them gets the norm of the replacement.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.is_identity = isinstance(module, nn.Identity)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        is_norm = isinstance(getattr(module, "weight", None), Tensor) and isinstance(eps, float)
        if not self.is_identity and (not is_norm or getattr(module, "bias", None) is not None):
            raise Unfit(f"{type(module).__name__} is no RMS norm")
        self.eps: Any = eps
        self._ready: tuple[Tensor, Tensor] | None = None

    def add(self, x: Float[Tensor, "t h"], residual: Float[Tensor, "1 t h"]) -> Float[Tensor, "1 t h"]:
        """`residual + x`."""
        if self.is_identity:
            return residual + x
        total, normed = add_rms_norm(x, residual[0], self.module.weight, self.eps)
        total = total[None]
        self._ready = total, normed
        return total

    def of(self, x: Float[Tensor, "1 t h"]) -> Float[Tensor, "t h"]:
        """The norm of `x`."""
        ready, self._ready = self._ready, None
        if ready is not None and ready[0] is x:
            return ready[1]
        return x[0] if self.is_identity else rms_norm(x[0], self.module.weight, self.eps)


class FusedFinalNorm(FusedNorm):
    """The forward of the decoder's last norm: what the last layer has computed, else the module's own."""

    def __call__(self, hidden_states: Float[Tensor, "b t h"]) -> Float[Tensor, "b t h"]:
        if self._ready is not None and self._ready[0] is hidden_states:
            return self.of(hidden_states)[None]
        return type(self.module).forward(self.module, hidden_states)  # type: ignore[no-any-return]


class FusedAttention:
    """Packed projections, rotary positions and the KV write in one kernel, attention, output projection.

    `options`: by layer, what transformers' module passes to its attention function.
    """

    def __init__(self, attention: Any, options: dict[int, dict[str, Any]]) -> None:
        parts = {name for name, _ in attention.named_children()}
        projections = {"q_proj", "k_proj", "v_proj", "o_proj"}
        if not projections <= parts <= projections | {"q_norm", "k_norm"}:
            raise Unfit(f"{type(attention).__name__} consists of {', '.join(sorted(parts))}")
        sizes = packed_sizes(attention.q_proj)
        if sizes is None:
            raise Unfit("q_proj, k_proj and v_proj could not be packed")
        self.module, self.head_dim = attention, int(attention.head_dim)
        if any(size % self.head_dim for size in sizes):
            raise Unfit(f"projections of {sizes} columns are no heads of {self.head_dim}")
        if getattr(attention.config, "clip_qkv", None) is not None:
            raise Unfit("clip_qkv is set")
        self.heads = [size // self.head_dim for size in sizes]
        self.layer = int(attention.layer_idx)
        self.options = dict(options[self.layer])
        if self.options.pop("s_aux") is not None:
            raise Unfit("it has attention sinks")
        # layers without positions (SmolLM3) are marked by the module
        self.has_positions = bool(getattr(attention, "use_rope", True))
        if "q_norm" in parts or "k_norm" in parts:
            self.q_norm, self.k_norm = FusedNorm(attention.q_norm), FusedNorm(attention.k_norm)
            widths = [norm.module.weight.shape for norm in (self.q_norm, self.k_norm)]
            if widths != [(self.head_dim,)] * 2 or self.q_norm.eps != self.k_norm.eps:
                raise Unfit("q_norm and k_norm are not over single heads")

    def __call__(
        self, normed: Float[Tensor, "t wide"], angles: tuple[Tensor, Tensor], batch: ForwardBatch
    ) -> Float[Tensor, "t h"]:
        product = self.module.q_proj.product(normed).unflatten(1, (-1, self.head_dim))
        pool = batch.kv_pool
        pool.check(batch.out_slots)
        query, key, value = product.split(self.heads, 1)
        query = rotary_kv_write(
            query,
            key,
            value,
            (angles[0][0], angles[1][0]) if self.has_positions else None,
            batch.out_slots,
            pool.keys[self.layer],
            pool.values[self.layer],
            self._head_norms(),
        )
        attended = attend_written(self.layer, query, batch, **self.options)
        return self.module.o_proj(attended.flatten(1))  # type: ignore[no-any-return]

    def _head_norms(self) -> HeadNorms | None:
        if not hasattr(self, "q_norm"):
            return None
        return HeadNorms(self.q_norm.module.weight, self.k_norm.module.weight, self.q_norm.eps)


class FusedMlp:
    """Gate and up in one product, the gating in one kernel (with the product where there is one token), down."""

    def __init__(self, mlp: Any) -> None:
        parts = {name for name, _ in mlp.named_children()}
        if parts != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
            raise Unfit(f"{type(mlp).__name__} consists of {', '.join(sorted(parts))}")
        if type(mlp.act_fn).__name__ not in ("SiLUActivation", "SiLU"):
            raise Unfit(f"its activation is {type(mlp.act_fn).__name__}, not SiLU")
        if packed_sizes(mlp.gate_proj) is None:
            raise Unfit("gate_proj and up_proj could not be packed")
        self.module = mlp

    def __call__(self, x: Float[Tensor, "t h"]) -> Float[Tensor, "t h"]:
        first = self.module.gate_proj
        weight = first.product.weight
        if len(x) == 1 and x.dtype == weight.dtype and first.product.bias is None:
            return self.module.down_proj(one_token_gated(x, weight))  # type: ignore[no-any-return]
        return self.module.down_proj(silu_mul(*first.product(x).split(first.sizes, 1)))  # type: ignore[no-any-return]


class OwnMlp:
    """A feed-forward part that is not fused, mixtures of experts for instance, within a layer that is."""

    def __init__(self, mlp: Any, reason: str) -> None:
        self.module, self.reason = mlp, reason

    def __call__(self, x: Float[Tensor, "t h"]) -> Float[Tensor, "t h"]:
        return self.module(x[None])[0]  # type: ignore[no-any-return]


def fused_mlp(mlp: Any) -> FusedMlp | OwnMlp:
    try:
        return FusedMlp(mlp)
    except Unfit as unfit:
        return OwnMlp(mlp, str(unfit))


class FusedLinear:
    """The forward of a linear layer: few tokens take a kernel of their own, more of them torch's product."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear

    def __call__(self, x: Float[Tensor, "*t k"]) -> Float[Tensor, "*t n"]:
        weight, bias = self.linear.weight, self.linear.bias
        rows = x.flatten(0, -2)
        if len(rows) > MAX_TOKENS or x.dtype != weight.dtype:
            return nn.functional.linear(x, weight, bias)
        return few_token_linear(rows, weight, bias).view(*x.shape[:-1], len(weight))


class FusedRotary:
    """The forward of a decoder's rotary module: cosines and sines of all positions in one kernel."""

    def __init__(self, module: Any) -> None:
        self.module = module
        rope_type = getattr(module, "rope_type", None)
        if not isinstance(rope_type, str) or rope_type not in STEADY_ROPES:
            raise Unfit(f"rope_type={rope_type!r}")

    def __call__(self, x: Tensor, position_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if kwargs or len(position_ids) != 1:
            return type(self.module).forward(self.module, x, position_ids, **kwargs)  # type: ignore[no-any-return]
        cos, sin = rotary_angles(
            position_ids[0], self.module.inv_freq, self.module.attention_scaling, x.dtype
        )
        return cos[None], sin[None]
