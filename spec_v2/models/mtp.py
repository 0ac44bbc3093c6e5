"""Multi-token prediction modules (DeepSeek-V3, arXiv 2412.19437, section 2.2): one small model per draft step.

At position `p` module `i` gets token `p + 1 + i` and what module `i - 1` said at `p` (module 0: the target's hidden
state of `p`), and says what follows token `p + 1 + i`. Embedding and LM head are the target's, unless a module
has a head of its own.

To train module `i` call the head on whole sequences, `[b, t]` and `[b, t, h]`, with `module=i` and no forward batch:
attention is then transformers' own, causal, and `hidden_states` of the result is the next module's `target_hidden`.
"""

import copy
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class SharedHead(nn.Module):
    """A module's last norm, and its LM head where that is not the target's."""

    def __init__(self, config: Any, own_head: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if own_head else None


class MtpModule(nn.Module):
    """Two norms, the linear that joins their outputs, and one decoder layer whose KV is layer `index` of the pool."""

    def __init__(self, config: Any, index: int, own_head: bool) -> None:
        super().__init__()
        from transformers import AutoModel

        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = nn.RMSNorm(width, eps=eps)
        self.hnorm = nn.RMSNorm(width, eps=eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.body = AutoModel.from_config(config)
        self.body.norm = nn.Identity()  # the shared head has it: the next module reads what comes before
        self.body.embed_tokens = None
        self.body.layers[0].self_attn.layer_idx = index
        self.shared_head = SharedHead(config, own_head)

    def forward(
        self, embedded: Float[Tensor, "b t h"], hidden: Float[Tensor, "b t h"], **kwargs: Any
    ) -> Float[Tensor, "b t h"]:
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        return self.body(inputs_embeds=joined, use_cache=False, **kwargs).last_hidden_state  # type: ignore[no-any-return]


class MtpDecoder(nn.Module):
    """Embedding and modules. Its output, before the module's last norm, is what the next module reads."""

    def __init__(self, config: Any, num_modules: int, own_heads: frozenset[int]) -> None:
        super().__init__()
        self.embed_tokens: nn.Module = nn.Identity()  # the target's, as soon as it is known
        modules = [MtpModule(config, i, i in own_heads) for i in range(num_modules)]
        self.mtp = nn.ModuleList(modules)
        self.rotary_emb = modules[0].body.rotary_emb
        for module in modules:
            module.body.rotary_emb = self.rotary_emb

    def forward(
        self,
        input_ids: Int[Tensor, "b t"],
        target_hidden: Float[Tensor, "b t h"] | None,
        module: int | None,
        **kwargs: Any,
    ) -> SimpleNamespace:
        embedded = self.embed_tokens(input_ids)
        hidden = torch.zeros_like(embedded) if target_hidden is None else target_hidden.to(embedded.dtype)
        for i in range(len(self.mtp)) if module is None else (module,):
            hidden = self.mtp[i](embedded, hidden, **kwargs)
        return SimpleNamespace(last_hidden_state=hidden)


class MtpHead(nn.Module):
    """`num_modules` modules with the interface of a causal LM that also takes the number of the module to run.

    `config`: a transformers config of one decoder layer's family, whose `hidden_size` must be the target's.
    `own_heads`: modules with an LM head of their own. Raises ValueError for another width.
    """

    def __init__(
        self, config: Any, target: Any, *, num_modules: int, own_heads: frozenset[int] = frozenset()
    ) -> None:
        super().__init__()
        hidden_size = target.config.hidden_size
        if config.hidden_size != hidden_size:
            raise ValueError(
                f"speculative_draft_model_path: the modules' hidden_size={config.hidden_size} is not the target's "
                f"{hidden_size}; use modules that were trained for this target"
            )
        self.decoder = MtpDecoder(_one_layer(config), num_modules, own_heads)
        self.config = copy.deepcopy(config)
        self.config.num_hidden_layers = num_modules
        weight = target.get_input_embeddings().weight
        self.to(dtype=weight.dtype, device=weight.device)
        # Shared after the move, so that no second copy of the target's tables is made.
        self.decoder.embed_tokens = target.get_input_embeddings()
        self.lm_head = target.get_output_embeddings()
        self.target_ids: Tensor | None = None
        self.requires_grad_(False)

    @property
    def num_modules(self) -> int:
        return len(self.decoder.mtp)

    def keep_hot_tokens(self, token_map: Int[Tensor, " hot"]) -> None:
        """Draft these target ids only (FR-Spec, Zhao et al. 2025, arXiv 2502.14856): fewer rows in each LM head."""
        self.target_ids = token_map.to(self.lm_head.weight.device)
        self.lm_head = _rows_of(self.lm_head, self.target_ids)
        for i in range(self.num_modules):
            last = self.shared_head(i)
            last.head = None if last.head is None else _rows_of(last.head, self.target_ids)

    def shared_head(self, module: int) -> SharedHead:
        """A module's last norm and LM head."""
        return self.decoder.mtp[module].shared_head  # type: ignore[return-value]

    def get_decoder(self) -> nn.Module:
        return self.decoder

    def forward(
        self,
        input_ids: Int[Tensor, "b t"],
        position_ids: Int[Tensor, "b t"],
        target_hidden: Float[Tensor, "b t h"] | None = None,
        logits_to_keep: Int[Tensor, " r"] | None = None,
        module: int | None = None,
        **kwargs: Any,
    ) -> SimpleNamespace:
        """`.logits` `[b, r, v]` (`r`: the places kept, or all), `.hidden_states` `[b, t, h]` for the next module.

        `position_ids` are those of `target_hidden`. `module` None runs all of them on the same tokens, one on the
        output of the other, which shows what each is made of and drafts nothing.
        """
        kwargs["position_ids"] = position_ids
        kwargs.pop("use_cache", None)
        hidden = self.decoder(input_ids, target_hidden, module, **kwargs).last_hidden_state
        kept = hidden if logits_to_keep is None else hidden[:, logits_to_keep]
        last = self.shared_head(-1 if module is None else module)
        lm_head = self.lm_head if last.head is None else last.head
        return SimpleNamespace(logits=lm_head(last.norm(kept)), hidden_states=hidden)


def _one_layer(config: Any) -> Any:
    """The config of a single decoder layer: the kind that would follow the config's last one."""
    config, total = copy.deepcopy(config), config.num_hidden_layers
    for key, value in list(vars(config).items()):
        if "layer" in key and isinstance(value, list) and len(value) == total:
            setattr(config, key, value[-1:])
    if hasattr(config, "first_k_dense_replace"):  # DeepSeek: only the first layers are without experts
        config.first_k_dense_replace = int(config.first_k_dense_replace >= total)
    config.num_hidden_layers = 1
    return config


def _rows_of(linear: nn.Linear, ids: Tensor) -> nn.Linear:
    weight = linear.weight
    rows = nn.Linear(weight.shape[1], len(ids), bias=False).to(weight)
    rows.weight.data.copy_(weight[ids])
    return rows.requires_grad_(False)
