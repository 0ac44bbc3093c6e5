"""A tiny instruct model for training: it has a chat template, and its text ends now and then."""

from pathlib import Path
from typing import Any

from tests.eagle3_models import LAYERS
from tests.tiny_models import config_kwargs, seeded
from tests.tiny_tokenizers import CHAT, letter_tokenizer

EOS = 7


def tiny_instruct(seed: int = 0, **changes: Any) -> Any:
    """In float32, as training on a CPU is. Deep enough for EAGLE-3, with room for the held-out prompts in letters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "num_hidden_layers": LAYERS,
        "initializer_range": 0.3,
        "eos_token_id": EOS,
        "max_position_embeddings": 512,
    }
    config = LlamaConfig(**config_kwargs(**settings | changes))
    return seeded(lambda: LlamaForCausalLM(config), seed).eval().requires_grad_(False)


def tiny_chat_tokenizer() -> Any:
    """Letters; a turn ends with the eos token."""
    tokenizer = letter_tokenizer(CHAT.replace("{{ m['content'] }}", "{{ m['content'] }}h"))
    assert tokenizer("h")["input_ids"] == [EOS]
    return tokenizer


def save_tiny_instruct(folder: Path) -> Path:
    """Model and tokenizer as a folder for the command line."""
    from spec_v2.models.gguf_cache import quiet_transformers

    with quiet_transformers():
        tiny_instruct().save_pretrained(folder)
        tiny_chat_tokenizer().save_pretrained(folder)
    return folder
