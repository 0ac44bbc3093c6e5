"""What differs between the kinds of draft models: how one is built, what it reads, and under which names it is saved."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from spec_v2.models.draft_models import load_eagle3_head, load_eagle_head
from spec_v2.models.eagle import EagleHead
from spec_v2.models.eagle3 import Eagle3Head, default_aux_layers
from spec_v2.training.capture import Captured
from spec_v2.training.shards import Batch
from spec_v2.training.unroll import unroll


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

    @abstractmethod
    def build(self, target: Any, vocabulary: Int[Tensor, " v"] | None) -> nn.Module:
        """A fresh draft model for a target, in the target's dtype."""

    @abstractmethod
    def load(self, folder: Path, target: Any) -> nn.Module:
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

    def build(self, target: Any, vocabulary: Int[Tensor, " v"] | None) -> EagleHead:
        head = EagleHead(one_layer_config(target), target)
        with (
            torch.no_grad()
        ):  # at first the next hidden state is this one: right in scale, and a residual away
            head.fc.weight[:, target.config.hidden_size :] = torch.eye(target.config.hidden_size)
            head.fc.bias.zero_()
        return head

    def load(self, folder: Path, target: Any) -> EagleHead:
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

    def build(self, target: Any, vocabulary: Int[Tensor, " v"] | None) -> Eagle3Head:
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

    def load(self, folder: Path, target: Any) -> Eagle3Head:
        return load_eagle3_head(folder, target)

    def states(self, head: Any, batch: Batch, captured: Captured, num_steps: int) -> list[Tensor]:
        return unroll(head, batch.tokens, captured.aux, num_steps)

    def tensors(self, head: Any) -> dict[str, Tensor]:
        is_draftable = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        is_draftable[head.target_ids.cpu()] = True
        return _own(head, {"decoder.embed_tokens.weight"}) | {"t2d": is_draftable}

    def settings(self, head: Any) -> Mapping[str, Any]:
        return {**super().settings(head), "architectures": ["LlamaForCausalLMEagle3"]}


KINDS: dict[str, Kind] = {kind.name: kind for kind in (Eagle3(), Eagle())}
"""By name, the most useful first."""


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
