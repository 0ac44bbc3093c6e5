"""The benchmark: its flags, its prompts, and all of it once on a tiny model."""

import json
import statistics

import pytest

from spec_v2.bench import command, figures
from spec_v2.bench.contenders import TokenClock
from spec_v2.bench.prompts import KINDS, prompt_ids
from spec_v2.bench.report import cost_table, for_humans, speed_table
from spec_v2.bench.settings import name_of, server_args_of, settings_from
from spec_v2.cli import build_parser, main
from spec_v2.speculative_hook import resolve_speculative
from tests.tiny_folder import save_tiny_model


def settings_of(*argv):
    return settings_from(build_parser().parse_args(["bench", *argv]))


# --- flags ---


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--algorithms", "none,NGRAMM"), "argument --algorithms: 'NGRAMM', which is not known. Did you mean NGRAM?"),
        (("--algorithms", "none,NONE"), "argument --algorithms: 'none,NONE' names something twice"),
        (("--algorithms", ""), "argument --algorithms: '', which is not known"),
        (("--schedules", "async"), "argument --schedules: 'async' is not one of sync, overlap"),
        (("--batch-sizes", "1,0"), "argument --batch-sizes: '0' is no whole number of at least 1"),
        (("--batch-sizes", ""), "argument --batch-sizes: '' is no whole number of at least 1"),
        (("--prompts", "long"), "argument --prompts: 'long' is not one of copy, free"),
        (("--max-new-tokens", "many"), "argument --max-new-tokens: 'many' is no whole number of at least 1"),
        (("--repetitions", "-1"), "argument --repetitions: "),
        (("--against", "vllm"), "argument --against: 'vllm' is not one of transformers"),
        (("--draft-model", "heads/eagle"), "argument --draft-model: 'heads/eagle' is not ALGORITHM=PATH"),
        (("--page-size", "x"), "argument --page-size: "),
        (("--prompt", "w1"), "unrecognized arguments"),
    ],
)  # fmt: skip
def test_flags_that_do_not_parse_are_named(argv, named, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["bench", *argv])
    out = capsys.readouterr()
    assert (leaving.value.code, out.out) == (2, "")
    assert named in out.err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--speculative-algorithm", "NGRAM"), "--speculative-algorithm: in a benchmark this is chosen by --algorithms"),
        (("--disable-overlap-schedule",), "--disable-overlap-schedule: in a benchmark this is chosen by --schedules"),
        (("--disable-radix-cache",), "--disable-radix-cache"),
        (("--max-new-tokens", "1"), "--max-new-tokens 1"),
        (("--batch-sizes", "1,64"), "--max-running-requests 48 is less than the batch of 64 in --batch-sizes"),
        (("--draft-model", "STANDALONE=x"), "--draft-model STANDALONE=...: STANDALONE is not in --algorithms none,NGRAM"),
        (("--speculative-num-steps", "3"), "--speculative-num-steps is used by none of --algorithms none,NGRAM"),
        (("--page-size", "0"), "--page-size"),
        (("--model", "/no/such/model"), "model_path='/no/such/model'"),
        (("--algorithms", "STANDALONE", "--model", "some/folder"), "--speculative-draft-model-path"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_one_line_on_stderr(argv, named, capsys):
    code = main(["bench", "--json", *argv])
    out = capsys.readouterr()
    assert (code, out.out) == (2, "")
    assert named in out.err
    assert out.err.count("\n") == 1


def test_each_algorithm_gets_the_settings_that_it_uses():
    settings = settings_of(
        "--algorithms", "none,ngram,standalone,nextn", "--schedules", "sync,overlap", "--batch-sizes", "1,4",
        "--speculative-num-steps", "5", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "6",
        "--speculative-ngram-max-trie-depth", "9", "--no-speculative-adaptive", "--page-size", "16",
        "--speculative-draft-model-path", "small", "--draft-model", "EAGLE=head",
    )  # fmt: skip
    assert settings.algorithms == ("none", "NGRAM", "STANDALONE", "EAGLE")
    plain, ngram, standalone, eagle = (server_args_of(settings, name, "sync") for name in settings.algorithms)
    for args in (plain, ngram, standalone, eagle):
        assert (args.page_size, args.schedule, args.max_running_requests) == (16, "sync", 4)
        assert args.disable_radix_cache
    assert (plain.speculative_algorithm, plain.speculative_num_draft_tokens) == (None, None)
    assert (ngram.speculative_num_steps, ngram.speculative_num_draft_tokens) == (None, 6)
    assert (ngram.speculative_ngram_max_trie_depth, ngram.speculative_adaptive) == (9, False)
    assert (standalone.speculative_num_steps, standalone.speculative_adaptive) == (5, None)
    assert standalone.speculative_ngram_max_trie_depth != 9
    paths = [args.speculative_draft_model_path for args in (plain, ngram, standalone, eagle)]
    assert paths == [None, None, "small", "head"]
    assert server_args_of(settings, "none", "overlap").schedule == "overlap"


# --- contenders ---


def test_multi_layer_eagle_has_a_name_of_its_own():
    settings = settings_of(
        "--algorithms", "none,eagle,multi_layer_eagle", "--draft-model", "EAGLE=a", "--draft-model", "MULTI_LAYER_EAGLE=b"
    )  # fmt: skip
    plain, eagle, multi = (server_args_of(settings, name, "sync") for name in settings.algorithms)
    assert [args.enable_multi_layer_eagle for args in (plain, eagle, multi)] == [False, False, True]
    assert (multi.speculative_algorithm, multi.speculative_draft_model_path) == ("EAGLE", "b")
    assert [name_of(args) for args in (plain, eagle, multi)] == list(settings.algorithms)
    resolved = resolve_speculative(multi)
    assert (resolved.num_steps, resolved.topk, resolved.num_draft_tokens) == (3, 1, 4)
    with pytest.raises(ValueError, match=r"--enable-multi-layer-eagle.*--algorithms MULTI_LAYER_EAGLE"):
        settings_of("--enable-multi-layer-eagle")


def test_tokens_are_timed_as_they_come():
    import torch

    clock = TokenClock()
    for count in (5, 1, 3):
        clock.put(torch.zeros(count))
    clock.end()
    assert clock.counts == [1, 3]
    assert len(clock.times) == 2


def test_prompts_come_round_again():
    texts = []

    class Tokenizer:
        chat_template = None

        def __call__(self, text):
            texts.append(text)
            return {"input_ids": [len(text)]}

    for kind, known in KINDS.items():
        texts.clear()
        assert len(prompt_ids(Tokenizer(), kind, len(known) + 1)) == len(known) + 1
        assert texts == [*known, known[0]]
    assert len({text for known in KINDS.values() for text in known}) == 8 + 8 + 64


# --- the whole ---


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("bench") / "tiny"))


@pytest.fixture(scope="module")
def report(model):
    """One run for all tests below; the parsed flags and everything from there on are real."""
    argv = [
        "bench", "--model", model, "--dtype", "float64", "--num-threads", "1", "--json",
        "--algorithms", "none,NGRAM,STANDALONE", "--draft-model", f"STANDALONE={model}", "--batch-sizes", "1,2",
        "--prompts", "copy", "--max-new-tokens", "12", "--repetitions", "2", "--against", "transformers",
    ]  # fmt: skip
    options = build_parser().parse_args(argv)
    options.command_line = argv
    text, code = command.run_bench(options)
    assert code == 0
    return json.loads(text)


def test_json_has_these_keys(report, model):
    assert list(report) == [
        "command", "date", "machine", "load_average", "versions", "model", "dtype", "device", "threads", "settings",
        "engines", "cells",
    ]  # fmt: skip
    assert report["command"].startswith(f"spec-v2 bench --model {model} ")
    assert (report["dtype"], report["device"], report["threads"]) == ("float64", "cpu", 1)
    assert report["settings"]["server_args"]["model_path"] == model
    assert report["engines"]["NGRAM overlap"]["speculative_num_draft_tokens"] == 12  # filled in
    found = [(cell["batch_size"], cell["contender"]) for cell in report["cells"]]
    ours = ["none overlap", "NGRAM overlap", "STANDALONE overlap"]
    theirs = ["transformers generate", "transformers lookup", "transformers assisted"]
    assert found == [(1, name) for name in ours + theirs] + [(2, name) for name in [*ours, theirs[0]]]
    for cell in report["cells"]:
        assert list(cell) == [
            "prompts", "batch_size", "contender", "algorithm", "schedule", "decode_tokens_per_second",
            "whole_tokens_per_second", "mean_acceptance_length", "draft_acceptance_rate", "forced_acceptance", "ratios", "cost_model",
            "token_counts_equal", "repetitions", "texts_compared_with", "texts_that_differ",
        ]  # fmt: skip


def test_figures_follow_from_the_raw_numbers(report):
    cells = {(cell["batch_size"], cell["contender"]): cell for cell in report["cells"]}

    def rates(cell):
        return [(r["tokens"] - r["first_tokens"]) / r["decode_seconds"] for r in cell["repetitions"]]

    for (batch_size, _), cell in cells.items():
        assert len(cell["repetitions"]) == 2
        assert all(r["tokens"] == 12 * batch_size for r in cell["repetitions"])
        assert all(0 < r["decode_seconds"] < r["whole_seconds"] for r in cell["repetitions"])
        assert cell["decode_tokens_per_second"]["median"] == pytest.approx(statistics.median(rates(cell)))
        for name, ratio in cell["ratios"].items():
            other = cells[batch_size, "none overlap" if name == "plain" else name]
            pairs = [a / b for a, b in zip(rates(cell), rates(other), strict=True)]
            assert ratio["decode"] == pytest.approx(figures.spread(pairs))


def test_all_contenders_say_the_same(report):
    """In float64, with the draft being the target: nothing parts, and every draft is accepted."""
    for cell in report["cells"]:
        assert (cell["texts_that_differ"], cell["token_counts_equal"]) == ([], True)
        if cell["algorithm"] == "STANDALONE":
            assert cell["mean_acceptance_length"] == 4.0
            assert cell["draft_acceptance_rate"] == 1.0


def test_the_terms_add_up(report):
    for cell in report["cells"]:
        model = cell["cost_model"]
        assert (model is None) == (cell["algorithm"] is None)
        if model is None:
            continue
        assert sum(model["parts_ms"].values()) == pytest.approx(model["step_ms"])
        whole = model["v"] + model["k"] * model["c"] + model["o"]
        assert whole == pytest.approx(model["step_ms"] / model["plain_step_ms"])
        assert model["predicted_speedup"] == pytest.approx(model["tau"] / whole)
        assert {"verify", "draft", "publish", "draft_extend", "stash", "gaps"} <= set(model["parts_ms"])
        if cell["algorithm"] == "none":
            assert model["predicted_speedup"] == pytest.approx(1.0)


def test_humans_read_tables(report):
    text = for_humans(report)
    lines = text.splitlines()
    assert '"copy" prompts, 2 at a time' in lines
    assert text.count("all texts are those of none overlap, token by token") == 2
    assert "no speed-up" in text
    batch_1 = [cell for cell in report["cells"] if cell["batch_size"] == 1]
    speed, cost = speed_table(batch_1), cost_table([c for c in batch_1 if c["cost_model"]])
    assert (len(speed), len(cost)) == (7, 4)
    assert speed[0].split() == ["tokens/s", "min..max", "whole", "tau", "rate", "plain", "generate", "lookup", "assisted"]  # fmt: skip


def test_a_context_that_is_too_short_is_told_before_anything_runs(model, capsys):
    code = main(["bench", "--model", model, "--algorithms", "none", "--max-new-tokens", "500"])
    assert code == 2
    assert "--max-new-tokens 500" in capsys.readouterr().err


# --- forced acceptance ---


def test_forced_figures_are_marked_and_their_texts_not_compared(model):
    argv = [
        "bench", "--model", model, "--dtype", "float64", "--num-threads", "1", "--json", "--prompts", "copy",
        "--algorithms", "none,STANDALONE", "--draft-model", f"STANDALONE={model}", "--max-new-tokens", "9",
        "--repetitions", "1", "--speculative-simulated-accept-length", "2",
    ]  # fmt: skip
    options = build_parser().parse_args(argv)
    options.command_line = argv
    text, code = command.run_bench(options)
    found = json.loads(text)
    plain, forced = found["cells"]
    assert code == 0
    assert (plain["forced_acceptance"], forced["forced_acceptance"]) == (False, True)
    assert (forced["mean_acceptance_length"], forced["texts_that_differ"]) == (2.0, [])
    said = for_humans(found)
    assert "STANDALONE overlap (forced acceptance) " in said
    assert "all texts but those of forced acceptance are those of none overlap" in said
    assert "forced acceptance: tau was chosen" in said
