"""A draft head without KV of its own: its queries read the target's (the way of Gemma 4's assistant models).

It gets the newest token and the target's hidden state of the position before it, and says what comes next; then its
own token and its own recurrent state, and so on. Each of its layers attends to the KV that one named layer of
the target has of the known text. All draft steps ask from one place, the last one that has KV: what was drafted since
is known to the recurrent state only. So it needs no prefill, and rejected drafts leave nothing behind.

To train it call the head on whole sequences, `[b, t]` and `[b, t, h]`, with `target_kv`: place `p` gets token `p + 1` and
the target's hidden state of `p`, and sees KV of `0 .. p`. For the next unrolled step give token `p + 2`, the
`hidden_states` of the result, and the same positions and KV.
"""

from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class FrozenKvAttention(nn.Module):
    """Queries only. `layer_idx` is the target's layer whose keys and values they meet."""

    is_causal = True

    def __init__(self, config: Any, target_layer: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = target_layer
        self.head_dim, self.num_heads = head_dim, config.num_attention_heads
        self.num_key_value_groups = self.num_heads // num_kv_heads
        self.scaling = head_dim**-0.5
        self.sliding_window = getattr(config, "sliding_window", None)
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * head_dim, config.hidden_size, bias=False)

    def forward(
        self,
        hidden: Float[Tensor, "b t h"],
        rotary: tuple[Tensor, Tensor],
        target_kv: dict[int, tuple[Tensor, Tensor]] | None,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> Float[Tensor, "b t h"]:
        from transformers import AttentionInterface
        from transformers.models.llama.modeling_llama import eager_attention_forward, rotate_half

        query = self.q_proj(hidden).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        cos, sin = (angle[:, None] for angle in rotary)
        query = query * cos + rotate_half(query) * sin
        key, value = (None, None) if target_kv is None else target_kv[self.layer_idx]
        attend = AttentionInterface().get_interface(self.config._attn_implementation, eager_attention_forward)
        attended, _ = attend(
            self, query, key, value, attention_mask,
            scaling=self.scaling, sliding_window=self.sliding_window, **kwargs,
        )  # fmt: skip
        return self.o_proj(attended.flatten(2))  # type: ignore[no-any-return]


class FrozenKvLayer(nn.Module):
    """A Llama layer on another model's KV."""

    def __init__(self, config: Any, target_layer: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaMLP

        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = FrozenKvAttention(config, target_layer, num_kv_heads, head_dim)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, hidden: Float[Tensor, "b t h"], *args: Any, **kwargs: Any) -> Float[Tensor, "b t h"]:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), *args, **kwargs)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class FrozenKvDecoder(nn.Module):
    """Projection, layers, norm. `last_hidden_state` is the recurrent state, as wide as the target's hidden states."""

    def __init__(self, config: Any, target_config: Any, target_layers: tuple[int, ...]) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        width, target_width = config.hidden_size, target_config.hidden_size
        self.embed_tokens: nn.Module = nn.Identity()  # the target's, as soon as it is known
        self.pre_projection = nn.Linear(2 * target_width, width, bias=False)
        kv_heads = kv_heads_of(target_config)
        self.layers = nn.ModuleList(
            FrozenKvLayer(config, layer, kv_heads, config.head_dim) for layer in target_layers
        )
        self.norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.post_projection = nn.Linear(width, target_width, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)

    def forward(
        self,
        input_ids: Int[Tensor, "b t"],
        position_ids: Int[Tensor, "b t"],
        target_hidden: Float[Tensor, "b t h"] | None,
        target_kv: dict[int, tuple[Tensor, Tensor]] | None,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> SimpleNamespace:
        embedded = self.embed_tokens(input_ids)
        state = torch.zeros_like(embedded) if target_hidden is None else target_hidden.to(embedded.dtype)
        hidden = self.pre_projection(torch.cat([embedded, state], -1))
        rotary = self.rotary_emb(hidden, position_ids=position_ids)
        for layer in self.layers:
            hidden = layer(hidden, rotary, target_kv, attention_mask, **kwargs)
        normed = self.norm(hidden)
        return SimpleNamespace(last_hidden_state=self.post_projection(normed), normed=normed)


class FrozenKvHead(nn.Module):
    """A draft head with the interface of a causal LM, whose layers read the target's KV.

    `config`: a Llama config; `config.target_layer_ids` names the target's layer that each of its layers reads (by
    default the last one), `config.sliding_window`, if there is one, how many tokens it sees. Its queries meet the
    target's keys, so `head_dim` and `rope_parameters` must be the target's. The embedding is the target's; so is the
    LM head, unless `own_lm_head`. Raises ValueError naming the setting that does not fit.
    """

    def __init__(self, config: Any, target: Any, *, own_lm_head: bool = False) -> None:
        super().__init__()
        self.target_layers = check_config(config, target.config, own_lm_head)
        self.config = config
        self.decoder = FrozenKvDecoder(config, target.config, self.target_layers)
        weight = target.get_input_embeddings().weight
        self.to(dtype=weight.dtype, device=weight.device)
        # Shared after the move, so that no second copy of the target's tables is made.
        self.decoder.embed_tokens = target.get_input_embeddings()
        self.lm_head = target.get_output_embeddings()
        if own_lm_head:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False).to(weight)
        self.requires_grad_(False)

    @property
    def recurrent_size(self) -> int:
        """Width of the recurrent state: that of the target's hidden states."""
        return self.decoder.post_projection.out_features

    def get_decoder(self) -> nn.Module:
        return self.decoder

    def forward(
        self,
        input_ids: Int[Tensor, "b t"],
        position_ids: Int[Tensor, "b t"],
        target_hidden: Float[Tensor, "b t h"] | None = None,
        logits_to_keep: Int[Tensor, " r"] | None = None,
        target_kv: dict[int, tuple[Tensor, Tensor]] | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> SimpleNamespace:
        """`.logits` `[b, r, v]` (`r`: the places kept, or all), `.hidden_states` `[b, t, h]`, the recurrent state.

        `target_kv`: for training, (keys, values) `[b, kv_heads, t, head_dim]` by target layer, keys as the target's
        attention gets them; None where a forward batch says what is read. `attention_mask`: for training with a
        sliding window, what to add to the logits, `[b, 1, t, t]`; None is causal.
        """
        kwargs.pop("use_cache", None)
        out = self.decoder(input_ids, position_ids, target_hidden, target_kv, attention_mask, **kwargs)
        normed = out.normed if logits_to_keep is None else out.normed[:, logits_to_keep]
        return SimpleNamespace(logits=self.lm_head(normed), hidden_states=out.last_hidden_state)


def kv_heads_of(config: Any) -> int:
    """Heads that a target's layer keeps keys and values of."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def check_config(config: Any, target_config: Any, own_lm_head: bool) -> tuple[int, ...]:
    """The target's layer that each layer reads. Raises ValueError for a setting that does not fit the target."""

    def refuse(setting: str, value: Any, needed: str) -> ValueError:
        return ValueError(
            f"speculative_draft_model_path: the frozen-KV head's {setting}={value} does not fit: {needed}; use a head "
            "that was made for this target"
        )

    num_layers = int(target_config.num_hidden_layers)
    layers = getattr(config, "target_layer_ids", None) or [num_layers - 1] * config.num_hidden_layers
    if len(layers) != config.num_hidden_layers or not all(0 <= layer < num_layers for layer in layers):
        raise refuse(
            "target_layer_ids",
            list(layers),
            f"it must name one of the target's layers, 0 to {num_layers - 1}, for each of its "
            f"{config.num_hidden_layers} layers",
        )
    head_dim = getattr(target_config, "head_dim", None) or (
        target_config.hidden_size // target_config.num_attention_heads
    )
    if config.head_dim != head_dim:
        raise refuse("head_dim", config.head_dim, f"the target's keys are {head_dim} wide")
    if config.num_attention_heads % kv_heads_of(target_config):
        raise refuse(
            "num_attention_heads",
            config.num_attention_heads,
            f"it must be a multiple of the target's {kv_heads_of(target_config)} KV heads",
        )
    rope = getattr(target_config, "rope_parameters", None)
    if rope is not None and config.rope_parameters != rope:
        raise refuse("rope_parameters", config.rope_parameters, f"the target's are {rope}")
    if not own_lm_head and config.hidden_size != target_config.hidden_size:
        raise refuse(
            "hidden_size",
            config.hidden_size,
            f"without an lm_head.weight of its own it must be the target's {target_config.hidden_size}",
        )
    return tuple(int(layer) for layer in layers)
