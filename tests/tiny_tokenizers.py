"""Tokenizers for the tiny vocabulary: one letter a token, or bytes of which several make a character."""

import string
from functools import cache
from typing import Any

from tests.tiny_models import VOCAB

LETTERS = (string.ascii_letters + string.digits + "+/")[:VOCAB]
CHAT = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}A{% endif %}"


def letter_tokenizer(chat_template: str | None = None) -> Any:
    """Token `i` is the `i`-th letter; text is letters without spaces."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({c: i for i, c in enumerate(LETTERS)}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = chat_template
    return tokenizer


@cache
def byte_tokenizer() -> Any:
    """Half of the tokens are ASCII letters; the others are lead and continuation bytes of two-byte characters."""
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    shown = byte_names()
    raw = [*range(97, 117), *range(0xC3, 0xC3 + 4), *range(0x80, 0x80 + VOCAB - 24)]
    tokens = Tokenizer(models.BPE({shown[b]: i for i, b in enumerate(raw)}, []))
    tokens.pre_tokenizer, tokens.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, clean_up_tokenization_spaces=False)


def byte_names() -> dict[int, str]:
    """The printable character that byte-level tokenizers write for each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
