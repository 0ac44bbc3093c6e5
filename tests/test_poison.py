"""NaN in memory that nobody has written never reaches an output (item 6)."""

import math

import pytest
import torch

from spec_v2 import SamplingParams
from tests.cells import SETUPS, open_setup, setup_prompts
from tests.harness import Recorder, check_identity, sampled

COUNT = 4


def poison(engine):
    """All KV but page 0, which is padding and stays finite."""
    cache = engine.scheduler.cache
    engine._forward_stream.synchronize()
    for pool in (cache.target_pool, cache.draft_pool):
        pool.fill_unused(math.nan, cache.pages.page_size)


def page_zero_is_finite(engine):
    cache = engine.scheduler.cache
    buffers = [
        buffer[: cache.pages.page_size]
        for pool in (cache.target_pool, cache.draft_pool)
        for buffer in (*pool.keys, *pool.values)
    ]
    return all(bool(torch.isfinite(buffer).all()) for buffer in buffers)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("setup", SETUPS)
def test_kv11_unwritten_kv_is_never_read(open_engine, setup, page_size, schedule, device):
    engine = open_setup(
        open_engine, setup, schedule, device, page_size=page_size, max_running_requests=COUNT - 1
    )
    prompts = setup_prompts(setup, engine.model, COUNT)
    for _ in range(2):  # a second time with rows that have had owners
        poison(engine)
        params = [sampled(i, max_new_tokens=18 + 3 * i) for i in range(COUNT)]
        check_identity(engine, prompts, params)
        assert page_zero_is_finite(engine)


@pytest.mark.parametrize("setup", SETUPS)
def test_poison_does_not_change_what_is_drafted(open_engine, setup, schedule, device):
    """NaN that reached a drafter would make it slow, not wrong."""
    histories = []
    for poisoned in (False, True):
        engine = open_setup(open_engine, setup, schedule, device)
        if poisoned:
            poison(engine)
        recorder = Recorder(engine)
        engine.generate(setup_prompts(setup, engine.model, COUNT), SamplingParams(max_new_tokens=24))
        assert all(math.isfinite(score) for r in recorder.records for score in r.scores)
        histories.append([(r.request, r.tokens, r.parents, r.accept_len) for r in recorder.records])
    assert histories[0] == histories[1]


@pytest.mark.parametrize("setup", SETUPS)
def test_future_map_rows_start_poisoned(open_engine, setup, schedule, device):
    engine = open_setup(open_engine, setup, schedule, device)
    future_map = engine.scheduler.future_map
    for integers in (
        future_map.new_seq_lens,
        future_map.bonus_tokens,
        future_map.topk_index,
        future_map.history,
    ):
        assert bool((integers < 0).all())
    for floats in (future_map.topk_p, future_map.hidden_states):
        assert bool(floats.isnan().all())
    check_identity(
        engine, setup_prompts(setup, engine.model, COUNT), [SamplingParams(max_new_tokens=12)] * COUNT
    )
    rows = future_map.bonus_tokens[0], future_map.new_seq_lens[0]
    assert all(int(value) < 0 for value in rows), "row 0 is padding: nobody writes it"
