"""A tiny random model with a word tokenizer, as a folder on disk: what the command line and the demo load."""

from pathlib import Path

import torch

from tests.tiny_models import VOCAB, config_kwargs


def save_tiny_model(folder: Path, *, layers: int = 3, context: int = 512) -> Path:
    """Write it. Its words are w0 .. w63, its text never ends by itself, and it has no chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from spec_v2.models.gguf_cache import quiet_transformers

    config = LlamaConfig(**config_kwargs(num_hidden_layers=layers, max_position_embeddings=context))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with quiet_transformers():
        model.save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder
