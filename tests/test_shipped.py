"""Draft models that come with the package are found by the target's name, and weights in several files load."""

import json

import pytest
import torch

from spec_v2 import Engine
from spec_v2.bench.settings import bench_defaults, draft_path_of, settings_from
from spec_v2.models import shipped
from spec_v2.models.draft_models import load_eagle3_head
from spec_v2.models.shipped import FOLDERS, shipped_draft
from spec_v2.server_args import ServerArgs
from spec_v2.spec_info import WORKERS, SpeculativeAlgorithm
from spec_v2.training.checkpoint import INDEX, write_checkpoint, write_weights
from spec_v2.training.kinds import KINDS
from tests.eagle3_models import deep_llama, eagle3_head

SMALL = (64 << 10) + 12_000  # bytes in a file, of which 64 KiB are kept for its header


@pytest.fixture
def checkpoints(tmp_path, monkeypatch):
    """A package that brings an EAGLE-3 head for the default model."""
    monkeypatch.setattr(shipped, "CHECKPOINTS", tmp_path)
    folder = tmp_path / "smollm2-135m" / "eagle3"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return tmp_path


def test_folders_are_those_of_training():
    assert {(kind.algorithm, kind.multi_layer): kind.name for kind in KINDS.values()} == FOLDERS
    assert all((SpeculativeAlgorithm.from_string(name), multi) in WORKERS for name, multi in FOLDERS)


@pytest.mark.parametrize("name", ["smollm2-135m", "SmolLM2-135M-Instruct"])
def test_the_default_model_has_a_draft_model(checkpoints, name):
    args = ServerArgs(model_path=name, speculative_algorithm="eagle3")
    assert shipped_draft(args) == str(checkpoints / "smollm2-135m" / "eagle3")


@pytest.mark.parametrize(
    "changes",
    [
        {"speculative_algorithm": "EAGLE"},  # not shipped
        {"speculative_algorithm": "NGRAM"},
        {"speculative_algorithm": None},
        {"model_path": "other/model", "speculative_algorithm": "EAGLE3"},
        {"speculative_algorithm": "EAGLE3", "enable_multi_layer_eagle": True},
    ],
)
def test_nothing_else_has_one(checkpoints, changes):
    assert shipped_draft(ServerArgs(**changes)) is None


def test_without_one_the_error_is_as_before(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "CHECKPOINTS", tmp_path)
    with pytest.raises(ValueError, match="--speculative-draft-model-path is not given"):
        Engine(speculative_algorithm="EAGLE3")


def test_bench_takes_it_too(checkpoints):
    options = bench_defaults()
    options.algorithms = ("none", "EAGLE3")
    settings = settings_from(options)
    assert draft_path_of(settings, "EAGLE3") == str(checkpoints / "smollm2-135m" / "eagle3")


def in_shards(folder, head):
    """A head whose weights lie in several files."""
    write_checkpoint(folder, KINDS["eagle3"], head)
    bf16 = {k: v.bfloat16() if v.is_floating_point() else v for k, v in KINDS["eagle3"].tensors(head).items()}
    write_weights(folder, bf16, max_bytes=SMALL)
    return sorted(folder.glob("model-*.safetensors"))


def test_weights_in_shards_are_the_same_head(tmp_path, device):
    target = deep_llama(device)
    head = eagle3_head(target, range(0, 64, 2))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    write_checkpoint(whole, KINDS["eagle3"], head)
    shards = in_shards(cut, head)
    assert len(shards) > 1
    assert not (cut / "model.safetensors").exists()
    assert all(path.stat().st_size <= SMALL for path in shards)
    mine, wanted = (load_eagle3_head(folder, target).state_dict() for folder in (cut, whole))
    assert mine.keys() == wanted.keys()
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)
    write_checkpoint(cut, KINDS["eagle3"], head)  # one file again: no shard and no index stays
    assert [path.name for path in cut.glob("model*")] == ["model.safetensors"]


@pytest.mark.parametrize("damage", ["a shard is lost", "a tensor is lost", "no index"])
def test_damaged_shards_are_told(tmp_path, device, damage):
    target = deep_llama(device)
    head = eagle3_head(target)
    assert len(in_shards(tmp_path, head)) > 1
    index = json.loads((tmp_path / INDEX).read_text())
    if damage == "a shard is lost":
        next(tmp_path.glob("model-00002-*")).unlink()
    elif damage == "a tensor is lost":
        index["weight_map"]["fc.other"] = index["weight_map"]["fc.weight"]
        (tmp_path / INDEX).write_text(json.dumps(index))
    else:
        (tmp_path / INDEX).write_text("{}")
    with pytest.raises(ValueError, match="complete copy of the head"):
        load_eagle3_head(tmp_path, target)
