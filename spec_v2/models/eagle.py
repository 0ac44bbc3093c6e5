"""The EAGLE draft head (Li et al. 2024, arXiv 2401.15077): one or more decoder layers over (token, hidden).

At position `p` it gets token `p + 1` and the target's hidden state of `p`, and says what follows token
`p + 1`. Embedding and LM head are the target's, unless the head has its own.
"""

from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class EagleHead(nn.Module):
    """A draft head with the interface of a causal LM.

    `config`: a transformers config of the head's layers; `config.hidden_size` must be the target's.
    `norm_input`, `norm_output`: whether the first layer normalises its input and whether a final norm follows.
    Published EAGLE heads have neither. Raises ValueError where `config` does not fit the target, or where a norm is to be
    left out that its model family has under another name.
    """

    def __init__(
        self,
        config: Any,
        target: Any,
        *,
        norm_input: bool = False,
        norm_output: bool = False,
        own_lm_head: bool = False,
    ) -> None:
        super().__init__()
        from transformers import AutoModel

        hidden_size = target.config.hidden_size
        if config.hidden_size != hidden_size:
            raise ValueError(
                f"speculative_draft_model_path: the head's hidden_size={config.hidden_size} is not the target's "
                f"{hidden_size}; use a head that was trained for this target"
            )
        self.config = config
        self.decoder = AutoModel.from_config(config)
        if not norm_input:
            _leave_out(self.decoder.layers[0], "input_layernorm", "norm_input")
        if not norm_output:
            _leave_out(self.decoder, "norm", "norm_output")
        self.fc = nn.Linear(2 * hidden_size, hidden_size)
        weight = target.get_input_embeddings().weight
        self.to(dtype=weight.dtype, device=weight.device)
        # Shared after the move, so that no second copy of the target's tables is made.
        self.decoder.embed_tokens = target.get_input_embeddings()
        self.lm_head = target.get_output_embeddings()
        if own_lm_head:
            self.lm_head = nn.Linear(hidden_size, config.vocab_size, bias=False).to(weight)
        self.target_ids: Tensor | None = None
        self.requires_grad_(False)

    def keep_hot_tokens(self, token_map: Int[Tensor, " hot"]) -> None:
        """Draft these target ids only (FR-Spec, Zhao et al. 2025, arXiv 2502.14856): fewer rows in the LM head."""
        weight = self.lm_head.weight
        self.target_ids = token_map.to(weight.device)
        self.lm_head = nn.Linear(weight.shape[1], len(token_map), bias=False).to(weight)
        self.lm_head.weight.data.copy_(weight[self.target_ids])
        self.requires_grad_(False)

    def get_decoder(self) -> nn.Module:
        return self.decoder  # type: ignore[no-any-return]

    def hidden_states(
        self,
        input_ids: Int[Tensor, "b t"],
        position_ids: Int[Tensor, "#b t"],
        target_hidden: Float[Tensor, "b t h"] | None = None,
        **kwargs: Any,
    ) -> Float[Tensor, "b t h"]:
        """The decoder's output: what `readout` turns into logits, and the next draft step's `target_hidden`."""
        embedded = self.decoder.embed_tokens(input_ids)
        if target_hidden is None:  # only the geometry probe calls without
            target_hidden = torch.zeros_like(embedded)
        fused = self.fc(torch.cat([embedded, target_hidden.to(embedded.dtype)], -1))
        return self.decoder(inputs_embeds=fused, position_ids=position_ids, **kwargs).last_hidden_state  # type: ignore[no-any-return]

    def readout(self, hidden: Float[Tensor, "*any h"]) -> Float[Tensor, "*any v"]:
        """Logits over the vocabulary that the head drafts from."""
        return self.lm_head(hidden)  # type: ignore[no-any-return]

    def forward(
        self,
        input_ids: Int[Tensor, "1 t"],
        position_ids: Int[Tensor, "1 t"],
        target_hidden: Float[Tensor, "1 t h"] | None = None,
        logits_to_keep: Int[Tensor, " r"] | None = None,
        **kwargs: Any,
    ) -> SimpleNamespace:
        """`.logits` `[1, r, v]`; the recurrent hidden state is the decoder's output."""
        hidden = self.hidden_states(input_ids, position_ids, target_hidden, **kwargs)
        if logits_to_keep is not None:
            hidden = hidden[:, logits_to_keep]
        return SimpleNamespace(logits=self.readout(hidden))


def _leave_out(owner: nn.Module, name: str, option: str) -> None:
    if not hasattr(owner, name):
        raise ValueError(
            f"speculative_draft_model_path: {type(owner).__name__} has no {name} to leave out; set {option} to true, or "
            "use a head of another model family"
        )
    setattr(owner, name, nn.Identity())
