"""The states of recurrent layers: what a row holds after every step, and who owns a row when.

What is written is looked at right behind the launch that wrote it, so that the next step may be in flight as always.
"""

import inspect
import math
import random
from itertools import pairwise

import pytest
import torch

from spec_v2 import SamplingParams
from spec_v2.speculative import draft_extend, verify
from tests import hybrid_models as hybrids
from tests import tiny_models as tiny
from tests.adaptive_policies import RandomPolicy
from tests.harness import CHAIN, LONG_CHAIN, TREE_4, Recorder, check_identity, make_engine, sampled
from tests.simulated_graphs import attach
from tests.surface import assert_at_rest, count_retractions
from tests.test_balance import Injected, raise_at

FAMILIES = list(hybrids.FAMILIES)
KINDS = ["qwen3_5_text", "bamba", "lfm2"]
SETUPS = {
    "plain": (None, "nothing", CHAIN),
    "ngram-tree": ("NGRAM", "nothing", (3, 4, 9)),
    "standalone-chain": ("STANDALONE", "noisy", CHAIN),
    "standalone-tree": ("STANDALONE", "noisy", TREE_4),
    "eagle-tree": ("EAGLE", "head", TREE_4),
}
LENGTHS = (9, 1, 16, 4)
N = 24


def open_setup(open_engine, family, setup, schedule, device, *, prompts=(), **changes):
    algorithm, draft, shape = SETUPS[setup]
    target = hybrids.hybrid(family, device)
    drafter = hybrids.drafter(draft, family, device) if draft != "nothing" else None
    engine = open_engine(target, algorithm, drafter, shape, schedule=schedule, **changes)
    if algorithm == "NGRAM" and prompts:
        engine.scheduler.worker.corpus = hybrids.half_true_corpus(target, prompts, N)
    return engine


def pools(engine):
    cache = engine.scheduler.cache
    return cache.target_states, cache.draft_states


def poison(engine):
    """All KV but page 0, and all states but row 0, which are padding and stay as they are."""
    cache = engine.scheduler.cache
    engine._forward_stream.synchronize()
    for pool in (cache.target_pool, cache.draft_pool):
        pool.fill_unused(math.nan, cache.pages.page_size)
    for pool in pools(engine):
        pool.fill_unused(math.nan)


def row_of(pool, row):
    """All that a row holds."""
    return [buffer[row].clone() for buffer in pool.buffers()]


def assert_same_states(found, wanted, tolerance=1e-10):
    for mine, theirs in zip(found, wanted, strict=True):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance * scale)


class Recomputed:
    """The state after a text, from one prefill of the whole text in an engine of its own."""

    def __init__(self, model, device):
        self._engine = make_engine(model, schedule="sync")
        self._known = {}

    def __call__(self, text):
        if text not in self._known:
            self._engine.generate(text, SamplingParams(max_new_tokens=1))
            self._known[text] = row_of(pools(self._engine)[0], 1)
        return self._known[text]

    def close(self):
        self._engine.close()


# -- what a row holds ----------------------------------------------------------------------------------------


def watch_commits(monkeypatch, module):
    """A list of (row, tokens committed, what the row holds then) that grows with each decode step."""
    seen, commit = [], module.commit_states

    def watched(view, accept_index, accept_lens):
        commit(view, accept_index, accept_lens)
        for row, count in zip(view.rows.tolist(), accept_lens.tolist(), strict=True):
            seen.append((row, count, row_of(view.pool, row)))

    monkeypatch.setattr(module, "commit_states", watched)
    return seen


@pytest.mark.parametrize("setup", ["ngram-tree", "standalone-chain", "standalone-tree", "eagle-tree"])
@pytest.mark.parametrize("family", KINDS)
def test_st01_st04_committed_states_equal_recomputation_for_every_count(
    open_engine, monkeypatch, family, setup, schedule, device
):
    target = hybrids.hybrid(family, device)
    prompts = hybrids.prompts(target, LENGTHS, N + 8)
    commits = watch_commits(monkeypatch, verify)
    engine = open_setup(open_engine, family, setup, schedule, device, prompts=prompts)
    engine.generate(prompts, SamplingParams(max_new_tokens=N))
    engine._forward_stream.synchronize()
    recomputed = Recomputed(target, device)
    lens = [len(prompt) for prompt in prompts]
    counts = set()
    for row, count, held in commits:
        request = row - 1  # rows are handed out in order, and all requests fit
        lens[request] += count
        if lens[request] > len(prompts[request]) + N:
            continue  # a step in flight when the request had finished
        text = (*prompts[request], *tiny.oracle_of(target).tokens(prompts[request], N))[: lens[request]]
        assert_same_states(held, recomputed(text))
        counts.add(count)
    recomputed.close()

    assert counts >= {1, 2, 3, 4} if setup != "ngram-tree" else len(counts) >= 4, f"only {counts} occurred"


@pytest.mark.parametrize("family", KINDS)
def test_st02_st06_steps_with_and_without_drafts_take_turns(open_engine, family, schedule, device):
    """Trees of nine nodes and of one, in any order: after many accepted drafts comes a step that has none."""
    prompts = hybrids.prompts(hybrids.hybrid(family, device), LENGTHS, N)
    engine = open_setup(
        open_engine, family, "ngram-tree", schedule, device, prompts=prompts,
        speculative_adaptive=True, adaptive_policy=RandomPolicy(6, longest_run=2),
    )  # fmt: skip
    poison(engine)
    recorder = Recorder(engine)
    check = [SamplingParams(max_new_tokens=N)] * len(prompts)
    check_identity(engine, prompts, check)
    steps = [r for i in range(len(prompts)) for r in recorder.of_request(i)]
    pairs = [(a, b) for a, b in pairwise(steps) if a.request == b.request]
    assert any(a.accept_len > 2 and len(b.tokens) == 1 for a, b in pairs)
    assert any(len(a.tokens) == 1 and b.accept_len > 2 for a, b in pairs)


@pytest.mark.parametrize("family", KINDS)
def test_st06_every_depth_in_turn_with_an_attention_only_drafter(open_engine, family, schedule, device):
    """A draft model whose depth changes from step to step, over a target whose states must follow."""
    target = hybrids.hybrid(family, device)
    prompts = hybrids.prompts(target, LENGTHS, N)
    draft = tiny.random_llama(99, hidden_size=16).to(device)
    policy = RandomPolicy(6, longest_run=2)
    engine = open_engine(
        target, "STANDALONE", draft, LONG_CHAIN, schedule=schedule, speculative_adaptive=True, adaptive_policy=policy
    )  # fmt: skip
    poison(engine)
    check_identity(engine, prompts, [SamplingParams(max_new_tokens=N)] * len(prompts))
    assert len({step.shape.setting for step in policy.observed}) > 2


@pytest.mark.parametrize("setup", ["standalone-chain", "standalone-tree"])
@pytest.mark.parametrize("family", KINDS)
def test_a_drafters_states_are_one_token_ahead(open_engine, monkeypatch, family, setup, schedule, device):
    draft = hybrids.drafter("noisy", family, device)
    target = hybrids.hybrid(family, device)
    prompts = hybrids.prompts(target, LENGTHS, N + 8)
    commits = watch_commits(monkeypatch, draft_extend)
    engine = open_setup(open_engine, family, setup, schedule, device, chunked_prefill_size=5)
    engine.generate(prompts, SamplingParams(max_new_tokens=N))
    engine._forward_stream.synchronize()
    recomputed = Recomputed(draft, device)
    rows = {}
    for prompt, row in zip(prompts, dict.fromkeys(row for row, *_ in commits), strict=True):
        rows[row] = (*prompt, *tiny.oracle_of(target).tokens(prompt, N)), len(prompt) + 1
    checked = 0
    for row, count, held in commits:
        text, length = rows[row]
        rows[row] = text, length + count
        if length + count <= len(text):
            assert_same_states(held, recomputed(text[: length + count]))
            checked += 1
    recomputed.close()
    assert checked > 10


@pytest.mark.parametrize("family", FAMILIES)
def test_a_state_is_what_transformers_cache_holds(family, device):
    """In its layout: channels first, and Mamba-2's matrix transposed."""
    from transformers import DynamicCache

    model, text = hybrids.hybrid(family, device), tiny.random_prompt(5, 21)
    recomputed = Recomputed(model, device)
    window, *state = recomputed(text)
    recomputed.close()
    cache = DynamicCache(config=model.config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        model(input_ids=torch.tensor([text], device=device), use_cache=True, **{name: cache})
    layer = next(layer for layer in cache.layers if hasattr(layer, "conv_states"))

    def first(states):
        return states[0] if isinstance(states, dict) else states

    assert_same_states([window.T], [first(layer.conv_states)[0, :, -window.shape[0] :]], tolerance=1e-5)
    if state:
        theirs = first(layer.recurrent_states)[0].to(torch.float64)
        mine = state[0] if "qwen" in family else state[0].transpose(1, 2)
        assert_same_states([mine], [theirs], tolerance=1e-5)


@pytest.mark.parametrize("family", KINDS)
def test_every_chunk_size_leaves_the_same_state(open_engine, family, schedule, device):
    target, prompt = hybrids.hybrid(family, device), tiny.random_prompt(1, 14)
    recomputed = Recomputed(target, device)
    for chunk in (1, 2, 3, 5, 13, 14, 20):
        engine = open_setup(open_engine, family, "plain", schedule, device, chunked_prefill_size=chunk)
        poison(engine)
        engine.generate(prompt, SamplingParams(max_new_tokens=1))
        engine._forward_stream.synchronize()
        assert_same_states(row_of(pools(engine)[0], 1), recomputed(prompt))
    recomputed.close()


# -- poison, balance, independence ---------------------------------------------------------------------------


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("family", KINDS)
def test_unwritten_states_are_never_read(open_engine, family, setup, schedule, device):
    prompts = hybrids.prompts(hybrids.hybrid(family, device), LENGTHS, N)
    engine = open_setup(
        open_engine, family, setup, schedule, device, prompts=prompts, max_running_requests=3, page_size=16
    )
    for _ in range(2):  # a second time with rows that have had owners
        poison(engine)
        check_identity(engine, prompts, [sampled(i, max_new_tokens=N - 3 * i) for i in range(len(prompts))])
        assert_at_rest(engine)


@pytest.mark.parametrize("label", ["prefill", "draft", "verify", "draft_extend", "stash"])
def test_an_exception_in_a_launch_frees_all_states(open_engine, label, schedule, device):
    engine = open_setup(
        open_engine, "qwen3_5_text", "standalone-tree", schedule, device,
        disable_radix_cache=False, max_running_requests=2, chunked_prefill_size=6, page_size=2,
    )  # fmt: skip
    prompts = hybrids.prompts(engine.model, LENGTHS, N)
    for occurrence in (1, 2):
        engine._forward_stream.on_run = raise_at(label, occurrence)
        with pytest.raises(Injected, match=label):
            engine.generate(prompts, SamplingParams(max_new_tokens=N))
        engine._forward_stream.on_run = None
        assert_at_rest(engine)
        poison(engine)  # nothing of what was abandoned may be used
        check_identity(engine, prompts, [SamplingParams(max_new_tokens=N)] * len(prompts))
        assert_at_rest(engine)


@pytest.mark.parametrize("setup", ["standalone-tree", "ngram-tree"])
def test_aborted_requests_give_rows_and_snapshots_back(open_engine, setup, schedule, device):
    prompts = hybrids.prompts(hybrids.hybrid("lfm2", device), (9, 5, 16, 4, 11), N)
    engine = open_setup(
        open_engine, "lfm2", setup, schedule, device, prompts=prompts,
        disable_radix_cache=False, max_running_requests=3, chunked_prefill_size=4, page_size=2,
    )  # fmt: skip
    rng, aborted = random.Random(15), 0
    plain = [tuple(tiny.oracle_of(engine.model).tokens(prompt, N)) for prompt in prompts]
    for _ in range(8):
        for chunk in engine.stream(prompts, SamplingParams(max_new_tokens=N)):
            if chunk.finished:
                done = chunk.completion
                aborted += done.finish_reason == "abort"
                assert done.output_ids == plain[chunk.index][: len(done.output_ids)]
            elif rng.random() < 0.1:
                engine.abort(chunk.request_id)
        assert_at_rest(engine)
    assert aborted > 5


@pytest.mark.parametrize("setup", ["ngram-tree", "standalone-tree"])
@pytest.mark.parametrize("family", KINDS)
def test_a_batch_gives_each_request_what_it_gets_alone(open_engine, family, setup, schedule, device):
    prompts = hybrids.prompts(hybrids.hybrid(family, device), LENGTHS, N)
    runs = []
    for rows in (1, 2, 5):
        engine = open_setup(
            open_engine, family, setup, schedule, device, prompts=prompts, max_running_requests=rows
        )
        recorder = Recorder(engine)
        done = engine.generate(prompts, [sampled(i, max_new_tokens=N - 4 * i) for i in range(len(prompts))])
        drafts = [
            [(r.tokens, r.parents, r.accepted_nodes) for r in recorder.of_request(i)]
            for i in range(len(prompts))
        ]
        runs.append(([d.output_ids for d in done], [d.spec for d in done], drafts))
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("setup", ["ngram-tree", "standalone-chain", "eagle-tree"])
@pytest.mark.parametrize("family", ["bamba", "lfm2"])
def test_recorded_steps_give_the_same_and_row_0_stays_empty(
    open_engine, monkeypatch, family, setup, schedule, device
):
    """Padded batches: row 0 fills them up, goes through every kernel, and is never written."""
    prompts = hybrids.prompts(hybrids.hybrid(family, device), LENGTHS, N)
    engine = open_setup(
        open_engine, family, setup, schedule, device, prompts=prompts, debug=False, max_running_requests=6
    )
    graphs = attach(engine, (1, 2, 6), monkeypatch) if device.type == "cpu" else engine._forward_stream.graphs
    poison(engine)
    for _ in range(2):
        done = engine.generate(
            prompts, [SamplingParams(max_new_tokens=N - 3 * i) for i in range(len(prompts))]
        )
        for i, (prompt, d) in enumerate(zip(prompts, done, strict=True)):
            assert d.output_ids == tuple(tiny.oracle_of(engine.model).tokens(prompt, N - 3 * i))
        assert_at_rest(engine)
    assert graphs.num_captures >= 2


# -- retraction ----------------------------------------------------------------------------------------------

SMALL = {"plain": 50, "ngram-tree": 76, "standalone-chain": 64, "standalone-tree": 100, "eagle-tree": 100}


@pytest.mark.parametrize("radix", [True, False])
@pytest.mark.parametrize("setup", SETUPS)
def test_retracted_requests_say_the_same(open_engine, setup, radix, schedule, device):
    family = "qwen3_5_text" if radix else "lfm2"
    prompts = hybrids.prompts(hybrids.hybrid(family, device), (9, 5, 16, 4), N)
    engine = open_setup(
        open_engine, family, setup, schedule, device, prompts=prompts,
        max_total_tokens=SMALL[setup], disable_radix_cache=not radix, chunked_prefill_size=7,
    )  # fmt: skip
    poison(engine)
    retracted = count_retractions(engine)
    done = engine.generate(prompts, SamplingParams(max_new_tokens=N))
    assert [d.output_ids for d in done] == [tuple(tiny.oracle_of(engine.model).tokens(p, N)) for p in prompts]
    assert retracted, "the pool was large enough: this test shows nothing"
    assert_at_rest(engine)


# -- prefixes ------------------------------------------------------------------------------------------------


def open_cached(open_engine, family, setup, schedule, device, **changes):
    engine = open_setup(open_engine, family, setup, schedule, device, disable_radix_cache=False, **changes)
    poison(engine)
    return engine


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("setup", ["standalone-tree", "eagle-tree"])
@pytest.mark.parametrize("family", KINDS)
def test_a_second_time_almost_nothing_is_computed(open_engine, family, setup, page_size, schedule, device):
    prompt = hybrids.prompts(hybrids.hybrid(family, device), [15], N)[0]
    engine = open_cached(open_engine, family, setup, schedule, device, page_size=page_size)
    specs = []
    for i in range(3):
        (done,) = engine.generate(prompt, SamplingParams(max_new_tokens=N))
        assert done.output_ids == tuple(tiny.oracle_of(engine.model).tokens(prompt, N))
        assert done.cached_tokens == (i > 0) * ((len(prompt) - 1) // page_size * page_size)
        specs.append(done.spec)
        assert_at_rest(engine)
    assert specs[0] == specs[1] == specs[2], "the drafter's restored state is not what it would have been"


@pytest.mark.parametrize("setup", ["plain", "standalone-tree", "eagle-tree"])
def test_where_texts_part_the_third_goes_on_from_there(open_engine, setup, schedule, device):
    """The first leaves a snapshot at its end only, the second one where it leaves the first, and the third uses it."""
    target = hybrids.hybrid("bamba", device)
    base = tiny.random_prompt(3, 20)
    engine = open_cached(open_engine, "bamba", setup, schedule, device, page_size=4)
    cached = []
    for seed, cut in ((1, 20), (2, 14), (3, 13), (4, 10), (5, 11)):
        prompt = (*base[:cut], *tiny.random_prompt(seed, 5))
        (done,) = engine.generate(prompt, SamplingParams(max_new_tokens=4))
        assert done.output_ids == tuple(tiny.oracle_of(target).tokens(prompt, 4))
        cached.append(done.cached_tokens)
        assert_at_rest(engine)
    assert cached == [0, 0, 12, 0, 8]


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize("setup", ["standalone-tree", "eagle-tree"])
def test_shared_prefixes_change_nothing(open_engine, setup, page_size, chunk, schedule, device):
    target = hybrids.hybrid("qwen3_5_text", device)
    base = tiny.random_prompt(8, 17)
    prompts = [base, *(base[:cut] + tiny.random_prompt(cut, 3) for cut in range(8, 18)), base]
    runs = []
    for off in (True, False):
        changes = {} if off else {"page_size": page_size, "chunked_prefill_size": chunk}
        opened = open_setup if off else open_cached
        engine = opened(open_engine, "qwen3_5_text", setup, schedule, device, **changes)
        done = engine.generate(prompts, SamplingParams(max_new_tokens=6))
        assert [d.output_ids for d in done] == [tuple(tiny.oracle_of(target).tokens(p, 6)) for p in prompts]
        runs.append([(d.output_ids, d.spec) for d in done])
    assert_at_rest(engine)
    assert sum(d.cached_tokens for d in done) > 0, "nothing was shared"
    assert runs[0] == runs[1]


def test_few_snapshots_are_handed_on(open_engine, schedule, device):
    """With room for three, old ones make way; a request finds one or computes, and is right in both cases."""
    target = hybrids.hybrid("lfm2", device)
    engine = open_cached(open_engine, "lfm2", "plain", schedule, device, page_size=2, max_running_requests=2)
    cache = engine.scheduler.cache
    cache.snapshots._free = cache.snapshots._free[:3]
    cache.snapshots.num_rows = cache.snapshots.first + 3
    cache.snapshots.reset()
    rng, hits = random.Random(1), 0
    prompts = [tiny.random_prompt(seed, 9) for seed in range(5)]
    for _ in range(12):
        chosen = [rng.choice(prompts) for _ in range(3)]
        for prompt, done in zip(
            chosen, engine.generate(chosen, SamplingParams(max_new_tokens=5)), strict=True
        ):
            assert done.output_ids == tuple(tiny.oracle_of(target).tokens(prompt, 5))
            hits += done.cached_tokens > 0
        assert_at_rest(engine)
    assert 0 < hits < 36
    assert cache.snapshots.num_free == 0
