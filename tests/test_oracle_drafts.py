"""ORACLE replays a recorded text: every draft is accepted, and the text stays that of plain decoding."""

import json

import pytest

from spec_v2 import SamplingParams, spec_registry
from spec_v2.bench import command
from spec_v2.bench.contenders import EngineContender
from spec_v2.bench.oracle import OracleContender, register_oracle
from spec_v2.bench.report import for_humans
from spec_v2.cli import build_parser, main
from tests import tiny_models as tiny
from tests.harness import check_identity
from tests.surface import assert_at_rest
from tests.tiny_folder import save_tiny_model

PROMPTS = [tiny.random_prompt(80 + i, 5 + 6 * i) for i in range(3)]
CHAIN_OF_6 = (6, 1, 7)


@pytest.fixture(autouse=True)
def _oracle(monkeypatch):
    monkeypatch.setattr(spec_registry, "_registered", {})
    register_oracle()


def open_oracle(open_engine, schedule, device, **options):
    return open_engine(tiny.llama(device), "ORACLE", None, CHAIN_OF_6, schedule=schedule, **options)


def test_what_is_remembered_is_replayed_and_accepted(open_engine, schedule, device):
    engine = open_oracle(open_engine, schedule, device, chunked_prefill_size=4)
    for prompt in PROMPTS:
        engine.scheduler.worker.remember(prompt, tuple(tiny.oracle_of(engine.model).tokens(prompt, 30)))
    records = check_identity(engine, PROMPTS, [SamplingParams(max_new_tokens=22)] * 3)
    full = [r for r in records if not r.dropped]
    assert full
    assert {r.accept_len for r in full} == {7}
    assert_at_rest(engine)


def test_without_or_with_a_wrong_recording_the_text_is_right_all_the_same(open_engine, schedule, device):
    engine = open_oracle(open_engine, schedule, device)
    engine.scheduler.worker.remember(PROMPTS[0], tuple(tiny.oracle_of(engine.model).tokens(PROMPTS[1], 30)))
    check_identity(engine, PROMPTS, [SamplingParams(max_new_tokens=20)] * 3)


def test_a_retracted_request_goes_on_with_its_recording(open_engine, schedule, device):
    from tests.surface import count_retractions

    engine = open_oracle(open_engine, schedule, device, max_total_tokens=70)
    retractions = count_retractions(engine)
    for prompt in PROMPTS:
        engine.scheduler.worker.remember(prompt, tuple(tiny.oracle_of(engine.model).tokens(prompt, 40)))
    done = engine.generate(PROMPTS, SamplingParams(max_new_tokens=30))
    assert retractions
    for prompt, one in zip(PROMPTS, done, strict=True):
        assert list(one.output_ids) == tiny.oracle_of(engine.model).tokens(prompt, 30)
        assert set(one.spec.accept_lens) == {7}


def test_the_contender_records_plain_decoding_once(open_engine, device):
    runs = []

    class Noting(EngineContender):
        def run(self, prompts, max_new_tokens):
            runs.append(max_new_tokens)
            return super().run(prompts, max_new_tokens)

    plain = Noting("plain", open_engine(tiny.llama(device)))
    oracle = OracleContender("oracle", open_oracle(open_engine, "overlap", device), plain)
    for _ in range(2):
        sample = oracle.run(PROMPTS, 15)
        assert [done.spec.accept_lens for done in sample.completions] == [(7, 7)] * 3
    assert runs == [15]
    oracle.run(PROMPTS[:1], 8)
    assert runs == [15, 8]
    assert oracle.draft_passes == 1


def test_a_text_that_comes_out_otherwise_is_recorded_again(open_engine, device):
    """As where a tie is rounded the other way in a wider step; here, plain decoding is of another model."""
    other = EngineContender("plain", open_engine(tiny.random_llama(5).to(device)))
    oracle = OracleContender("oracle", open_oracle(open_engine, "overlap", device), other)
    sample = oracle.run(PROMPTS, 15)
    assert [done.spec.accept_lens for done in sample.completions] == [(7, 7)] * 3
    wanted = [tuple(tiny.oracle_of(oracle.engine.model).tokens(prompt, 15)) for prompt in PROMPTS]
    assert [done.output_ids for done in sample.completions] == wanted


def test_with_forced_acceptance_the_recording_is_the_plain_one(open_engine, device):
    plain = EngineContender("plain", open_engine(tiny.random_llama(5).to(device)))
    engine = open_oracle(open_engine, "overlap", device, speculative_simulated_accept_length=4)
    sample = OracleContender("oracle", engine, plain).run(PROMPTS, 13)
    texts = [done.output_ids for done in plain.run(PROMPTS, 13).completions]
    assert [engine.scheduler.worker._known[prompt] for prompt in PROMPTS] == texts
    assert [done.spec.accept_lens for done in sample.completions] == [(4, 4, 4)] * 3


def test_bench_takes_it_as_an_algorithm(tmp_path, capsys):
    model = str(save_tiny_model(tmp_path / "tiny"))
    argv = [
        "bench", "--model", model, "--dtype", "float64", "--num-threads", "1", "--json", "--prompts", "copy",
        "--algorithms", "ORACLE,none", "--speculative-num-steps", "5", "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", "6", "--max-new-tokens", "13", "--repetitions", "1",
    ]  # fmt: skip
    options = build_parser().parse_args(argv)
    options.command_line = argv
    text, code = command.run_bench(options)
    report = json.loads(text)
    assert code == 0
    oracle, plain = report["cells"]
    assert (oracle["contender"], oracle["mean_acceptance_length"]) == ("ORACLE overlap", 6.0)
    assert oracle["texts_that_differ"] == plain["texts_that_differ"] == []
    assert not oracle["forced_acceptance"]
    assert "ORACLE: drafts replay the text of a plain run" in for_humans(report)


def test_it_needs_somebody_to_record(capsys):
    assert main(["bench", "--algorithms", "oracle,NGRAM"]) == 2
    assert "add none to --algorithms" in capsys.readouterr().err
