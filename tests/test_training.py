"""From nothing to a draft model that drafts: the whole of `train`, at toy size."""

import json
import shutil

import pytest
import torch

from spec_v2 import Engine, SamplingParams
from spec_v2.cli import main
from spec_v2.models.loader import load_model
from spec_v2.observability.metrics import total
from spec_v2.training.kinds import KINDS
from spec_v2.training.settings import KIND_NAMES
from spec_v2.training.shards import read_shard, read_texts
from tests.training_models import save_tiny_instruct

DATA = [
    "--tokens",
    "450",
    "--greedy-share",
    "1",
    "--wave",
    "48",
    "--max-prompt-tokens",
    "12",
    "--max-answer-tokens",
    "40",
    "--heldout-tokens",
    "16",
]
FIT = [
    "--tokens-per-batch",
    "1024",
    "--warmup-steps",
    "5",
    "--lr",
    "1e-2",
    "--log-every",
    "10",
    "--draft-vocab-size",
    "48",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_instruct(tmp_path_factory.mktemp("instruct")))


@pytest.fixture(scope="module")
def data(model, tmp_path_factory):
    """An --out folder with data in it."""
    out = tmp_path_factory.mktemp("made")
    assert run("generate", model, out, *DATA) == 0
    return out / "data"


@pytest.fixture
def out(data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    return tmp_path


def run(stage, model, out, *flags):
    return main(["train", stage, "--model", model, "--out", str(out), *flags])


def curve_of(folder):
    return [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]


def tau_on(prompts, model, kind, folder):
    """Mean accept length, bonus included, of greedy answers to prompts, by the engine."""
    loaded = load_model(model, dtype=torch.bfloat16, device=torch.device("cpu"))
    steps, topk, tokens = kind.shapes[0]
    with Engine(
        loaded.model,
        speculative_algorithm=kind.algorithm,
        enable_multi_layer_eagle=kind.multi_layer,
        speculative_draft_model_path=str(folder),
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=tokens,
        context_length=128,
    ) as engine:
        done = engine.generate(prompts, SamplingParams(max_new_tokens=40))
    return total(c.spec for c in done).mean_acceptance_length


def test_kinds_are_named_twice_alike():
    assert tuple(KINDS) == KIND_NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", KIND_NAMES)
def test_a_trained_model_drafts_its_own_text(name, model, out):
    """The loss falls, and the engine accepts drafts of texts that were learnt; an untrained one's it does not."""
    kind, texts = KINDS[name], read_texts(out / "data")
    prompts = [
        texts.tokens[start : start + n].tolist()
        for start, n in zip(texts.starts(), texts.prompt_lens, strict=True)
    ]
    shutil.copytree(out / "data", out / "fresh" / "data")
    assert (
        run(
            "fit", model, out / "fresh", "--kind", name, *FIT, "--max-steps", "1", "--warmup-steps", "1000000"
        )
        == 0
    )
    assert run("fit", model, out, "--kind", name, *FIT, "--max-steps", "160") == 0
    first, *_, last, measured = curve_of(out / name)
    assert all(after < before - 0.5 for before, after in zip(first["loss"], last["loss"], strict=True))
    assert set(measured["heldout"]) == {"loss", "agreement", "accept_length"}
    untrained = tau_on(prompts, model, kind, out / "fresh" / name)
    trained = tau_on(prompts, model, kind, out / name)
    assert untrained < 1.15
    assert trained > 1.6


def test_generation_goes_on_where_it_was(model, data, tmp_path):
    """Shards are functions of seed and number: two halves are what one run makes, and what is there is kept."""
    assert run("generate", model, tmp_path, *DATA[2:], "--tokens", "100") == 0
    some = sorted((tmp_path / "data").glob("shard-*"))
    times = [path.stat().st_mtime_ns for path in some]
    assert run("generate", model, tmp_path, *DATA) == 0
    assert [path.stat().st_mtime_ns for path in some] == times
    names = sorted(path.name for path in data.glob("*.safetensors"))
    assert sorted(path.name for path in (tmp_path / "data").glob("*.safetensors")) == names
    for name in names:
        (mine, said), (whole, wanted) = read_shard(tmp_path / "data" / name), read_shard(data / name)
        assert said == wanted
        assert mine.tokens.tolist() == whole.tokens.tolist()
        assert mine.prompt_lens.tolist() == whole.prompt_lens.tolist()
    texts, metadata = read_shard(data / names[0])
    assert len(texts) == 64
    assert len(metadata["heldout_sha256"]) == 64


def test_shards_of_another_recipe_are_not_mixed(model, out, capsys):
    assert run("generate", model, out, *DATA, "--seed", "1") == 2
    assert "another recipe" in capsys.readouterr().err


def test_a_cut_run_goes_on_as_if_it_had_not_been_cut(model, out, tmp_path):
    """The same weights to the last bit: state, order of batches and schedule are all there."""
    flags = ["--kind", "eagle3", *FIT, "--ema", "0.9"]
    assert run("fit", model, out, *flags, "--max-steps", "12") == 0
    other = tmp_path / "other"
    shutil.copytree(out / "data", other / "data")
    assert run("fit", model, other, *flags, "--max-steps", "12", "--stop-after", "5") == 0
    assert run("fit", model, other, *flags, "--max-steps", "12", "--resume") == 0
    assert (other / "eagle3" / "model.safetensors").read_bytes() == (
        out / "eagle3" / "model.safetensors"
    ).read_bytes()
    assert [line["step"] for line in curve_of(other / "eagle3")][-1] == 12


def test_weights_of_another_run_can_be_the_beginning(model, out, tmp_path):
    assert run("fit", model, out, "--kind", "eagle3", *FIT, "--max-steps", "30") == 0
    again = tmp_path / "again"
    shutil.copytree(out / "data", again / "data")
    begin = ["--init-from", str(out), "--draft-vocab-size", "16"]  # the vocabulary is that of the weights
    assert run("fit", model, again, "--kind", "eagle3", *FIT[:-2], *begin, "--max-steps", "1") == 0
    assert curve_of(again / "eagle3")[0]["loss"][0] < curve_of(out / "eagle3")[0]["loss"][0] - 0.3
    assert json.loads((again / "eagle3" / "config.json").read_text())["draft_vocab_size"] == 48


def test_evaluation_goes_into_the_card(model, out, capsys):
    assert run("fit", model, out, "--kind", "eagle", *FIT, "--max-steps", "2") == 0
    capsys.readouterr()
    flags = ["--kind", "eagle", "--prompts", "3", "--max-new-tokens", "6", "--json"]
    assert run("evaluate", model, out, *flags) == 0
    answer = json.loads(capsys.readouterr().out)["eagle"]["evaluation"]
    assert [(row["shape"], row["temperature"]) for row in answer["rows"]] == [
        ("5, 1, 6", 0.0), ("5, 1, 6", 1.0), ("5, 4, 16", 0.0), ("5, 4, 16", 1.0),
    ]  # fmt: skip
    assert all(1 <= row["accept_length"] <= 6 for row in answer["rows"])
    card = (out / "eagle" / "README.md").read_text()
    for part in (
        "# EAGLE for",
        "## Data",
        "## Recipe",
        "## Curve",
        "## Evaluation",
        "| 5, 4, 16 | 1 |",
        "train fit",
    ):
        assert part in card


def test_all_stages_in_one_go(model, tmp_path, capsys):
    flags = [
        *DATA,
        *FIT,
        "--kind",
        "mtp,standalone",
        "--max-steps",
        "2",
        "--prompts",
        "2",
        "--max-new-tokens",
        "4",
    ]
    assert run("all", model, tmp_path, *flags) == 0
    said = capsys.readouterr().out
    assert "data: " in said
    assert "mtp: (3, 1, 4) at temperature 0" in said
    assert "standalone: (5, 1, 6) at temperature 1" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["fit"], "give --time-limit MINUTES or --max-steps N"),
        (["fit", "--max-steps", "0"], "--max-steps 0"),
        (["fit", "--max-steps", "1"], "train generate"),
        (["evaluate"], "train fit --kind eagle3"),
        (["generate", "--greedy-share", "2"], "--greedy-share 2.0"),
    ],
)
def test_what_cannot_work_is_told_first(flags, message, model, tmp_path, capsys):
    assert run(flags[0], model, tmp_path, *flags[1:]) == 2
    assert message in capsys.readouterr().err


def test_a_finished_run_is_not_written_over(model, out, capsys):
    assert run("fit", model, out, *FIT, "--max-steps", "1") == 0
    assert run("fit", model, out, *FIT, "--max-steps", "1") == 2
    assert "--resume" in capsys.readouterr().err
