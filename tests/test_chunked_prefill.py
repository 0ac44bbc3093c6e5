"""A prompt computed in chunks leaves what it leaves in one piece: KV, drafts, tokens; and budgets are kept."""

from itertools import pairwise

import pytest
import torch

from spec_v2 import SamplingParams
from tests.cells import SETUPS, open_setup, setup_prompts
from tests.harness import Recorder, sampled
from tests.surface import assert_at_rest
from tests.tiny_models import VOCAB, oracle_of, random_prompt

N = 12


class PromptKv:
    """Copies the draft and target KV of a request's prompt, just before its first decode step is committed.

    MTP module `i` has made its newest `i` entries of drafts: they are left out, as the next step writes them again.
    """

    def __init__(self, engine):
        self._engine = engine
        self.found = {}

    def __call__(self, batch, result):
        if batch.forward_mode.is_extend():
            return
        self._engine._forward_stream.synchronize()
        cache = self._engine.scheduler.cache
        for req in batch.reqs:
            slots = cache.row_table.slots[req.row, : len(req.prompt_ids)].long()
            pools = (cache.target_pool, cache.draft_pool)
            multi_layer = self._engine.server_args.enable_multi_layer_eagle
            kv = [
                buffer[
                    slots[: max(len(slots) - layer * (multi_layer and pool is cache.draft_pool), 0)]
                ].clone()
                for pool in pools
                for buffers in (pool.keys, pool.values)
                for layer, buffer in enumerate(buffers)
            ]
            if not req.finished:
                self.found.setdefault(req.request_id, kv)


def run(open_engine, setup, schedule, device, prompts, **changes):
    """(outputs and metrics, first trees, prompt KV)"""
    engine = open_setup(open_engine, setup, schedule, device, **changes)
    recorder = Recorder(engine)
    recorder.before = reader = PromptKv(engine)
    done = engine.generate(prompts, SamplingParams(max_new_tokens=N))
    assert_at_rest(engine)
    first = [recorder.of_request(i)[0] for i in range(len(prompts))]
    trees = [(r.tokens, r.parents) for r in first]
    assert [d.output_ids for d in done] == [tuple(oracle_of(engine.model).tokens(p, N)) for p in prompts]
    return [(d.output_ids, d.spec) for d in done], trees, reader.found


def assert_same_run(found, wanted):
    assert found[0] == wanted[0], "tokens or accept lengths"
    assert found[1] == wanted[1], "first drafts"
    for request, kv in wanted[2].items():
        for mine, theirs in zip(found[2][request], kv, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("setup", SETUPS)
def test_dr01_every_chunk_size_gives_the_same_run(open_engine, setup, page_size, schedule, device):
    target_prompt = setup_prompts(setup, open_setup(open_engine, setup, schedule, device).model, 1)[0]
    prompts = [target_prompt, random_prompt(7, 3)]
    wanted = run(open_engine, setup, schedule, device, prompts, page_size=page_size)
    length = len(target_prompt)
    for chunk in (1, 3, length - 1, length, length + 1):
        changes = {"page_size": page_size, "chunked_prefill_size": chunk}
        assert_same_run(run(open_engine, setup, schedule, device, prompts, **changes), wanted)


@pytest.mark.parametrize("length", [7, 8, 9, 11, 12, 13])
@pytest.mark.parametrize("setup", ["standalone-chain", "eagle-tree", "multi-layer"])
def test_dr01_lengths_around_a_multiple_of_the_chunk(open_engine, setup, length, schedule, device):
    prompts = [random_prompt(length, length)]
    wanted = run(open_engine, setup, schedule, device, prompts)
    assert_same_run(run(open_engine, setup, schedule, device, prompts, chunked_prefill_size=4), wanted)


# -- budgets and inputs --------------------------------------------------------------------------------------


def watch(engine):
    """Check the ids of every forward, and note the prompt tokens of each prefill, by request."""
    spans_seen, planner = [], engine.scheduler.planner
    extend = planner._extend_batch

    def noted(reqs, spans):
        spans_seen.append([end - start for start, end in spans])
        return extend(reqs, spans)

    planner._extend_batch = noted
    for runner in engine._runners:
        forward = runner.forward

        def checked(input_ids, positions, *args, forward=forward, **kwargs):
            assert 0 <= int(input_ids.min()) <= int(input_ids.max()) < VOCAB, "a placeholder was an input"
            assert int(positions.min()) >= 0
            return forward(input_ids, positions, *args, **kwargs)

        runner.forward = checked
    return spans_seen


@pytest.mark.parametrize("chunk", [1, 5, 8])
@pytest.mark.parametrize("setup", SETUPS)
def test_sc02_sc10_a_prefill_keeps_the_budget(open_engine, setup, chunk, schedule, device):
    engine = open_setup(open_engine, setup, schedule, device, chunked_prefill_size=chunk)
    spans = watch(engine)
    prompts = [*setup_prompts(setup, engine.model, 3), (1, 2), (3,)]
    params = [sampled(i, max_new_tokens=8) for i in range(5)]
    done = engine.generate(prompts, params)
    plain = [oracle_of(engine.model).expected(*pair) for pair in zip(prompts, params, strict=True)]
    assert [d.output_ids for d in done] == plain
    assert all(0 < sum(lens) <= chunk for lens in spans)
    assert sum(map(sum, spans)) == sum(map(len, prompts)), "a token was computed twice, or never"
    assert chunk == 1 or any(len(lens) > 1 for lens in spans), "no chunk held two requests"


@pytest.mark.parametrize("setup", ["plain", "standalone-tree", "eagle-chain"])
def test_sc10_whole_prompts_keep_the_budget_unless_one_alone_exceeds_it(open_engine, setup, schedule, device):
    engine = open_setup(open_engine, setup, schedule, device, max_prefill_tokens=12)
    spans = watch(engine)
    prompts = [random_prompt(i, n) for i, n in enumerate((5, 6, 5, 30, 2))]
    done = engine.generate(prompts, SamplingParams(max_new_tokens=4))
    assert [d.output_ids for d in done] == [tuple(oracle_of(engine.model).tokens(p, 4)) for p in prompts]
    assert spans == [[5, 6], [5], [30], [2]]


def test_sc10_a_chunk_never_exceeds_the_prefill_budget(open_engine, schedule, device):
    engine = open_setup(open_engine, "plain", schedule, device, max_prefill_tokens=4, chunked_prefill_size=9)
    spans = watch(engine)
    engine.generate([random_prompt(1, 10)], SamplingParams(max_new_tokens=2))
    assert spans == [[4], [4], [2]]


def test_a_long_prompt_and_the_running_requests_take_turns(open_engine, schedule, device):
    """Requests that decode go on decoding while a long prompt comes in piece by piece."""
    engine = open_setup(open_engine, "plain", schedule, device, chunked_prefill_size=4)
    kinds, run_batch = [], engine.scheduler.run_batch

    def noted(batch, **options):
        kinds.append("prefill" if batch.forward_mode.is_extend() else "decode")
        return run_batch(batch, **options)

    engine.scheduler.run_batch = noted
    engine.generate([(1, 2, 3), random_prompt(1, 24)], SamplingParams(max_new_tokens=12))
    first, last = kinds.index("decode"), len(kinds) - kinds[::-1].index("prefill")
    turns = kinds[first:last]
    assert all(a != b for a, b in pairwise(turns)), turns
    assert turns.count("prefill") >= 5
