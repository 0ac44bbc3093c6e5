"""From nothing to a draft model that drafts: the whole of `train`, at toy size."""

import pytest

from spec_v2.cli import main
from spec_v2.training.heldout import heldout_prompts
from spec_v2.training.kinds import KINDS
from spec_v2.training.settings import KIND_NAMES
from tests.training_models import save_tiny_instruct

SMALL = ["--wave", "48", "--max-prompt-tokens", "12", "--max-answer-tokens", "40", "--heldout-tokens", "16"]
DATA = ["--tokens", "6000", "--greedy-share", "1", *SMALL]
FIT = [
    "--tokens-per-batch",
    "1024",
    "--warmup-steps",
    "10",
    "--lr",
    "3e-3",
    "--log-every",
    "5",
    "--draft-vocab-size",
    "48",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_instruct(tmp_path_factory.mktemp("instruct")))


@pytest.fixture(scope="module")
def made(model, tmp_path_factory, request):
    """An --out folder with data in it."""
    out = tmp_path_factory.mktemp("made")
    assert main(["train", "generate", "--model", model, "--out", str(out), *DATA, "--json"]) == 0
    return out


def test_kinds_are_named_twice_alike():
    assert tuple(KINDS) == KIND_NAMES
    assert len(heldout_prompts()) == 64
