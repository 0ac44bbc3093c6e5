"""Whatever ends a request, all that it owned is free afterwards, and the engine goes on as new (item 5)."""

import pytest

from spec_v2 import SamplingParams
from tests import tiny_models as tiny
from tests.cells import SETUPS, open_setup, setup_prompts
from tests.harness import check_identity, make_engine

COUNT = 5
LABELS = ("row_table", "prefill", "verdict", "resolve", "draft", "verify", "publish", "draft_extend", "stash")


class Injected(Exception):
    """Raised by a test inside the engine."""


def free(engine):
    """The free pages and rows; their order may change."""
    cache = engine.scheduler.cache
    return sorted(cache.pages._free), sorted(cache.rows._free)


def assert_idle(engine, before):
    scheduler = engine.scheduler
    assert free(engine) == before
    assert not scheduler.planner.live
    assert not scheduler.planner.waiting


def check_as_new(engine, setup):
    check_identity(engine, setup_prompts(setup, engine.model, 3), [SamplingParams(max_new_tokens=16)] * 3)


def raise_at(label, occurrence):
    """An `on_run` hook that raises when a launch of this label runs for the n-th time."""
    seen = []

    def hook(name, step):
        seen.append(name)
        if name == label and seen.count(label) == occurrence:
            raise Injected(f"{label}, step {step}")

    return hook


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("setup", SETUPS)
def test_after_finish_and_stop(open_engine, setup, page_size, schedule, device):
    engine = open_setup(open_engine, setup, schedule, device, page_size=page_size, max_running_requests=3)
    before = free(engine)
    prompts = setup_prompts(setup, engine.model, COUNT)
    stops = [tiny.oracle_of(engine.model).tokens(prompt, 30)[5 + i] for i, prompt in enumerate(prompts)]
    params = [SamplingParams(max_new_tokens=30, stop_token_ids=(stop,)) for stop in stops]
    for _ in range(2):
        check_identity(engine, prompts, params)
        assert_idle(engine, before)


@pytest.mark.parametrize("occurrence", [1, 3])
@pytest.mark.parametrize("label", [*LABELS, "history", "copy"])
def test_an_exception_in_a_launch_frees_everything(open_engine, label, occurrence, schedule, device):
    setup = "ngram" if label == "history" else "eagle-tree"
    # two rows, so that requests are admitted, prefilled and waiting while others run
    engine = open_setup(open_engine, setup, schedule, device, max_running_requests=2)
    before = free(engine)
    stream = engine._copy_stream if label == "copy" else engine._forward_stream
    stream.on_run = raise_at(label, occurrence)
    params = [SamplingParams(max_new_tokens=8 + 5 * i) for i in range(COUNT)]
    with pytest.raises(Injected, match=label):
        engine.generate(setup_prompts(setup, engine.model, COUNT), params)
    stream.on_run = None
    assert_idle(engine, before)
    check_as_new(engine, setup)
    assert_idle(engine, before)


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("setup", SETUPS)
def test_an_interrupt_frees_everything(open_engine, monkeypatch, setup, step, schedule, device):
    engine = open_setup(open_engine, setup, schedule, device, max_running_requests=3)
    before = free(engine)
    process, calls = engine.scheduler.process_batch_result, []

    def interrupted(batch, result):
        calls.append(result)
        if len(calls) == step:
            raise KeyboardInterrupt
        return process(batch, result)

    monkeypatch.setattr(engine.scheduler, "process_batch_result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(setup_prompts(setup, engine.model, COUNT), SamplingParams(max_new_tokens=20))
    monkeypatch.undo()
    assert_idle(engine, before)
    check_as_new(engine, setup)


def test_a_refused_prompt_leaves_nothing_queued(open_engine, schedule, device):
    engine = open_setup(open_engine, "eagle-chain", schedule, device, max_total_tokens=64)
    before = free(engine)
    for prompts, field in (([[1, 2], [tiny.VOCAB]], "prompts"), ([[1], [1] * 60], "max_total_tokens")):
        with pytest.raises(ValueError, match=field):
            engine.generate(prompts, SamplingParams(max_new_tokens=8))
        assert_idle(engine, before)
    check_identity(engine, [(1, 2)], [SamplingParams(max_new_tokens=8)])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("setup", SETUPS)
def test_kv04_requests_wait_where_the_pool_is_small(open_engine, setup, page_size, schedule, device):
    """The pool holds one or two requests at their longest; all finish, with the right text."""
    engine = open_setup(open_engine, setup, schedule, device, page_size=page_size, max_total_tokens=192)
    before = free(engine)
    prompts, params = setup_prompts(setup, engine.model, COUNT), SamplingParams(max_new_tokens=24)
    oracle = tiny.oracle_of(engine.model)
    for prompt, done in zip(prompts, engine.generate(prompts, params), strict=True):
        assert done.output_ids == oracle.expected(prompt, params)
    assert_idle(engine, before)


@pytest.mark.parametrize("setup", ["standalone-tree", "ngram"])
def test_kv03_many_requests_with_pages_that_are_never_full(open_engine, setup, schedule, device):
    engine = open_setup(open_engine, setup, schedule, device, page_size=16)
    before = free(engine)
    prompts = [tiny.random_prompt(i, 1 + i % 17) for i in range(40)]
    check_identity(engine, prompts, [SamplingParams(max_new_tokens=1 + 7 * i % 11) for i in range(40)])
    assert_idle(engine, before)


@pytest.mark.parametrize("draft", ["none", "another", "the target itself"])
def test_closing_gives_the_model_its_own_attention_back(draft, device):
    target = tiny.llama(device)
    own = target.config._attn_implementation
    drafts = {"none": None, "another": tiny.noisy_copy(target), "the target itself": target}
    algorithm = None if draft == "none" else "STANDALONE"
    with make_engine(target, algorithm, drafts[draft]) as engine:
        engine.generate([1, 2, 3], SamplingParams(max_new_tokens=4))
    restored, target.config._attn_implementation = target.config._attn_implementation, own
    assert restored == own
