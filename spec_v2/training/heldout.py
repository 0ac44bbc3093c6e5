"""The prompts that no draft model was trained on: a file of this package, fixed by its hash before any training."""

import hashlib
import json
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("heldout.jsonl")
SHA256 = "ced1373ee3289f78a66da272f43558fba81b05c6d1f8e56f433596a727539b37"


@cache
def heldout_prompts() -> tuple[str, ...]:
    """64 instructions of eight kinds, written by hand. Raises ValueError where the file is not the one that was fixed."""
    raw = FILE.read_bytes()
    if (found := hashlib.sha256(raw).hexdigest()) != SHA256:
        raise ValueError(
            f"{FILE} has sha256 {found}, but the held-out prompts were fixed as {SHA256}: figures would not be "
            "comparable; restore the file"
        )
    return tuple(json.loads(line)["prompt"] for line in raw.decode().splitlines())


def normalised(text: str) -> str:
    """A prompt without case and punctuation, by which a training prompt is known to be a held-out one."""
    return " ".join("".join(c if c.isalnum() else " " for c in text.casefold()).split())
