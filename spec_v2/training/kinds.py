"""What differs between the kinds of draft models: how one is built, what it reads, and under which names it is saved."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from spec_v2.models.draft_models import (
    load_eagle3_head,
    load_eagle_head,
    load_frozen_kv_head,
    load_mtp_head,
)
from spec_v2.models.eagle import EagleHead
from spec_v2.models.eagle3 import Eagle3Head, default_aux_layers
from spec_v2.models.frozen_kv_mtp import FrozenKvHead
from spec_v2.models.mtp import MtpHead
from spec_v2.training.capture import Captured
from spec_v2.training.shards import Batch
from spec_v2.training.unroll import shift, unroll, use_attention


class Kind(ABC):
    """A kind of draft model. `algorithm` and `multi_layer` are the engine's settings that run it."""

    name: ClassVar[str]
    algorithm: ClassVar[str]
    title: ClassVar[str]
    multi_layer: ClassVar[bool] = False
    first_lead: ClassVar[int] = 1
    """Step `i` of a chain that starts at position `p` says what follows token `p + first_lead + i`."""
    num_steps: ClassVar[int] = 5
    lr: ClassVar[float] = 1e-3
    reduces_vocabulary: ClassVar[bool] = False
    shapes: ClassVar[tuple[tuple[int, int, int], ...]] = ((5, 1, 6), (5, 4, 16))
    """What is evaluated: (num_steps, topk, num_draft_tokens)."""

    def aux_layers(self, target: Any) -> tuple[int, ...]:
        """Target layers whose inputs the draft model reads; none where it reads the last hidden states."""
        return ()

    def kv_layers(self, target: Any) -> tuple[int, ...]:
        """Target layers whose keys and values the draft model reads."""
        return ()

    @abstractmethod
    def build(self, target: Any, vocabulary: Int[Tensor, " v"] | None, num_steps: int) -> nn.Module:
        """A fresh draft model for a target, in the target's dtype."""

    @abstractmethod
    def load(self, folder: Path, target: Any, num_steps: int) -> nn.Module:
        """A saved draft model. Raises ValueError where it does not fit."""

    @abstractmethod
    def states(
        self, head: Any, batch: Batch, captured: Captured, num_steps: int
    ) -> list[Float[Tensor, "b t h"]]:
        """What the model says in each draft step of the chains that start everywhere, before `readout`."""

    def readout(self, head: Any, states: Float[Tensor, "m h"], step: int) -> Float[Tensor, "m v"]:
        """Logits of one step's chains."""
        return head.readout(states)  # type: ignore[no-any-return]

    @abstractmethod
    def tensors(self, head: Any) -> dict[str, Tensor]:
        """What is saved, under published names; what is shared with the target is left out."""

    def settings(self, head: Any) -> Mapping[str, Any]:
        """What `config.json` holds."""
        return head.config.to_dict() | {"dtype": "bfloat16"}  # type: ignore[no-any-return]


class Eagle(Kind):
    """EAGLE (Li et al. 2024, arXiv 2401.15077), trained on the target's distribution over unrolled steps."""

    name, algorithm, title = "eagle", "EAGLE", "EAGLE"

    def build(self, target: Any, vocabulary: Int[Tensor, " v"] | None, num_steps: int) -> EagleHead:
        head = EagleHead(one_layer_config(target), target)
        with (
            torch.no_grad()
        ):  # at first the next hidden state is this one: right in scale, and a residual away
            head.fc.weight[:, target.config.hidden_size :] = torch.eye(target.config.hidden_size)
            head.fc.bias.zero_()
        return head

    def load(self, folder: Path, target: Any, num_steps: int) -> EagleHead:
        return load_eagle_head(folder, target)

    def states(self, head: Any, batch: Batch, captured: Captured, num_steps: int) -> list[Tensor]:
        return unroll(head, batch.tokens, captured.hidden, num_steps)

    def tensors(self, head: Any) -> dict[str, Tensor]:
        return _own(head, {"decoder.embed_tokens.weight", "lm_head.weight"})

    def settings(self, head: Any) -> Mapping[str, Any]:
        return {**super().settings(head), "architectures": ["LlamaForCausalLMEagle"]}


class Eagle3(Kind):
    """EAGLE-3 (Li et al. 2025, arXiv 2503.01840): three layers in, a reduced vocabulary out."""

    name, algorithm, title = "eagle3", "EAGLE3", "EAGLE-3"
    reduces_vocabulary = True

    def aux_layers(self, target: Any) -> tuple[int, ...]:
        return default_aux_layers(int(target.config.num_hidden_layers))

    def build(self, target: Any, vocabulary: Int[Tensor, " v"] | None, num_steps: int) -> Eagle3Head:
        config = one_layer_config(target)
        vocab_size = int(config.vocab_size)
        ids = torch.arange(vocab_size) if vocabulary is None else vocabulary.cpu()
        config.draft_vocab_size = len(ids)
        head = Eagle3Head(config, target)
        with torch.no_grad():  # it begins with the target's own readout
            head.lm_head.weight.copy_(
                target.get_output_embeddings().weight[ids.to(head.lm_head.weight.device)]
            )
            if (norm := getattr(target.get_decoder(), "norm", None)) is not None:
                head.norm.weight.copy_(norm.weight)
        head.d2t.copy_(ids - torch.arange(len(ids)))  # type: ignore[operator]
        return head

    def load(self, folder: Path, target: Any, num_steps: int) -> Eagle3Head:
        return load_eagle3_head(folder, target)

    def states(self, head: Any, batch: Batch, captured: Captured, num_steps: int) -> list[Tensor]:
        return unroll(head, batch.tokens, captured.aux, num_steps)

    def tensors(self, head: Any) -> dict[str, Tensor]:
        is_draftable = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        is_draftable[head.target_ids.cpu()] = True
        return _own(head, {"decoder.embed_tokens.weight"}) | {"t2d": is_draftable}

    def settings(self, head: Any) -> Mapping[str, Any]:
        return {**super().settings(head), "architectures": ["LlamaForCausalLMEagle3"]}


class Mtp(Kind):
    """MTP modules (DeepSeek-V3, arXiv 2412.19437): one per draft step, each on the output of the one before."""

    name, algorithm, title = "mtp", "EAGLE", "MTP modules"
    multi_layer = True
    num_steps = 3
    shapes = ((3, 1, 4),)

    def build(self, target: Any, vocabulary: Int[Tensor, " v"] | None, num_steps: int) -> MtpHead:
        head = MtpHead(one_layer_config(target), target, num_modules=num_steps)
        norm = getattr(target.get_decoder(), "norm", None)
        if norm is not None:  # it begins with the target's own readout
            for module in range(num_steps):
                head.shared_head(module).norm.weight.copy_(norm.weight)
        return head

    def load(self, folder: Path, target: Any, num_steps: int) -> MtpHead:
        return load_mtp_head(folder, target, num_steps)

    def states(self, head: Any, batch: Batch, captured: Captured, num_steps: int) -> list[Tensor]:
        use_attention(head, "sdpa")
        positions = _positions(batch.tokens)
        hidden, states = captured.hidden, []
        for module in range(num_steps):
            tokens = shift(batch.tokens, 1 + module)
            hidden = head.decoder(tokens, hidden, module, position_ids=positions).last_hidden_state
            states.append(hidden)
        return states

    def readout(self, head: Any, states: Float[Tensor, "m h"], step: int) -> Float[Tensor, "m v"]:
        return head.lm_head(head.shared_head(step).norm(states))  # type: ignore[no-any-return]

    def tensors(self, head: Any) -> dict[str, Tensor]:
        own = _own(head, {"decoder.embed_tokens.weight", "lm_head.weight"})
        return {re.sub(r"^mtp\.(\d+)\.(body\.layers\.0\.)?", r"layers.\1.", name): own[name] for name in own}

    def settings(self, head: Any) -> Mapping[str, Any]:
        return {**super().settings(head), "num_nextn_predict_layers": head.num_modules}


class FrozenKvMtp(Kind):
    """A head on the target's own KV (the way of Gemma 4's assistants). All its steps ask from the chain's start."""

    name, algorithm, title = "frozen_kv_mtp", "FROZEN_KV_MTP", "Frozen-KV head"
    num_steps = 3
    shapes = ((3, 1, 4), (3, 4, 12))

    def kv_layers(self, target: Any) -> tuple[int, ...]:
        """The middle one and the last one."""
        num_layers = int(target.config.num_hidden_layers)
        return num_layers // 2, num_layers - 1

    def build(self, target: Any, vocabulary: Int[Tensor, " v"] | None, num_steps: int) -> FrozenKvHead:
        config = one_layer_config(target)
        config.num_hidden_layers = len(self.kv_layers(target))
        config.target_layer_ids = list(self.kv_layers(target))
        head = FrozenKvHead(config, target)
        if (norm := getattr(target.get_decoder(), "norm", None)) is not None:
            head.decoder.norm.weight.copy_(norm.weight)
        return head

    def load(self, folder: Path, target: Any, num_steps: int) -> FrozenKvHead:
        return load_frozen_kv_head(folder, target)

    def states(self, head: Any, batch: Batch, captured: Captured, num_steps: int) -> list[Tensor]:
        use_attention(head, "sdpa")
        positions = _positions(batch.tokens)
        hidden, states = captured.hidden, []
        for step in range(num_steps):
            tokens = shift(batch.tokens, 1 + step)
            out = head.decoder(tokens, positions, hidden, captured.kv, None)
            hidden = out.last_hidden_state
            states.append(out.normed)
        return states

    def readout(self, head: Any, states: Float[Tensor, "m h"], step: int) -> Float[Tensor, "m v"]:
        return head.lm_head(states)  # type: ignore[no-any-return]

    def tensors(self, head: Any) -> dict[str, Tensor]:
        return _own(head, {"decoder.embed_tokens.weight", "lm_head.weight"})


class Standalone(Kind):
    """A small LM of its own, distilled from the target (Leviathan et al. 2023, arXiv 2211.17192). Its KV is its own and
    its text is true, so there is nothing to unroll."""

    name, algorithm, title = "standalone", "STANDALONE", "Small LM"
    first_lead, num_steps = 0, 1
    shapes = ((3, 1, 4), (5, 1, 6))
    width, num_layers = 144, 4  # so that the embedding of 49k tokens fits a file of 15 MiB

    def build(self, target: Any, vocabulary: Int[Tensor, " v"] | None, num_steps: int) -> nn.Module:
        from transformers import LlamaForCausalLM

        config = one_layer_config(target)
        width = min(self.width, target.config.hidden_size)
        config.update(
            {
                "hidden_size": width,
                "intermediate_size": 4 * width,
                "num_hidden_layers": self.num_layers,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "tie_word_embeddings": True,
            }
        )
        model = LlamaForCausalLM(config)
        table = target.get_output_embeddings().weight.float()
        # it begins with the target's embedding, seen along the directions in which that differs most
        directions = torch.linalg.eigh(table.T @ table).eigenvectors[:, -width:]
        projected = table @ directions
        model.model.embed_tokens.weight.data = (
            projected * (config.initializer_range / projected.std())
        ).contiguous()
        model.tie_weights()
        return model.to(device=target.device, dtype=target.dtype)  # type: ignore[no-any-return]

    def load(self, folder: Path, target: Any, num_steps: int) -> nn.Module:
        from spec_v2.models.loader import load_model

        return load_model(str(folder), dtype=target.dtype, device=target.device).model  # type: ignore[no-any-return]

    def states(self, head: Any, batch: Batch, captured: Captured, num_steps: int) -> list[Tensor]:
        use_attention(head, "sdpa")
        return [head.model(input_ids=batch.tokens, use_cache=False).last_hidden_state]

    def readout(self, head: Any, states: Float[Tensor, "m h"], step: int) -> Float[Tensor, "m v"]:
        return head.lm_head(states)  # type: ignore[no-any-return]

    def tensors(self, head: Any) -> dict[str, Tensor]:
        state = head.state_dict()
        return {name: state[name] for name in state if name != "lm_head.weight"}

    def settings(self, head: Any) -> Mapping[str, Any]:
        return {**super().settings(head), "architectures": ["LlamaForCausalLM"]}


KINDS: dict[str, Kind] = {kind.name: kind for kind in (Eagle3(), Eagle(), Mtp(), FrozenKvMtp(), Standalone())}
"""By name, the most useful first."""


def _positions(tokens: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)


def one_layer_config(target: Any) -> Any:
    """A Llama layer of the target's own shape."""
    from transformers import LlamaConfig

    text = target.config.get_text_config()
    same = (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "rms_norm_eps", "rope_parameters", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    given = {name: getattr(text, name) for name in same if getattr(text, name, None) is not None}
    return LlamaConfig(num_hidden_layers=1, tie_word_embeddings=False, **given)


def trainable(head: nn.Module, target: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are the draft model's own, by name."""
    shared = {id(p) for p in target.parameters()}
    return {name: p for name, p in head.named_parameters() if id(p) not in shared}


def draftable_table(
    vocabulary: Int[Tensor, " v"] | None, vocab_size: int
) -> Bool[np.ndarray, " vocab"] | None:
    """Which target ids can be drafted, as `make_batch` wants it."""
    if vocabulary is None:
        return None
    table = np.zeros(vocab_size, np.bool_)
    table[vocabulary.cpu().numpy()] = True
    return table


def _own(head: nn.Module, shared: set[str]) -> dict[str, Tensor]:
    """A head's tensors without the name of the wrapper that holds its layers."""
    state = head.state_dict()
    return {name.removeprefix("decoder."): state[name] for name in state if name not in shared}
