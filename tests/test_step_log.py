"""Recorded steps are what the engine did, under both schedules, and recording is off unless somebody asks."""

import pytest
import torch

from tests.harness import Recorder
from tests.recorded_runs import lengths, open_recorded, prompts_for
from tests.scheduling_helpers import greedy, scene_engine, scene_prompts


@pytest.fixture(params=["NGRAM", "STANDALONE", "EAGLE"])
def engine(request, device, schedule):
    with scene_engine(request.param, device, schedule=schedule) as made:
        made.scene = scene_prompts(request.param, made.model, 3)
        yield made


def test_each_committed_step_is_recorded_as_it_was(engine):
    recorder = Recorder(engine)
    with engine.record_steps() as log:
        done = engine.generate(engine.scene * 2, [greedy(n) for n in range(8, 14)])
    first = min(s.request_id for s in log)
    for i, completion in enumerate(done):
        steps, wanted = log.of_request(first + i), recorder.of_request(first + i)
        assert tuple(s.accept_len for s in steps) == completion.spec.accept_lens
        assert [s.num_kept for s in steps] == list(completion.step_lens[1:])
        kept = [t for s in steps for t in s.emitted[: s.num_kept]]
        assert tuple(kept) == completion.output_ids[1:]
        for mine, theirs in zip(steps, wanted, strict=True):
            assert (mine.step, mine.seq_len) == (theirs.step, theirs.seq_len)
            assert list(mine.tokens) == theirs.tokens
            assert list(mine.parents) == theirs.parents
            assert list(mine.scores) == theirs.scores
            assert list(mine.accept_index) == theirs.accepted_nodes
            assert list(mine.emitted) == theirs.emitted
    assert {s.num_kept < s.accept_len for s in log} == {True, False}, "no step was cut, or all were"


def test_slots_are_those_of_the_requests_row(engine):
    seen = []

    def look(batch, result):
        if batch.forward_mode.is_extend():
            return
        for req in batch.reqs:
            if not req.finished:
                seen.append((result.step, req.request_id, engine.cache_pages(req)))

    pages = engine.scheduler.cache.pages
    engine.cache_pages = lambda req: pages.slots(req.pages)
    recorder = Recorder(engine)
    recorder.before = look
    with engine.record_steps() as log:
        engine.generate(engine.scene, greedy(6))
    owned = {(step, request): slots for step, request, slots in seen}
    assert log
    for s in log:
        mine = owned[s.step, s.request_id]
        assert len(s.slots) == s.seq_len + len(s.tokens)
        assert list(s.slots) == list(mine)[: len(s.slots)]


def test_nothing_is_launched_for_it_unless_somebody_asks(engine):
    engine.generate(engine.scene, greedy(6))
    assert "note" not in {s.name for s in engine.trace.spans()}
    with engine.record_steps() as log:
        engine.generate(engine.scene, greedy(6))
    recorded = len(log)
    assert recorded
    assert "note" in {s.name for s in engine.trace.spans()}
    engine.trace.clear()
    engine.generate(engine.scene, greedy(6))
    assert len(log) == recorded
    assert "note" not in {s.name for s in engine.trace.spans()}


def test_an_error_ends_the_recording_too(engine):
    with pytest.raises(KeyError), engine.record_steps():
        raise KeyError
    assert engine.scheduler.processor.step_log is None


def test_only_the_newest_steps_are_kept(engine):
    with engine.record_steps(max_steps=2) as log:
        engine.generate(engine.scene, greedy(12))
    assert len(log) == 2
    assert log[-1].step >= log[0].step > 2
    assert [s.step for s in log[:2]] == [s.step for s in log]


def test_recording_changes_no_token(engine):
    plain = [done.output_ids for done in engine.generate(engine.scene, greedy(9))]
    with engine.record_steps():
        assert [done.output_ids for done in engine.generate(engine.scene, greedy(9))] == plain


def test_probabilities_are_those_after_the_parent(engine):
    with engine.record_steps() as log:
        engine.generate(engine.scene, greedy(9))
    for s in log:
        for node in s.nodes[1:]:
            assert s.prob(node) * s.scores[s.parents[node]] == pytest.approx(s.scores[node], rel=1e-6)
        fates = [s.fate(node) for node in s.nodes]
        assert fates.count("accepted") == s.num_correct_drafts
        assert fates[0] == "root"
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("name", ["eagle-tree", "standalone"])
def test_a_replayed_step_is_recorded_before_the_next_one_writes_over_it(name, device, schedule, monkeypatch):
    with open_recorded(name, schedule, device, monkeypatch) as engine:
        commit = engine.scheduler.processor.process

        def late(batch, result):
            engine._forward_stream.synchronize()  # under overlap the next step has run by now
            return commit(batch, result)

        monkeypatch.setattr(engine.scheduler.processor, "process", late)
        with engine.record_steps() as log:
            done = engine.generate(prompts_for(name, 3), lengths(3, 24), progress=False)
        if device.type == "cpu":
            assert engine._forward_stream.graphs.num_replays > 5
    first = min(s.request_id for s in log)
    for i, completion in enumerate(done):
        steps = log.of_request(first + i)
        assert tuple(t for s in steps for t in s.emitted[: s.num_kept]) == completion.output_ids[1:]
        newest, length = completion.output_ids[0], steps[0].seq_len
        for s in steps:
            assert s.tokens[0] == newest, "the root is the token before"
            assert [s.tokens[node] for node in s.accept_index[1:]] == list(s.emitted[:-1])
            assert s.seq_len == length
            newest, length = s.emitted[-1], length + s.accept_len
