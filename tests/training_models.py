"""A tiny instruct model for training: it has a chat template, and its text ends now and then."""

from typing import Any

import torch

from tests.eagle3_models import LAYERS
from tests.tiny_models import VOCAB, config_kwargs, seeded
from tests.tiny_tokenizers import CHAT, letter_tokenizer

EOS = 7


def tiny_instruct(seed: int = 0, **changes: Any) -> Any:
    """In float32, as training on a CPU is. Deep enough for EAGLE-3, and tame enough to be learnt."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "num_hidden_layers": LAYERS,
        "initializer_range": 0.3,
        "eos_token_id": EOS,
        "max_position_embeddings": 512,
    } | changes
    config = LlamaConfig(**config_kwargs(**settings))
    return seeded(lambda: LlamaForCausalLM(config), seed).eval().requires_grad_(False)


def tiny_chat_tokenizer() -> Any:
    """Letters; a turn ends with the eos token."""
    tokenizer = letter_tokenizer(CHAT.replace("{{ m['content'] }}", "{{ m['content'] }}h"))
    assert tokenizer("h")["input_ids"] == [EOS]
    return tokenizer


def save_tiny_instruct(folder: Any) -> Any:
    """Model and tokenizer as a folder for the command line."""
    from spec_v2.models.gguf_cache import quiet_transformers

    with quiet_transformers():
        tiny_instruct().save_pretrained(folder)
        tiny_chat_tokenizer().save_pretrained(folder)
    return folder


def ids(*texts: Any) -> torch.Tensor:
    return torch.tensor([list(text) for text in texts])


__all__ = ["EOS", "VOCAB", "ids", "save_tiny_instruct", "tiny_chat_tokenizer", "tiny_instruct"]
