"""The benchmark: its flags, its order, its arithmetic on made-up traces, and all of it once on a tiny model."""

import json
import statistics

import pytest

from spec_v2.bench import command, cost_model, figures
from spec_v2.bench.contenders import Contender, Sample, TokenClock
from spec_v2.bench.measure import Case, measure, num_runs
from spec_v2.bench.prompts import KINDS, prompt_ids
from spec_v2.bench.report import cost_table, for_humans, speed_table
from spec_v2.bench.settings import server_args_of, settings_from
from spec_v2.cli import build_parser, main
from spec_v2.completion import Completion
from spec_v2.observability.metrics import SpecMetrics
from spec_v2.observability.trace import Span
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


# --- order ---


class Scripted(Contender):
    """Notes when it is called; its n-th run takes `seconds[n]`."""

    def __init__(self, name, log, seconds=(1.0,) * 9, *, algorithm=None, most=9, ids=(7, 8, 9, 7)):
        self.name, self.algorithm, self.schedule = name, algorithm, "sync" if algorithm else None
        self._log, self._seconds, self._most, self._ids = log, iter(seconds), most, ids

    def fits(self, batch_size):
        return batch_size <= self._most

    def run(self, prompts, max_new_tokens):
        self._log.append((len(prompts), self.name))
        seconds, spec = next(self._seconds), SpecMetrics(accept_lens=(3,), draft_depths=(4,))
        done = Completion(
            text="", output_ids=self._ids, finish_reason="length", prompt_tokens=len(prompts[0]), spec=spec
        )
        return Sample((done,) * len(prompts), seconds + 1.0, seconds, len(prompts))


def case_of(batch_size, kind="copy"):
    return Case(kind, ((1, 2),) * batch_size)


def test_contenders_take_turns_and_the_first_round_does_not_count():
    log, ticks = [], []
    contenders = [Scripted("a", log), Scripted("b", log, most=1), Scripted("c", log)]
    cases = [case_of(1), case_of(2)]
    samples = measure(contenders, cases, max_new_tokens=4, repetitions=2, done=lambda: ticks.append(len(log)))
    assert log == [(1, "a"), (1, "b"), (1, "c")] * 3 + [(2, "a"), (2, "c")] * 3
    assert ticks == list(range(1, 16))
    assert num_runs(contenders, cases, 2) == 15
    assert {(case.batch_size, name): len(found) for (case, name), found in samples.items()} == {
        (1, "a"): 2, (1, "b"): 2, (1, "c"): 2, (2, "a"): 2, (2, "c"): 2,
    }  # fmt: skip


def test_ratios_are_taken_within_a_repetition():
    plain = Scripted("none sync", [], (9.0, 1.0, 2.0, 4.0), algorithm="none")
    fast = Scripted("NGRAM sync", [], (9.0, 0.5, 0.5, 4.0), algorithm="NGRAM")
    other = Scripted("transformers generate", [], (9.0, 2.0, 2.0, 2.0))
    contenders = [plain, fast, other]
    samples = measure(contenders, [case_of(1)], max_new_tokens=4, repetitions=3, done=lambda: None)
    first, second, third = figures.cells_of(samples, contenders, 4, None)
    assert list(first["ratios"]) == ["plain", "transformers generate"]
    assert first["ratios"]["plain"]["decode"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert second["ratios"]["plain"]["decode"] == {"median": 2.0, "min": 1.0, "max": 4.0}
    assert second["ratios"]["plain"]["whole"]["max"] == 3.0 / 1.5
    assert second["ratios"]["transformers generate"]["decode"]["median"] == 4.0
    assert third["ratios"] == {}
    assert second["decode_tokens_per_second"] == {"median": 3 / 0.5, "min": 3 / 4.0, "max": 3 / 0.5}
    assert second["whole_tokens_per_second"]["median"] == 4 / 1.5
    assert (second["mean_acceptance_length"], second["draft_acceptance_rate"]) == (3.0, 0.5)


def test_texts_and_counts_that_differ_are_told():
    contenders = [Scripted("none sync", [], algorithm="none"), Scripted("x", [], ids=(7, 8, 9))]
    samples = measure(contenders, [case_of(2)], max_new_tokens=4, repetitions=1, done=lambda: None)
    same, short = figures.cells_of(samples, contenders, 4, None)
    assert (same["texts_that_differ"], same["token_counts_equal"]) == ([], True)
    assert short["texts_compared_with"] == "none sync"
    assert [t["prompt"] for t in short["texts_that_differ"]] == [0, 1]
    assert not short["texts_that_differ"][0]["is_tie"]
    assert not short["token_counts_equal"]


def test_tokens_that_come_at_once_have_no_decode_steps():
    done = Completion(text="", output_ids=(1, 2), finish_reason="length", prompt_tokens=1, spec=SpecMetrics())
    assert Sample((done,), 0.5, 0.0, 2).decode_rate == 4.0


# --- cost model ---


def spans_of(step, start_ms, *, verify, draft=0.0, extend=0.0, gap=0.0, prefill=False):
    """A step's spans, in a row; the host has its result when all is done. Times in milliseconds."""
    spans, at = [], start_ms + gap
    for name, took in (
        ("draft", draft),
        ("prefill" if prefill else "verify", verify),
        ("draft_extend", extend),
    ):
        spans.append(Span("forward", name, step, at * 1e3, took * 1e3))
        at += took
    return [Span("host", "launch", step, start_ms * 1e3, 10.0), *spans, Span("host", "process", step, at * 1e3, 0.0)]  # fmt: skip


def trace_of(prefills, steps, **times):
    spans, at = [], 0.0
    for number in range(prefills + steps):
        part = {"verify": 50.0, "prefill": True} if number < prefills else times
        spans += spans_of(number, at, **part)
        at = spans[-1].start_us / 1e3
    return spans


def test_a_step_is_made_of_its_launches_and_gaps():
    spans = trace_of(1, 4, verify=10.0, draft=2.0, extend=3.0, gap=1.0)
    times = cost_model.step_times(spans, num_needed=4)
    assert (times.num_steps, times.step) == (4, pytest.approx(16.0))
    assert times.parts == pytest.approx({"draft": 2.0, "verify": 10.0, "draft_extend": 3.0, "gaps": 1.0})
    assert sum(times.parts.values()) == pytest.approx(times.step)
    assert cost_model.decode_seconds(spans, 4) == pytest.approx(4 * 16.0 / 1e3)


def test_a_step_that_gave_nothing_does_not_count():
    """Under overlap one more step is on its way when the last request ends."""
    spans = trace_of(2, 5, verify=10.0)
    assert cost_model.decode_steps(spans, num_needed=4) == [2, 3, 4, 5]
    assert cost_model.step_times(spans, 4) == cost_model.step_times(spans[:-5], 4)


def test_with_prompts_in_between_all_steps_count():
    spans = [*trace_of(1, 3, verify=10.0), *spans_of(4, 90.0, verify=50.0, prefill=True), *spans_of(5, 140.0, verify=10.0)]  # fmt: skip
    assert cost_model.decode_steps(spans, num_needed=2) == [1, 2, 3, 5]


def test_no_decode_step_gives_no_times():
    spans = trace_of(1, 0, verify=1.0)
    assert (cost_model.step_times(spans, 0).num_steps, cost_model.decode_seconds(spans, 0)) == (0, 0.0)


def test_the_model_predicts_what_the_trace_says():
    plain = cost_model.step_times(trace_of(1, 6, verify=18.0, gap=2.0), 6)
    mine = cost_model.step_times(trace_of(1, 3, verify=24.0, draft=8.0, extend=5.0, gap=3.0), 3)
    model = cost_model.cost_model(mine, plain, draft_passes=2, tau=3.0)
    assert (model["plain_step_ms"], model["step_ms"]) == (pytest.approx(20.0), pytest.approx(40.0))
    terms = [model[name] for name in ("v", "k", "c", "o")]
    assert terms == pytest.approx([1.2, 2, 0.2, 0.4])
    assert model["predicted_speedup"] == pytest.approx(3.0 / (1.2 + 2 * 0.2 + 0.4))


def test_the_median_run_stands_for_all():
    runs = [cost_model.StepTimes(1, step, {"gaps": step}) for step in (9.0, 1.0, 4.0)]
    assert cost_model.median_times(runs) is runs[2]


# --- contenders ---


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
    assert len({text for known in KINDS.values() for text in known}) == 16


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
            "whole_tokens_per_second", "mean_acceptance_length", "draft_acceptance_rate", "ratios", "cost_model",
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
