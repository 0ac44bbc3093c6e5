"""A step emits several tokens at once; a request still ends exactly where plain decoding would end it."""

import pytest

from spec_v2 import SamplingParams
from tests import tiny_models as tiny
from tests.cells import SETUPS, open_setup, setup_prompts
from tests.harness import CHAIN, Recorder

WIDTH = CHAIN[0] + 1


def open_perfect(open_engine, setup, schedule, device, **changes):
    """A drafter that is right nearly always, so that runs are long and ends fall inside them."""
    drafter = "nothing" if setup == "plain" else "self"
    engine = open_setup(open_engine, setup, schedule, device, drafter=drafter, **changes)
    return engine, Recorder(engine)


def clear_prompt(setup, model, count):
    """A prompt whose first `count` output tokens are all different, and those tokens."""
    for prompt in setup_prompts(setup, model, 30):
        tokens = tiny.oracle_of(model).tokens(prompt, count)
        if len(set(tokens)) == count:
            return prompt, tokens
    raise AssertionError("no prompt gives distinct tokens")


def check(engine, prompt, many):
    """Outputs and reasons, for one prompt with many settings in one batch."""
    oracle = tiny.oracle_of(engine.model)
    for params, done in zip(many, engine.generate([prompt] * len(many), many), strict=True):
        wanted = oracle.expected(prompt, params)
        stopped = wanted[-1] in params.stop_token_ids
        assert (done.output_ids, done.finish_reason) == (wanted, "stop" if stopped else "length"), params


def places_in_run(recorder, prompt_len, ends):
    """For each end, the place of the last output token inside the run that its step emitted."""
    return {
        ends[r.request] + prompt_len - 1 - (r.seq_len + 1)
        for r in recorder.records
        if not r.dropped and 0 <= ends[r.request] + prompt_len - 1 - (r.seq_len + 1) < r.accept_len
    }


@pytest.mark.parametrize("setup", SETUPS)
def test_sp03_a_stop_token_at_each_place_of_a_run_ends_it_there(open_engine, setup, schedule, device):
    engine, recorder = open_perfect(open_engine, setup, schedule, device)
    prompt, tokens = clear_prompt(setup, engine.model, 2 * WIDTH + 2)
    # the other stop ids are never said
    absent = tuple(set(range(tiny.VOCAB)) - set(tokens))[:2]
    many = [SamplingParams(max_new_tokens=len(tokens), stop_token_ids=(token, *absent)) for token in tokens]
    check(engine, prompt, many)
    if "chain" in setup:
        ends = {i: i + 1 for i in range(len(tokens))}
        assert places_in_run(recorder, len(prompt), ends) == set(range(WIDTH))


@pytest.mark.parametrize("setup", SETUPS)
def test_sp01_the_earliest_cut_wins(open_engine, setup, schedule, device):
    """Each stop place with each budget, before, at and after it."""
    engine, _ = open_perfect(open_engine, setup, schedule, device)
    prompt, tokens = clear_prompt(setup, engine.model, WIDTH + 2)
    many = [
        SamplingParams(max_new_tokens=budget, stop_token_ids=(token,))
        for token in tokens
        for budget in range(1, len(tokens) + 1)
    ]
    check(engine, prompt, many)


@pytest.mark.parametrize("setup", SETUPS)
def test_sp04_sp08_every_small_budget_is_met_exactly(open_engine, setup, schedule, device):
    engine, recorder = open_perfect(open_engine, setup, schedule, device)
    prompt = setup_prompts(setup, engine.model, 1)[0]
    budgets = range(1, 2 * WIDTH + 3)
    done = engine.generate([prompt] * len(budgets), [SamplingParams(max_new_tokens=n) for n in budgets])
    plain = tiny.oracle_of(engine.model).tokens(prompt, max(budgets))
    assert [d.output_ids for d in done] == [tuple(plain[:n]) for n in budgets]
    assert done[0].spec.verify_ct == 0, "one token is the prefill's: no step was needed"
    if "chain" in setup:
        ends = dict(enumerate(budgets))
        assert places_in_run(recorder, len(prompt), ends) == set(range(WIDTH))


@pytest.mark.parametrize("setup", SETUPS)
def test_sp06_the_models_own_end_and_ignore_eos(open_engine, monkeypatch, setup, schedule, device):
    engine, _ = open_perfect(open_engine, setup, schedule, device)
    prompt, tokens = clear_prompt(setup, engine.model, 10)
    monkeypatch.setattr(engine.model.generation_config, "eos_token_id", [tokens[4], tokens[7]])
    cases = (
        ({}, 5, "stop"),
        ({"ignore_eos": True}, 10, "length"),
        ({"ignore_eos": True, "stop_token_ids": (tokens[7],)}, 8, "stop"),
        ({"stop_token_ids": (tokens[2],)}, 3, "stop"),
    )
    for options, length, reason in cases:
        (done,) = engine.generate(prompt, SamplingParams(max_new_tokens=10, **options))
        assert (done.output_ids, done.finish_reason) == (tuple(tokens[:length]), reason)


@pytest.mark.parametrize("setup", ["standalone-chain", "standalone-tree", "eagle-chain", "eagle-tree"])
def test_dr14_a_rejected_draft_of_a_stop_token_stops_nothing(open_engine, setup, schedule, device):
    engine = open_setup(open_engine, setup, schedule, device)
    recorder = Recorder(engine)
    prompt = setup_prompts(setup, engine.model, 1)[0]
    (free_run,) = engine.generate(prompt, SamplingParams(max_new_tokens=40))
    drafted = {token for r in recorder.records for token in r.tokens[1:]}
    rejected = tuple(drafted - set(free_run.output_ids))
    assert rejected, "every drafted token was said somewhere: take another prompt"
    (done,) = engine.generate(prompt, SamplingParams(max_new_tokens=40, stop_token_ids=rejected))
    assert (done.output_ids, done.spec) == (free_run.output_ids, free_run.spec)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("setup", SETUPS)
def test_sc09_the_context_ends_at_each_place_of_a_run(open_engine, setup, page_size, schedule, device):
    context = 64
    engine, recorder = open_perfect(
        open_engine, setup, schedule, device, page_size=page_size, context_length=context
    )
    longest = setup_prompts(setup, engine.model, 20)[-1]
    assert len(longest) >= context or setup != "ngram"
    room = range(1, 2 * WIDTH + 3)
    text = (longest * context)[:context]
    prompts = [text[: context - left] for left in room]
    for budget in (1000, None):  # more than fits, and exactly what fits
        params = [SamplingParams(max_new_tokens=budget or left) for left in room]
        for prompt, left, done in zip(prompts, room, engine.generate(prompts, params), strict=True):
            assert done.output_ids == tuple(tiny.oracle_of(engine.model).tokens(prompt, left))
            assert done.finish_reason == "length"
            assert done.prompt_tokens + done.completion_tokens == context
    assert max(r.seq_len for r in recorder.records if not r.dropped) < context
    with pytest.raises(ValueError, match=r"prompts\[0\]"):
        engine.generate([text], SamplingParams(max_new_tokens=1))


@pytest.mark.parametrize("schedule_of_lengths", [(1,), (1, 2, 3), (2, 1)], ids=str)
def test_dr12_dr08_ngram_without_a_match_drafts_nothing(open_engine, schedule_of_lengths, schedule, device):
    """Filler nodes are never reached, even where the target says the filler's token."""
    engine, recorder = open_perfect(open_engine, "ngram", schedule, device)
    prompts = [tuple(range(10, 10 + length)) for length in schedule_of_lengths]
    engine.generate(prompts, SamplingParams(max_new_tokens=30))
    unmatched = 0
    for r in recorder.records:
        used = [node for node in range(1, len(r.tokens)) if r.parents[node] >= 0]
        assert all(r.tokens[node] in r.text for node in used)
        if r.text[-1] not in r.text[:-1] and not r.dropped:
            assert not used
            assert r.accept_len == 1
            unmatched += 1
    assert unmatched >= 5
