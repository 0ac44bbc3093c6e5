"""The suite on tiny models: every row is measured as it would be at full size, skipped with a reason, or listed."""

import gzip
import json
import math
import types
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from spec_v2.bench import suite as suite_module
from spec_v2.bench import suite_record as record_module
from spec_v2.bench.contenders import EngineContender
from spec_v2.bench.cost_model import GAPS
from spec_v2.bench.prediction import Hardware, ModelCost, StepCost, measure_hardware
from spec_v2.bench.settings import bench_defaults
from spec_v2.bench.suite import Suite, SuiteRun, chosen_rows, suite_named
from spec_v2.bench.suite_figures import predicted, verdict_of
from spec_v2.bench.suite_models import (
    CYCLE,
    LLAMA_8B,
    SMOLLM2,
    cycle_from,
    load_suite_model,
    random_head,
    weight_bytes,
)
from spec_v2.bench.suite_probes import TREE, accept_and_commit, verify_attention
from spec_v2.bench.suite_report import for_humans
from spec_v2.bench.suite_rows import ENTRIES, H200_ROWS, Figure, in_cases
from spec_v2.bench.suite_settings import SuiteSettings, suite_settings
from spec_v2.bench.suite_traces import STEPS
from spec_v2.cli import build_parser, main
from spec_v2.observability.trace import THREADS
from spec_v2.server_args import ServerArgs
from spec_v2.speculative_hook import resolve_speculative

CPU = torch.device("cpu")
TINY_CONFIG = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
TINY_8B = replace(
    LLAMA_8B,
    name="tiny",
    config=TINY_CONFIG,
    dtype="float32",
    draft_vocab_size=80,
    prompt_tokens=32,
    new_tokens=18,
)
TINY_SMOLLM2 = replace(TINY_8B, name="tiny tied", config=TINY_CONFIG | {"tie_word_embeddings": True})


def tiny_suite(name="h200"):
    """A suite's own rows on tiny models: batches of at most 2, on a CPU."""
    rows = [replace(row, batch_size=min(row.batch_size, 2)) for row in suite_named(name).rows]
    plans = {"8b": TINY_8B, "smollm2": TINY_SMOLLM2}
    return Suite(name=name, rows=tuple(rows), plans=plans, device_type="cpu")


def run_tiny(tmp_path, *rows, suite=None, **settings):
    settings = {"suite": "h200", "rows": rows, "out": str(tmp_path), "engine": {"num_threads": 1}} | settings
    return SuiteRun(suite or tiny_suite(), SuiteSettings(**settings), ["bench"]).report_all()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """All rows of the large suite but those of long contexts, measured once."""
    tmp_path = tmp_path_factory.mktemp("suite")
    rows = [row.name for row in tiny_suite().rows if row.figure.kind != "attention"]
    found = run_tiny(tmp_path, *rows)
    assert json.loads((tmp_path / "h200.json").read_text()) == found
    return found


# --- what is in it ---


def test_the_large_suite_has_the_rows_that_were_asked_for():
    marks = {row.name: (row.must, row.aim) for row in H200_ROWS}
    assert marks["8b-plain-b1"] == (215, 245)
    assert (marks["8b-plain-b32"], marks["8b-plain-b128"]) == ((6_000, 6_600), (17_000, 19_000))
    assert (marks["8b-chain3-b1"], marks["8b-chain5-b1"]) == ((5.5, 4.9), (6.2, 5.4))
    assert (marks["8b-chain3-b32"], marks["8b-chain5-b32"]) == ((7.0, 6.3), (9.0, 7.5))
    assert (marks["8b-tree-b1"], marks["8b-ngram-b1"], marks["8b-oracle-b1"]) == (
        (7.5, 6.2),
        (5.5, 4.5),
        (8, 10.5),
    )
    assert (marks["smollm2-plain-b1"], marks["smollm2-plain-b256"]) == ((1_000, 2_000), (90_000, 140_000))
    assert (marks["smollm2-chain3-b1"], marks["smollm2-chain3-b256"]) == ((1_500, 3_000), (95_000, 180_000))
    assert marks["attention-8b-b32"] == (75, 85)
    assert (marks["accept-8b-b1"], marks["accept-8b-b32"]) == ((0.15, 0.08), (0.25, 0.12))
    assert {marks[name] for name in marks if name.startswith("exposed")} == {(0.10, 0.03)}
    assert {marks[name][0] for name in marks if name.startswith("overlap")} == {0.99}


@pytest.mark.parametrize("name", ["h200", "cpu"])
def test_names_are_distinct_and_say_their_batch(name):
    rows = suite_named(name).rows
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.name.endswith(f"-b{row.batch_size}")
        assert set(row.entries) <= set(ENTRIES)
        assert row.model in suite_named(name).plans


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if entry.theirs is None])
def test_the_engine_takes_every_entry_as_it_is(name):
    """Nothing is corrected, and forced lengths fit their trees."""
    from spec_v2.bench.oracle import register_oracle

    register_oracle()
    args = ServerArgs(**ENTRIES[name].settings)
    resolved = resolve_speculative(args, draft_model_given=args.algorithm.needs_draft_model())
    for field, value in ENTRIES[name].settings.items():
        assert getattr(resolved, field) == value
    assert resolved.schedule == ("sync" if name.endswith(" sync") else "overlap")


def test_the_shapes_are_those_of_the_models():
    assert weight_bytes(LLAMA_8B) == pytest.approx(2 * 8.03e9, rel=0.001)
    assert weight_bytes(SMOLLM2) == pytest.approx(2 * 134.5e6, rel=0.001)


# --- models ---


def test_a_random_target_goes_round_in_circles():
    model = load_suite_model(TINY_8B, CPU)
    prompts = model.prompts(3)
    assert [len(prompt) for prompt in prompts] == [TINY_8B.prompt_tokens] * 3
    assert len(set(prompts)) == 3
    with torch.no_grad():
        for prompt in prompts:
            logits = model.model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
            assert logits.isfinite().all()
            assert logits.argmax(-1).tolist() == cycle_from(prompt[0], len(prompt) + 1)[1:]
    assert cycle_from(CYCLE + 14, 4) == [CYCLE + 14, CYCLE + 15, CYCLE, CYCLE + 1]


def test_random_weights_are_the_same_every_time():
    one, two = (load_suite_model(TINY_8B, CPU) for _ in range(2))
    for mine, theirs in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(one.head()[0].lm_head.weight, two.head()[0].lm_head.weight)
    assert one.head() is one.head()


def test_a_random_head_drafts_from_the_targets_tokens():
    model = load_suite_model(TINY_8B, CPU).model
    ids = random_head(model, 80, 1).target_ids.tolist()
    assert ids == sorted(set(ids))
    assert ids[0] >= 0
    assert ids[-1] < 256
    assert len(ids) == 80


# --- predictions ---


def test_costs_count_what_a_forward_reads():
    model = load_suite_model(TINY_8B, CPU)
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96
    assert model.cost.num_weights == 6 * layer + 256 * 64  # the embedding of an untied model is not read
    assert model.cost.kv_bytes_per_token == 2 * 6 * 32 * 4
    tied = load_suite_model(TINY_SMOLLM2, CPU)
    assert tied.cost.num_weights == model.cost.num_weights
    head, cost = model.head()
    assert cost.num_weights == 3 * 64 * 64 + (2 * 64) * 64 * 2 + 64 * 64 + 3 * 64 * 96 + 80 * 64
    assert cost.vocab_size == 80
    assert head.decoder.embed_tokens is model.model.get_input_embeddings()


COST = ModelCost(
    num_weights=1000, bytes_per_weight=2, kv_bytes_per_token=10, attention_flops_per_key=4, vocab_size=50
)


def test_a_step_takes_its_bytes_or_its_arithmetic():
    memory, compute = Hardware(1e3, 1e12), Hardware(1e12, 1e3)
    moved = 2000 + (2 * 7 + 6) * 10 + 6 * 50 * 2
    assert COST.seconds(memory, 2, 3, 7) == pytest.approx(moved / 1e3)
    assert COST.seconds(compute, 2, 3, 7) == pytest.approx(6 * (2000 + 4 * 7) / 1e3)
    step = StepCost(target=COST, draft=COST, num_nodes=4, num_steps=3, topk=1, accept_width=4)
    once, row = COST.seconds(memory, 1, 4, 7), COST.seconds(memory, 1, 1, 7)
    assert step.seconds(memory, 1, 7) == pytest.approx(2 * once + 2 * row)


def test_predictions_follow_from_the_steps():
    costs = {
        "plain": StepCost(target=COST, draft=None, num_nodes=1, num_steps=1, topk=1, accept_width=1),
        "oracle k=12": StepCost(target=COST, draft=None, num_nodes=13, num_steps=12, topk=1, accept_width=13),
    }
    hardware = Hardware(1e6, 1e12)

    def guess(kind, *entries):
        row = replace(H200_ROWS[0], figure=Figure(kind, entries), batch_size=2)
        return predicted(row, costs, hardware, 100)

    plain, oracle = (cost.seconds(hardware, 2, 100) for cost in costs.values())
    assert guess("speed", "plain") == pytest.approx(2 / plain)
    assert guess("step", "oracle k=12") == pytest.approx(1e3 * oracle)
    assert guess("times", "oracle k=12", "plain") == pytest.approx(13 * plain / oracle)
    assert guess("times", "plain", "transformers generate") is None
    assert guess("exposed", "plain") == 0.0


def test_the_hardware_is_measured(monkeypatch):
    found = measure_hardware(CPU, torch.float32)
    assert found.copy_bytes_per_second > 1e8
    assert found.flops_per_second > 1e8


# --- a run ---


def test_every_row_is_measured(report):
    wanted = [row.name for row in H200_ROWS if row.figure.kind != "attention"]
    # without the real model there is nothing whose first layers could draft
    assert [entry["name"] for entry in report["skipped"]] == ["assisted-smollm2-b1"]
    assert "first layers of the real one" in report["skipped"][0]["reason"]
    assert report["failed"] == []
    assert {row["name"] for row in report["rows"]} == {*wanted} - {"assisted-smollm2-b1"}
    for row in report["rows"]:
        assert len(row["values"]) == 3
        assert all(math.isfinite(value) and value >= 0 for value in row["values"])
        assert row["measured"]["min"] <= row["measured"]["median"] <= row["measured"]["max"]


def test_json_has_these_keys(report):
    assert list(report) == [
        "suite", "command", "date", "machine", "load_average", "versions", "device", "hardware", "engine_settings",
        "repetitions", "seconds", "rows", "skipped", "failed", "traces", "kept_from",
    ]  # fmt: skip
    for row in report["rows"]:
        assert list(row) == [
            "name", "text", "model", "batch_size", "unit", "higher_is_better", "must", "aim", "peers", "predicted",
            "measured", "values", "verdict", "forced_acceptance", "contenders",
        ]  # fmt: skip


def by_name(report):
    return {row["name"]: row for row in report["rows"]}


def test_forced_rows_say_so_and_accept_what_they_say(report):
    rows = by_name(report)
    for name, tau in (
        ("8b-chain3-b1", 3),
        ("8b-chain5-b32", 3),
        ("8b-oracle-b1", 13),
        ("smollm2-chain3-b1", 3),
    ):
        first = next(iter(rows[name]["contenders"].values()))
        assert rows[name]["forced_acceptance"]
        assert (first["mean_acceptance_length"], first["forced_acceptance"]) == (tau, True)
    assert rows["8b-tree-b1"]["contenders"]["tree 5x4x16"]["forced_acceptance"]
    assert not rows["8b-plain-b1"]["forced_acceptance"]


def test_ngram_is_accepted_by_the_target_itself(report):
    cell = by_name(report)["8b-ngram-b1"]["contenders"]["NGRAM 8"]
    assert not cell["forced_acceptance"]
    assert cell["mean_acceptance_length"] == 8.0


def test_figures_follow_from_their_contenders(report):
    rows = by_name(report)
    cell = rows["8b-chain3-b1"]["contenders"]["chain k=3"]
    steps = [1e3 * s / n for s, n in zip(cell["decode_seconds"], cell["decode_steps"], strict=True)]
    assert rows["8b-chain3-b1"]["values"] == pytest.approx(steps)
    plain = rows["8b-plain-b1"]["contenders"]["plain"]["decode_tokens_per_second"]
    assert rows["8b-plain-b1"]["measured"] == plain
    exposed = rows["exposed-8b-b1"]
    assert exposed["contenders"]["chain k=3"]["parts_ms"][GAPS] in exposed["values"]
    # one case, one measurement: what both rows know of plain decoding is the same
    assert rows["8b-ngram-b1"]["contenders"]["plain"] == rows["8b-plain-b1"]["contenders"]["plain"]
    assert rows["smollm2-gain-b1"]["measured"]["median"] > 0


def test_people_read_a_table(report):
    text = for_humans(report)
    assert "SGLang 6.36, vLLM 5.54 ms" in text
    assert "measured elsewhere on another H200: SGLang 0.5.11, vLLM 0.20.0" in text
    assert "forced acceptance: tau was chosen" in text
    assert "skipped   assisted-smollm2-b1: " in text
    for row in report["rows"]:
        assert text.count(row["name"]) >= 2


def test_cpu_rows_run_too(tmp_path):
    report = run_tiny(
        tmp_path, "plain-b1", "ngram-b1", "overlap-b1", "standalone-b8", suite=tiny_suite("cpu")
    )
    assert [row["name"] for row in report["rows"]] == ["plain-b1", "ngram-b1", "overlap-b1"]
    assert [entry["name"] for entry in report["skipped"]] == ["standalone-b8"]


# --- which rows, and for how long ---


def test_rows_are_chosen_by_name():
    suite = suite_named("h200")
    assert chosen_rows(suite, ()) == list(suite.rows)
    chosen = chosen_rows(suite, ("8b-ngram-b1", "8b-plain-b1"))
    assert [row.name for row in chosen] == ["8b-plain-b1", "8b-ngram-b1"]
    with pytest.raises(ValueError, match=r"--rows 8b-plane-b1: .* did you mean 8b-plain-b1"):
        chosen_rows(suite, ("8b-plain-b1", "8b-plane-b1"))


def test_a_case_is_a_model_at_a_batch_size():
    cases = in_cases(H200_ROWS)
    assert sum(map(len, cases)) == len(H200_ROWS)
    for rows in cases:
        assert len({(row.model, row.batch_size) for row in rows}) == 1
        if len(rows) > 1:
            assert all(row.figure.entries for row in rows)
    models = [rows[0].model for rows in cases]
    assert models == sorted(models)  # a model is loaded once


def test_the_time_limit_lists_what_it_left_out(tmp_path, monkeypatch):
    clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(record_module, "time", clock)
    compare = SuiteRun._compare

    def slow(self, *args):
        compare(self, *args)
        clock.now += 50

    monkeypatch.setattr(SuiteRun, "_compare", slow)
    names = ("8b-plain-b1", "8b-ngram-b1", "8b-plain-b32", "8b-plain-b128")
    suite = replace(tiny_suite(), rows=tuple(row for row in H200_ROWS if row.name in names))
    report = run_tiny(tmp_path, *names, suite=suite, time_limit=60.0)
    assert [row["name"] for row in report["rows"]] == ["8b-plain-b1", "8b-ngram-b1", "8b-plain-b32"]
    assert [entry["name"] for entry in report["skipped"]] == ["8b-plain-b128"]
    assert report["skipped"][0]["reason"] == "not started: the time limit of 60 s was reached"


def test_a_case_that_fails_leaves_the_others_alone(tmp_path, monkeypatch, capsys):
    attention = suite_module.PROBES["attention"]

    def broken(*args, **kwargs):
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(suite_module.PROBES, "commit", broken)
    small = replace(TINY_8B, config=TINY_CONFIG | {"num_hidden_layers": 1})
    monkeypatch.setitem(
        suite_module.PROBES, "attention", lambda *args, **kw: attention(small, *args[1:], **kw, context=64)
    )
    report = run_tiny(tmp_path, "accept-8b-b1", "attention-8b-b32")
    assert [entry["reason"] for entry in report["failed"]] == ["RuntimeError: no such kernel"]
    assert [row["name"] for row in report["rows"]] == ["attention-8b-b32"]
    assert "failed: accept-8b-b1: RuntimeError: no such kernel" in capsys.readouterr().err


def test_a_contender_that_fails_takes_its_own_rows_away(tmp_path, monkeypatch):
    make = suite_module.Workshop._engine

    def broken(self, entry, *args):
        if entry.settings.get("speculative_eagle_topk") == 4:
            raise RuntimeError("no room")
        return make(self, entry, *args)

    monkeypatch.setattr(suite_module.Workshop, "_engine", broken)
    report = run_tiny(tmp_path, "8b-plain-b1", "8b-tree-b1", "8b-ngram-b1")
    assert [row["name"] for row in report["rows"]] == ["8b-plain-b1", "8b-ngram-b1"]
    (failed,) = report["failed"]
    assert (failed["name"], failed["reason"]) == ("8b-tree-b1", "tree 5x4x16: RuntimeError: no room")


def test_an_oracle_alone_finds_what_it_replays(tmp_path):
    report = run_tiny(tmp_path, "8b-oracle-b1")
    assert [row["name"] for row in report["rows"]] == ["8b-oracle-b1"]


def test_a_killed_run_keeps_its_rows(tmp_path, monkeypatch):
    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setitem(suite_module.PROBES, "commit", killed)
    with pytest.raises(KeyboardInterrupt):
        run_tiny(tmp_path, "8b-plain-b1", "accept-8b-b1")
    (place,) = tmp_path.iterdir()
    kept = json.loads(place.read_text())
    assert [row["name"] for row in kept["rows"]] == ["8b-plain-b1"]


def test_a_run_that_is_killed_between_repetitions_keeps_the_first(tmp_path, monkeypatch):
    run, calls = EngineContender.run, []

    def killed(self, *args, **options):
        calls.append(self.name)
        if len(calls) == 1 + 2 * 2:  # a few tokens to see that it runs, a warm-up, a repetition ...
            raise KeyboardInterrupt
        return run(self, *args, **options)

    monkeypatch.setattr(EngineContender, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        run_tiny(tmp_path, "8b-plain-b1")
    kept = json.loads((tmp_path / "h200.json").read_text())
    assert [(row["name"], len(row["values"])) for row in kept["rows"]] == [("8b-plain-b1", 2)]


def test_a_case_that_fails_after_a_repetition_leaves_no_row(tmp_path, monkeypatch):
    def broken(*args):
        raise RuntimeError("too few tokens")

    monkeypatch.setattr(suite_module, "_check_lengths", broken)
    report = run_tiny(tmp_path, "8b-plain-b1")
    assert report["rows"] == []
    assert [entry["name"] for entry in report["failed"]] == ["8b-plain-b1"]


def test_resume_measures_what_is_missing(tmp_path, monkeypatch):
    first = run_tiny(tmp_path, "8b-plain-b1")
    place = tmp_path / "h200.json"
    cut = json.loads(place.read_text())
    cut["rows"].append({**cut["rows"][0], "name": "8b-ngram-b1", "values": [1.0]})  # of one repetition
    place.write_text(json.dumps(cut))
    opened = []
    open_one = suite_module.Workshop.open
    monkeypatch.setattr(
        suite_module.Workshop,
        "open",
        lambda self, name, *args: opened.append(name) or open_one(self, name, *args),
    )
    report = run_tiny(tmp_path, "8b-plain-b1", "8b-ngram-b1", resume=True)
    assert opened == ["NGRAM 8", "plain"]
    assert [row["name"] for row in report["rows"]] == ["8b-plain-b1", "8b-ngram-b1"]
    assert report["rows"][0] == json.loads(json.dumps(first["rows"][0]))
    assert len(report["rows"][1]["values"]) == 3
    assert report["kept_from"] == first["date"]
    again = run_tiny(tmp_path, "8b-plain-b1", resume=True)
    assert (len(again["rows"]), len(opened)) == (1, 2)
    with pytest.raises(ValueError, match=r"--resume: .* was measured with"):
        run_tiny(tmp_path, "8b-plain-b1", resume=True, engine={"page_size": 16})


def test_traces_show_both_schedules(tmp_path):
    """Few steps, small files; publish lies between verify and draft-extend, and only overlap runs ahead."""
    out, folder = tmp_path / "out", tmp_path / "traces"
    out.mkdir()
    folder.mkdir()
    suite = replace(tiny_suite(), traced={"8b": "chain k=3", "smollm2": "chain k=3"})
    report = run_tiny(out, "8b-plain-b1", suite=suite, traces=str(folder))
    files = [f"8b-chain-k3-{schedule}.trace.json.gz" for schedule in ("overlap", "sync")]
    assert report["traces"] == files == sorted(path.name for path in folder.iterdir())
    for schedule, file in zip(("overlap", "sync"), files, strict=True):
        raw = (folder / file).read_bytes()
        assert len(raw) < 300_000
        trace = json.loads(gzip.decompress(raw))
        assert trace["otherData"]["schedule"] == schedule
        assert trace["otherData"]["forced_accept_length"] == 3
        spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        begins = {(e["tid"], e["name"], e["args"]["step"]): e["ts"] for e in spans}
        steps = sorted({e["args"]["step"] for e in spans})
        assert len(steps) == STEPS
        for step in steps:
            order = [
                begins[THREADS["forward"], name, step]
                for name in ("resolve", "draft", "verify", "publish", "draft_extend")
            ]
            assert order == sorted(order)
        host = THREADS["host"]
        ahead = [begins[host, "launch", b] < begins[host, "process", a] for a, b in pairwise(steps)]
        assert set(ahead) == {schedule == "overlap"}


def test_a_trace_that_fails_is_listed(tmp_path):
    suite = replace(tiny_suite(), traced={"smollm2": "STANDALONE", "8b": "no such contender"})
    report = run_tiny(tmp_path, "8b-plain-b1", "smollm2-plain-b1", suite=suite, traces=str(tmp_path))
    assert [row["name"] for row in report["rows"]] == ["8b-plain-b1", "smollm2-plain-b1"]
    assert [entry["name"] for entry in report["skipped"]] == ["trace-smollm2"]
    assert [entry["name"] for entry in report["failed"]] == ["trace-8b"]


def test_progress_says_what_is_expected_before_it_is_measured(tmp_path, capsys):
    run_tiny(tmp_path, "8b-plain-b1")
    out = capsys.readouterr()
    lines = [line.partition("] ")[2] for line in out.err.splitlines()]
    assert out.out == ""
    assert lines[0] == "8b, batch 1: loading"
    (guess,) = [i for i, line in enumerate(lines) if line.startswith("8b-plain-b1: predicted ")]
    runs = [i for i, line in enumerate(lines) if line.endswith("of 4 runs")]
    (done,) = [i for i, line in enumerate(lines) if line.startswith("8b-plain-b1: ") and "must 215" in line]
    assert guess < runs[0] < runs[-1] < done


@pytest.mark.parametrize(
    ("value", "higher", "wanted"),
    [(9.0, True, "below must"), (10.0, True, "must"), (20.0, True, "aim"), (9.0, False, "aim"), (15.0, False, "must"),
     (21.0, False, "below must")],
)  # fmt: skip
def test_a_verdict_is_the_better_mark_that_is_met(value, higher, wanted):
    must, aim = (10.0, 20.0) if higher else (20.0, 10.0)
    row = replace(H200_ROWS[0], figure=Figure("speed" if higher else "step", ("plain",)), must=must, aim=aim)
    assert verdict_of(row, value) == wanted
    assert verdict_of(replace(row, must=None, aim=None), value) is None
    assert verdict_of(replace(row, aim=None), must) == "must"


def test_settings_that_no_row_chooses_reach_every_engine(tmp_path, monkeypatch):
    seen = []
    make = suite_module.Workshop._engine

    def noting(self, *args):
        engine = make(self, *args)
        seen.append((engine.server_args.page_size, engine.server_args.num_threads, engine.tokenizer))
        return engine

    monkeypatch.setattr(suite_module.Workshop, "_engine", noting)
    options = build_parser().parse_args(
        ["bench", "--suite", "cpu", "--page-size", "16", "--num-threads", "1"]
    )
    settings = replace(suite_settings(options, bench_defaults()), rows=("8b-ngram-b1",), out=str(tmp_path))
    report = SuiteRun(tiny_suite(), settings, ["bench"]).report_all()
    assert report["engine_settings"] == {"page_size": 16, "num_threads": 1}
    assert seen == [(16, 1, None)] * 2


# --- the parts by themselves ---

FAST = Hardware(1e9, 1e12)


def test_attention_is_measured_against_the_bytes_it_reads(monkeypatch):
    monkeypatch.setattr(
        "spec_v2.bench.suite_probes.Part.seconds", lambda self, n: ([self.run() and 2.0] * n, "set")
    )
    found = verify_attention(TINY_8B, FAST, CPU, batch_size=2, repetitions=3, context=64, tokens=4)
    read = 2 * (64 + 4) * 2 * 2 * 16 * 4  # requests, keys, KV heads, keys and values, width, float32
    assert found.values == pytest.approx([100 * read / 2.0 / 1e9] * 3)
    assert (found.floor, found.note) == (100.0, "set")


@pytest.mark.parametrize("batch_size", [1, 2])
def test_accept_and_commit_is_a_whole_step(monkeypatch, batch_size):
    seen = []
    verify = __import__("spec_v2.bench.suite_probes", fromlist=["verify"]).verify

    def noting(*args):
        seen.append((args[3], verify(*args)))
        return seen[-1][1]

    monkeypatch.setattr("spec_v2.bench.suite_probes.verify", noting)
    found = accept_and_commit(TINY_8B, FAST, CPU, batch_size=batch_size, repetitions=3)
    assert len(found.values) == 3
    assert all(value > 0 for value in found.values)
    assert found.floor == pytest.approx(1e3 * batch_size * 16 * 256 * 4 / 1e9)
    for tree, verdict in seen:
        assert tree.tokens.shape == (batch_size, TREE.num_draft_tokens)
        assert int((tree.parents >= 0).sum()) == batch_size * (TREE.num_draft_tokens - 1)  # no padding
        assert int(verdict.draft_depths.min()) > 1
        assert (verdict.new_seq_lens == TINY_8B.prompt_tokens + verdict.accept_lens).all()


# --- the command line ---


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_gpu_everything_is_skipped_and_says_why(tmp_path, capsys):
    code = main(
        ["bench", "--suite", "h200", "--json", "--rows", "8b-plain-b1,accept-8b-b1", "--out", str(tmp_path)]
    )
    out = capsys.readouterr()
    report = json.loads(out.out)
    assert code == 0
    assert report == json.loads((tmp_path / "h200.json").read_text())
    assert report["rows"] == report["failed"] == []
    assert [entry["name"] for entry in report["skipped"]] == ["8b-plain-b1", "accept-8b-b1"]
    assert {entry["reason"] for entry in report["skipped"]} == {
        "needs a CUDA device, and this machine has no usable one"
    }
    assert main(["bench", "--suite", "h200", "--rows", "8b-plain-b1"]) == 0
    assert "skipped   8b-plain-b1: needs a CUDA device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--suite", "cpu", "--rows", "nothing"), "--rows nothing: no row of --suite cpu"),
        (("--suite", "cpu", "--repetitions", "2"), "--repetitions 2"),
        (("--suite", "cpu", "--algorithms", "none"), "--algorithms: --suite cpu chooses this itself"),
        (("--suite", "cpu", "--max-new-tokens", "9"), "--max-new-tokens: --suite cpu chooses this itself"),
        (("--suite", "cpu", "--draft-model", "EAGLE=x"), "--draft-model: --suite cpu chooses this itself"),
        (("--suite", "cpu", "--speculative-num-steps", "3"), "--speculative-num-steps: --suite cpu chooses"),
        (("--suite", "cpu", "--dtype", "float32"), "--dtype: --suite cpu chooses this itself"),
        (("--suite", "cpu", "--model", "x"), "--model-path: --suite cpu chooses this itself"),
        (("--suite", "cpu", "--out", "/no/such/folder"), "--out /no/such/folder"),
        (("--rows", "8b-plain-b1"), "--rows is for --suite"),
        (("--time-limit", "5"), "--time-limit is for --suite"),
        (("--out", "."), "--out is for --suite"),
        (("--traces", "."), "--traces is for --suite"),
        (("--resume",), "--resume is for --suite"),
        (("--suite", "cpu", "--resume"), "--resume needs the report of an earlier run"),
        (("--suite", "cpu", "--traces", "/no/such/folder"), "--traces /no/such/folder"),
    ],
)  # fmt: skip
def test_what_a_suite_would_not_heed_is_refused(argv, named, capsys):
    assert main(["bench", *argv]) == 2
    out = capsys.readouterr()
    assert named in out.err
    assert out.out == ""


@pytest.mark.parametrize(
    "argv", [("--suite", "h100"), ("--suite", "cpu", "--time-limit", "soon"), ("--time-limit", "0")]
)
def test_flags_that_do_not_parse_are_named(argv, capsys):
    with pytest.raises(SystemExit):
        main(["bench", *argv])
    assert argv[-2] in capsys.readouterr().err
