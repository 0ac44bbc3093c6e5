"""The EAGLE-3 draft head (Li et al. 2025, arXiv 2503.01840): one layer over three of the target's layers.

At position `p` it gets token `p + 1` and what three layers of the target say at `p` (low, middle, high, side by
side). Later draft steps get the head's own output in their place. It drafts from a reduced vocabulary: `d2t`
says how far each draft id lies below the target's id.
"""

from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

NUM_AUX_LAYERS = 3


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Layers whose *inputs* the head reads: low, middle, high. Raises ValueError for a target too shallow."""
    layers = (2, num_layers // 2, num_layers - 3)
    if num_layers < 6:
        raise ValueError(
            f"speculative_algorithm=EAGLE3 reads the inputs of layers 2, N//2 and N-3, and this target has only "
            f"{num_layers} layers; use EAGLE, or a target with at least 6 layers"
        )
    return layers


class Eagle3Layer(nn.Module):
    """A Llama layer whose attention reads (embedding, hidden) side by side, twice the width."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = LlamaAttention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            out = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * width, out, bias=config.attention_bias))
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(width, eps)
        self.hidden_norm = LlamaRMSNorm(width, eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps)

    def forward(
        self,
        embedded: Float[Tensor, "b t h"],
        hidden: Float[Tensor, "b t h"],
        rotary: Any,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Float[Tensor, "b t h"]:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        attended, _ = self.self_attn(
            hidden_states=both, position_embeddings=rotary, attention_mask=attention_mask, **kwargs
        )
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class Eagle3Decoder(nn.Module):
    """Embedding, fusion and the one layer. Its output, before the last norm, is the recurrent state."""

    def __init__(self, config: Any, target_width: int) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(NUM_AUX_LAYERS * target_width, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, target_hidden: Tensor, **kwargs: Any
    ) -> SimpleNamespace:
        embedded = self.embed_tokens(input_ids)
        is_recurrent = target_hidden.shape[-1] == embedded.shape[-1]
        hidden = target_hidden if is_recurrent else self.fc(target_hidden)
        rotary = self.rotary_emb(hidden, position_ids=position_ids)
        return SimpleNamespace(last_hidden_state=self.midlayer(embedded, hidden, rotary, **kwargs))


class Eagle3Head(nn.Module):
    """A draft head with the interface of a causal LM; logits are over the draft vocabulary.

    `config`: a Llama config with `draft_vocab_size`. The embedding is the target's unless `own_embedding`.
    """

    def __init__(self, config: Any, target: Any, *, own_embedding: bool = False) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        self.config = config
        draft_vocab_size = int(getattr(config, "draft_vocab_size", None) or config.vocab_size)
        self.decoder = Eagle3Decoder(config, target.config.hidden_size)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.long))
        weight = target.get_input_embeddings().weight
        self.to(device=weight.device, dtype=weight.dtype)
        if not own_embedding:
            self.decoder.embed_tokens = target.get_input_embeddings()
        self.requires_grad_(False)

    @property
    def target_ids(self) -> Int[Tensor, " draft_vocab"]:
        """Target-vocabulary id of each draft id."""
        d2t: Tensor = self.d2t  # type: ignore[assignment]
        return d2t + torch.arange(len(d2t), device=d2t.device)

    def get_decoder(self) -> nn.Module:
        return self.decoder

    def hidden_states(
        self,
        input_ids: Int[Tensor, "b t"],
        position_ids: Int[Tensor, "#b t"],
        target_hidden: Float[Tensor, "b t h"] | None = None,
        **kwargs: Any,
    ) -> Float[Tensor, "b t w"]:
        """The decoder's output: what `readout` turns into logits, and the next draft step's `target_hidden`."""
        if target_hidden is None:  # only the geometry probe calls without
            target_hidden = self.lm_head.weight.new_zeros(*input_ids.shape, self.config.hidden_size)
        return self.decoder(input_ids, position_ids, target_hidden, **kwargs).last_hidden_state  # type: ignore[no-any-return]

    def readout(self, hidden: Float[Tensor, "*any w"]) -> Float[Tensor, "*any draft_vocab"]:
        """Logits over the draft vocabulary."""
        return self.lm_head(self.norm(hidden))  # type: ignore[no-any-return]

    def forward(
        self,
        input_ids: Int[Tensor, "1 t"],
        position_ids: Int[Tensor, "1 t"],
        target_hidden: Float[Tensor, "1 t h"] | None = None,
        logits_to_keep: Int[Tensor, " r"] | None = None,
        **kwargs: Any,
    ) -> SimpleNamespace:
        """`.logits` `[1, r, draft vocabulary]`."""
        hidden = self.hidden_states(input_ids, position_ids, target_hidden, **kwargs)
        if logits_to_keep is not None:
            hidden = hidden[:, logits_to_keep]
        return SimpleNamespace(logits=self.readout(hidden))
