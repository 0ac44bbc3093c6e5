"""Switching the setting at any step, with a step in flight too: tokens, drafts, KV and memory are as ever."""

import pytest
import torch

from spec_v2 import SamplingParams
from spec_v2.scheduler.future_map import MOST_UNREAD
from tests import tiny_models as tiny
from tests.adaptive_policies import RandomPolicy, ScriptedPolicy
from tests.cells import models
from tests.draft_oracles import FrozenKvOracle, grow, model_kv
from tests.eagle3_models import deep_llama, eagle3_head
from tests.harness import CHAIN, LONG_CHAIN, NARROW_TREE, TREE_4, Coverage, Recorder, check_identity, sampled
from tests.scheduling_helpers import World, expected, free
from tests.simulated_graphs import attach
from tests.surface import assert_at_rest, count_retractions
from tests.test_kv_state import ORACLES, PoolReader, assert_same
from tests.test_no_host_reads import forbid  # noqa: F401 - a fixture

DRAFT_ORACLES = ORACLES | {"FROZEN_KV_MTP": FrozenKvOracle}
CASES = [
    ("STANDALONE", "noisy", LONG_CHAIN),
    ("STANDALONE", "noisy", TREE_4),
    ("EAGLE", "noisy", LONG_CHAIN),
    ("EAGLE", "random", TREE_4),  # its drafts hang on hidden states
    ("MULTI_LAYER_EAGLE", "noisy", LONG_CHAIN),
    ("MULTI_LAYER_EAGLE", "random", LONG_CHAIN),  # so do these, and on what is carried from step to step
    ("FROZEN_KV_MTP", "noisy", (5, 4, 8)),
    ("NGRAM", "self", (3, 4, 6)),
]
WITH_KV = [case for case in CASES if case[0] in ORACLES]
WITH_MODEL = [case for case in CASES if case[0] in DRAFT_ORACLES]
SOME = [CASES[1], CASES[3], CASES[5]]


def each(cases):
    return pytest.mark.parametrize("case", cases, ids=[f"{case[0]}-{case[1]}-{case[2]}" for case in cases])


def open_switching(open_engine, case, policy, schedule, device, **changes):
    algorithm, drafter, shape = case
    target, draft = models(algorithm, drafter, device)
    return open_engine(
        target, algorithm, draft, shape, schedule=schedule, adaptive_policy=policy, speculative_adaptive=True, **changes
    )  # fmt: skip


def prompts_of(case, model, count):
    if case[0] == "NGRAM":
        return [tiny.copying_prompt(model, seed, 10 + 4 * seed) for seed in range(count)]
    make = tiny.marked_prompt if case[0] == "FROZEN_KV_MTP" else tiny.random_prompt
    return [make(seed, (9, 1, 16, 4, 12, 2, 7)[seed % 7]) for seed in range(count)]


def settings_of(records, engine):
    chosen = engine.trace.settings()
    return {chosen[r.step] for r in records}


# -- tokens and memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "page_size"), [("greedy", 1), ("sampled", 16)])
@each(CASES)
def test_any_switching_gives_the_plain_tokens(open_engine, case, kind, page_size, schedule, device):
    """Requests join and leave; every candidate occurs; all is free afterwards."""
    policy = RandomPolicy(7)
    engine = open_switching(
        open_engine, case, policy, schedule, device, page_size=page_size, max_running_requests=3
    )
    before = free(engine)
    count = 7
    lengths = [24 + 5 * i % 17 for i in range(count)]
    params = [
        SamplingParams(max_new_tokens=n) if kind == "greedy" else sampled(i, max_new_tokens=n)
        for i, n in enumerate(lengths)
    ]
    found = set()
    for _ in range(2):
        records = check_identity(engine, prompts_of(case, engine.model, count), params)
        found |= settings_of(records, engine)
        assert free(engine) == before
        assert_at_rest(engine)
    (candidates,) = engine.scheduler.planner.shapes.candidates.values()
    assert found == {shape.setting for shape in candidates}
    assert sum(len(step.num_correct_drafts) for step in policy.observed) > 50


def test_the_runs_exercise_what_can_go_wrong(open_engine, schedule, device):
    coverage = Coverage()
    for seed, case in enumerate(case for case in CASES if case[1] == "noisy"):
        engine = open_switching(open_engine, case, RandomPolicy(seed), schedule, device)
        prompts = prompts_of(case, engine.model, 5)
        coverage.add(check_identity(engine, prompts, [SamplingParams(max_new_tokens=40)] * 5))
    coverage.check()


@pytest.mark.parametrize("policy", ["late", "ahead", 0, 1])
@each(SOME)
def test_no_interleaving_of_the_streams_matters(open_engine, case, policy, schedule, device, monkeypatch):
    if device.type != "cpu":
        pytest.skip("a CUDA launch runs on the host's thread")
    monkeypatch.setattr("spec_v2.engine.make_stream", World(policy).make_stream)
    engine = open_switching(open_engine, case, RandomPolicy(3), schedule, device, max_running_requests=2)
    before = free(engine)
    check_identity(
        engine,
        prompts_of(case, engine.model, 4),
        [SamplingParams(max_new_tokens=6 + 5 * i) for i in range(4)],
    )
    assert free(engine) == before


@each(SOME)
def test_switching_under_memory_pressure(open_engine, case, schedule, device):
    """Retracted requests come back with nothing unread, in rows that others have left something in."""
    engine = open_switching(open_engine, case, RandomPolicy(5), schedule, device, max_total_tokens=92)
    retracted = count_retractions(engine)
    prompts, params = prompts_of(case, engine.model, 5), [SamplingParams(max_new_tokens=20)] * 5
    completions = engine.generate(prompts, params)
    assert [done.output_ids for done in completions] == expected(engine, prompts, params)
    assert retracted
    assert_at_rest(engine)


def test_the_host_knows_how_long_a_sequence_may_be(open_engine, device, monkeypatch):
    """Steps in flight add as much as their own shapes can, not the newest one's."""
    monkeypatch.setattr("spec_v2.scheduler.batch_planner.KEY_BLOCK", 1)  # no slack by rounding
    case = ("STANDALONE", "self", LONG_CHAIN)
    engine = open_switching(open_engine, case, ScriptedPolicy([-1, -1, 0, 1, 0, -1]), "overlap", device)
    recorder, slack = Recorder(engine), []

    def compare(batch, result):
        if batch.shape is not None:
            verdict = result.verdict.get()
            slack.append(batch.max_seq_len - int((verdict.new_seq_lens - verdict.accept_lens).max()))

    recorder.before = compare
    engine.generate(prompts_of(case, engine.model, 2), SamplingParams(max_new_tokens=60))
    assert min(slack) == 0, "the bound holds, and is reached: all drafts are accepted"


@each(SOME)
def test_catching_up_writes_only_what_the_requests_own(open_engine, case, device):
    """Its window is wider than what is reserved, and rows still name the slots of their last owners."""
    engine = open_switching(
        open_engine,
        case,
        RandomPolicy(5, longest_run=4),
        "sync",
        device,
        max_running_requests=2,
        max_total_tokens=150,
    )
    pool, planner = engine.scheduler.cache.draft_pool, engine.scheduler.planner
    seen = []

    def look(label, step):
        if seen and seen[-1] is not None:
            owned = {
                0,
                *(s for req in planner.live.values() for s in engine.scheduler.cache.pages.slots(req.pages)),
            }
            changed = (pool.keys[0] != seen[-1]).flatten(1).any(1).nonzero().flatten().tolist()
            assert set(changed) <= owned
            seen[-1] = None
        if label == "catch_up":
            seen.append(pool.keys[0].clone())

    engine._forward_stream.on_run = look
    engine.generate(
        prompts_of(case, engine.model, 7), [SamplingParams(max_new_tokens=60 - 7 * i) for i in range(7)]
    )
    assert len(seen) > 10


@pytest.mark.parametrize("label", ["draft", "catch_up", "verify", "draft_extend", "unread"])
def test_an_exception_leaves_the_engine_as_new(open_engine, label, schedule, device):
    case = CASES[3]
    engine = open_switching(open_engine, case, RandomPolicy(5), schedule, device)
    before, seen = free(engine), []

    def hook(name, step):
        seen.append(name)
        if name == label and seen.count(label) == 2 - (label == "unread"):
            raise RuntimeError("injected")

    engine._forward_stream.on_run = hook
    prompts, params = prompts_of(case, engine.model, 3), [SamplingParams(max_new_tokens=24)] * 3
    with pytest.raises(RuntimeError, match="injected"):
        engine.generate(prompts, params)
    engine._forward_stream.on_run = None
    assert free(engine) == before
    check_identity(engine, prompts, params)


# -- drafts ----------------------------------------------------------------------------------------------------


@each(WITH_MODEL)
def test_each_tree_is_what_its_setting_gives_without_switching(open_engine, case, schedule, device):
    """Shape by shape the tree by the book, also right after many steps without drafts."""
    algorithm, drafter, _ = case
    target, draft = models(algorithm, drafter, device)
    oracle = DRAFT_ORACLES[algorithm](target, draft)
    engine = open_switching(open_engine, case, RandomPolicy(11), schedule, device)
    recorder = Recorder(engine)
    engine.generate(prompts_of(case, target, 3), SamplingParams(max_new_tokens=40))
    chosen, seen = engine.trace.settings(), set()
    for request in range(3):
        last = None
        for record in recorder.of_request(request)[:16]:
            setting = chosen[record.step]
            nodes = {
                tuple(record.tokens[n] for n in record.path(node)[1:]): record.scores[node]
                for node in range(1, len(record.tokens))
            }
            wanted = {}
            if setting[2] > 1:
                wanted = grow(lambda path, text=record.text: oracle.next_logits(text, path), setting)
            assert nodes == pytest.approx(wanted, rel=1e-4, abs=1e-30), (request, record.step, setting, last)
            seen.add((last == (0, 1, 1), setting != (0, 1, 1)))
            last = setting
    assert len(seen) == 4, "some pair of plain and drafting steps did not occur"


@pytest.mark.parametrize("algorithm", DRAFT_ORACLES)
def test_a_drafter_that_knows_the_target_is_always_accepted_whole(open_engine, algorithm, schedule, device):
    engine = open_switching(open_engine, (algorithm, "self", LONG_CHAIN), RandomPolicy(2), schedule, device)
    make = tiny.marked_prompt if algorithm == "FROZEN_KV_MTP" else tiny.random_prompt
    prompts = [make(40 + i, length) for i, length in enumerate((9, 12, 20, 10, 15))]
    records = check_identity(engine, prompts, [SamplingParams(max_new_tokens=50)] * 5)
    chosen = engine.trace.settings()
    assert all(r.accept_len == chosen[r.step][0] + 1 for r in records)
    assert {r.accept_len for r in records} >= {1, 2, 6}


def test_eagle3_keeps_the_hidden_states_of_its_layers(open_engine, schedule, device):
    target = deep_llama(device)
    head = eagle3_head(target, token_map=range(3, 40))
    trees = []
    for policy in (ScriptedPolicy([-1]), ScriptedPolicy([0, 0, 0, -1])):
        engine = open_engine(
            target, "EAGLE3", head, CHAIN, schedule=schedule, adaptive_policy=policy, max_running_requests=1
        )
        records = check_identity(engine, [tiny.random_prompt(3, 9)], [SamplingParams(max_new_tokens=60)])
        trees.append({r.seq_len: r.tokens for r in records if len(r.tokens) > 1})
    same = trees[0].keys() & trees[1].keys()
    assert len(same) >= 5
    assert all(trees[0][place] == trees[1][place] for place in same)


@each(SOME)
def test_the_draft_model_reads_before_there_is_no_more_room(open_engine, case, schedule, device):
    """A policy may draft nothing for longer than what is kept; what comes then is right all the same."""
    plain = MOST_UNREAD + 20
    engine = open_switching(
        open_engine, case, ScriptedPolicy([0] * plain + [-1] * 5), schedule, device, max_running_requests=1
    )
    recorder, ran = Recorder(engine), []
    engine._forward_stream.on_run = lambda label, step: ran.append((label, step))
    prompt = tiny.random_prompt(3, 9)
    (done,) = engine.generate([prompt], SamplingParams(max_new_tokens=plain + 25))
    assert done.output_ids == tuple(tiny.oracle_of(engine.model).tokens(prompt, plain + 25))
    # step 0 is the prefill
    caught_up = [step for label, step in ran if label == "catch_up"]
    assert caught_up[:2] == [MOST_UNREAD + 1, plain + 1]
    oracle = DRAFT_ORACLES[case[0]](*models(*case[:2], device))
    drafting = [r for r in recorder.records if len(r.tokens) > 1 and not r.dropped]
    assert drafting
    for record in drafting[:3]:
        wanted = grow(lambda path, text=record.text: oracle.next_logits(text, path), case[2])
        paths = {tuple(record.tokens[n] for n in record.path(i)[1:]) for i in range(1, len(record.tokens))}
        assert paths == set(wanted)


def test_a_new_owner_of_a_row_has_nothing_unread(open_engine, schedule, device):
    """One row: the first request ends with much unread, the next one drafts at once."""
    case = ("STANDALONE", "self", LONG_CHAIN)
    engine = open_switching(
        open_engine, case, ScriptedPolicy([0] * 9 + [-1] * 3), schedule, device, max_running_requests=1
    )
    prompts = [tiny.random_prompt(50 + i, 8 + i) for i in range(4)]
    records = check_identity(engine, prompts, [SamplingParams(max_new_tokens=n) for n in (8, 30, 9, 25)])
    chosen = engine.trace.settings()
    assert all(r.accept_len == chosen[r.step][0] + 1 for r in records)


# -- KV --------------------------------------------------------------------------------------------------------


class UnreadPoolReader(PoolReader):
    """Looks at the draft's KV only as far as the draft model has read."""

    def __call__(self, batch, result):
        taken = len(self.shots)
        super().__call__(batch, result)
        live = [req for req in batch.reqs if not req.finished]
        for i, req in enumerate(live, taken):
            request, text, target, draft = self.shots[i]
            # all launched steps count in it: one of them may be the next one
            kept = [max(len(k) - req.num_unread, 0) for k, _ in draft]
            self.shots[i] = (
                request,
                text,
                target,
                [(k[:n], v[:n]) for (k, v), n in zip(draft, kept, strict=True)],
            )


@each(WITH_KV)
def test_committed_kv_equals_recomputation(open_engine, case, schedule, device):
    algorithm, drafter, _ = case
    target, draft = models(algorithm, drafter, device)
    engine = open_switching(open_engine, case, RandomPolicy(13), schedule, device, page_size=4)
    recorder = Recorder(engine)
    recorder.before = reader = UnreadPoolReader(engine, algorithm)
    engine.generate(prompts_of(case, target, 5), SamplingParams(max_new_tokens=40))
    oracle, plain = DRAFT_ORACLES[algorithm](target, draft), tiny.oracle_of(target).model
    lengths = set()
    for request in {shot[0] for shot in reader.shots}:
        mine = [shot for shot in reader.shots if shot[0] == request]
        longest = max((shot[1] for shot in mine), key=len)
        target_kv, draft_kv = model_kv(plain, longest), oracle.kv(longest)
        for _, text, found_target, found_draft in mine:
            assert text == longest[: len(text)]
            assert_same(found_target, target_kv)
            assert_same(found_draft, draft_kv)
            lengths.add(len(text) - len(found_draft[0][0]))
    assert len(lengths) > 5, "the draft was never far behind"


@pytest.mark.parametrize("algorithm", ORACLES)
def test_a_cached_prefix_ends_where_the_draft_model_has_read(open_engine, algorithm, schedule, device):
    """A request leaves with much unread; the next one begins with its text, and drafts as if it had been alone."""
    case = (algorithm, "self", LONG_CHAIN)
    policy = ScriptedPolicy([0] * 15)
    engine = open_switching(
        open_engine,
        case,
        policy,
        schedule,
        device,
        page_size=4,
        disable_radix_cache=False,
        max_running_requests=1,
    )
    cache = engine.scheduler.cache
    cache.draft_pool.fill_unused(float("nan"), 4)  # what was not read shows in the drafts
    prompt = tiny.random_prompt(3, 10)
    (first,) = engine.generate([prompt], SamplingParams(max_new_tokens=16))
    engine.scheduler.planner.shapes.policy = ScriptedPolicy([-1])
    longer = (*prompt, *first.output_ids[:14])
    recorder = Recorder(engine)
    (second,) = engine.generate([longer], SamplingParams(max_new_tokens=20))
    assert 4 <= second.cached_tokens <= len(prompt)
    assert all(r.accept_len == 6 for r in recorder.records)


# -- graphs, host reads, options -------------------------------------------------------------------------------


@each(CASES)
def test_recorded_steps_switch_too(open_engine, case, schedule, device, monkeypatch):
    changes = {"debug": False, "max_running_requests": 6, "cuda_graph_max_bs": 4}
    engine = open_switching(open_engine, case, RandomPolicy(1), schedule, device, **changes)
    graphs = attach(engine, (1, 2, 4), monkeypatch) if device.type == "cpu" else engine._forward_stream.graphs
    cache = engine.scheduler.cache
    for pool in (cache.target_pool, cache.draft_pool):
        pool.fill_unused(float("nan"), engine.server_args.page_size)
    for count in (5, 4, 3, 4, 1):
        prompts = prompts_of(case, engine.model, count)
        params = [SamplingParams(max_new_tokens=12 + 5 * i) for i in range(count)]
        completions = engine.generate(prompts, params)
        assert [done.output_ids for done in completions] == expected(engine, prompts, params)
    assert graphs.num_captures > 6
    for pool in (cache.target_pool, cache.draft_pool):
        assert not pool.keys or not bool(torch.isnan(pool.keys[0][0]).any()), "padding must stay finite"


@each(SOME)
def test_nothing_is_read_on_the_host(open_engine, case, schedule, device, forbid):  # noqa: F811
    engine = open_switching(open_engine, case, RandomPolicy(4), schedule, device, debug=False)
    prompts, params = prompts_of(case, engine.model, 3), [SamplingParams(max_new_tokens=30)] * 3
    wanted = expected(engine, prompts, params)
    if device.type == "cuda":
        engine.generate([(1, 2)], SamplingParams(max_new_tokens=12))
    forbid(engine)
    assert [done.output_ids for done in engine.generate(prompts, params)] == wanted


def test_nan_of_one_request_does_not_reach_others(open_engine, schedule, device):
    """A hidden state that is not finite, left behind in a row, must not get into the padding slot."""
    case = ("EAGLE", "noisy", LONG_CHAIN)
    engine = open_switching(open_engine, case, ScriptedPolicy([0, 0, 0, -1, -1]), schedule, device)
    engine.scheduler.future_map.unread.hidden_states.fill_(float("nan"))
    check_identity(engine, prompts_of(case, engine.model, 3), [SamplingParams(max_new_tokens=20)] * 3)
    draft_pool = engine.scheduler.cache.draft_pool
    assert not any(bool(torch.isnan(buffer[0]).any()) for buffer in (*draft_pool.keys, *draft_pool.values))


@pytest.mark.parametrize("shape", [LONG_CHAIN, TREE_4, NARROW_TREE], ids=str)
def test_what_was_chosen_can_be_seen(open_engine, shape, schedule, device, tmp_path):
    import json

    case = ("STANDALONE", "noisy", shape)
    engine = open_switching(open_engine, case, ScriptedPolicy([0, 1, -1]), schedule, device)
    (done,) = engine.generate([tiny.random_prompt(1, 5)], SamplingParams(max_new_tokens=30))
    (candidates,) = engine.scheduler.planner.shapes.candidates.values()
    wanted = [candidates[i].setting for i in (0, 1, -1)]
    assert list(done.spec.settings) == (wanted * 30)[: done.spec.verify_ct]
    assert list(engine.trace.settings().values())[: done.spec.verify_ct] == list(done.spec.settings)
    events = json.loads(engine.trace.to_perfetto(tmp_path / "t.json").read_text())["traceEvents"]
    counters = [event["args"] for event in events if event["ph"] == "C"]
    assert counters[0] == {"num_steps": 0, "topk": 1, "num_draft_tokens": 1}
    assert len(counters) == len(engine.trace.settings())
