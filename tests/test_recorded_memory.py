"""With replayed steps, too: NaN in memory that nobody has written reaches no output, and whatever ends a request
gives back all that it owned."""

import math

import pytest
import torch

from tests.recorded_runs import SETUPS, Watched, lengths, open_recorded, prompts_for
from tests.scheduling_helpers import free

COUNTS = (3, 5, 1)  # padded to 4 and 6, and not at all


class Injected(Exception):
    """Raised by a test inside the engine."""


def run(engine, name, count, tokens=16):
    return [d.output_ids for d in engine.generate(prompts_for(name, count), lengths(count, tokens))]


def poison(engine):
    """All KV but page 0, which is padding and stays finite."""
    cache = engine.scheduler.cache
    engine._forward_stream.synchronize()
    for pool in (cache.target_pool, cache.draft_pool):
        pool.fill_unused(math.nan, cache.pages.page_size)
    if engine.device.type == "cuda":
        torch.cuda.synchronize()  # filled on another stream than the one that reads it


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", SETUPS)
def test_kv11_poison_reaches_no_output(name, page_size, schedule, device, monkeypatch):
    def told(poisoned):
        with open_recorded(name, schedule, device, monkeypatch, page_size=page_size) as engine:
            watched, outputs = Watched(engine), []
            for count in COUNTS * 2:  # the second time from recordings, in rows that have had owners
                if poisoned:
                    poison(engine)
                outputs.append(run(engine, name, count))
            assert engine._forward_stream.graphs.num_captures > 0
            page_zero = [
                buffer[:page_size]
                for pool in (engine.scheduler.cache.target_pool, engine.scheduler.cache.draft_pool)
                for buffer in (*pool.keys, *pool.values)
            ]
            assert all(bool(torch.isfinite(buffer).all()) for buffer in page_zero)
            return outputs, watched.steps

    clean, poisoned = told(False), told(True)
    assert clean[0] == poisoned[0]
    for step, pair in enumerate(zip(clean[1], poisoned[1], strict=True)):
        for place, (mine, theirs) in enumerate(zip(*pair, strict=True)):
            assert torch.equal(mine, theirs), f"step {step}, tensor {place}"  # and NaN equals nothing


@pytest.mark.parametrize("how", ["finish", "stop", "exception", "interrupt", "abort"])
@pytest.mark.parametrize("name", ["plain", "ngram", "standalone", "eagle-tree", "eagle3-chain"])
def test_all_is_free_afterwards(name, how, schedule, device, monkeypatch):
    with open_recorded(name, schedule, device, monkeypatch, max_running_requests=6) as engine:
        before = free(engine)
        first = run(engine, name, 5)  # records
        assert free(engine) == before
        END[how](engine, name, monkeypatch)
        assert free(engine) == before
        assert not engine.scheduler.has_requests
        assert run(engine, name, 5) == first
        assert free(engine) == before


def finish(engine, name, monkeypatch):
    assert len(run(engine, name, 9, 11)) == 9  # more than there are rows


def stop(engine, name, monkeypatch):
    said = run(engine, name, 3, 16)
    params = lengths(3, 16)
    stopped = [
        type(p)(max_new_tokens=p.max_new_tokens, stop_token_ids=(ids[6],))
        for p, ids in zip(params, said, strict=True)
    ]
    done = engine.generate(prompts_for(name, 3), stopped)
    assert [d.output_ids for d in done] == [ids[: ids.index(ids[6]) + 1] for ids in said]


def exception(engine, name, monkeypatch):
    steps = []

    def hook(label, step):
        if "verify" in label:
            steps.append(step)
            if len(steps) == 4:
                raise Injected(label)

    undisturbed = run(engine, name, 5)
    engine._forward_stream.on_run = hook
    again = run(engine, name, 5)  # the step starts over; a forced text hangs on where its steps begin
    assert again == undisturbed or SETUPS[name].forced
    assert len(steps) > 4
    engine._forward_stream.on_run = None


def interrupt(engine, name, monkeypatch):
    process, calls = engine.scheduler.process_batch_result, []

    def interrupted(batch, result):
        calls.append(result)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return process(batch, result)

    with monkeypatch.context() as patched:
        patched.setattr(engine.scheduler, "process_batch_result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(engine, name, 5)


def abort(engine, name, monkeypatch):
    chunks = engine.stream(prompts_for(name, 4), lengths(4, 16))
    for _ in range(6):
        next(chunks)
    chunks.close()


END = {f.__name__: f for f in (finish, stop, exception, interrupt, abort)}
