"""An error strikes somewhere in a step: innocent requests say what they would have said, the guilty one says why it ended."""

import math

import pytest

from spec_v2 import SamplingParams
from tests import tiny_models as tiny
from tests.cells import LIVELY, SETUPS, setup_prompts
from tests.faults import (
    LAUNCHES,
    Fault,
    Injected,
    brought_by,
    in_company,
    once,
    open_surviving,
    out_of_memory,
    poisonous,
)
from tests.harness import Recorder
from tests.scheduling_helpers import expected
from tests.simulated_graphs import SimulatedGraphs, attach
from tests.surface import assert_at_rest, count_retractions
from tests.tiny_tokenizers import LETTERS, letter_tokenizer

N = 12
COUNT = 4  # one more than run at a time


def scene(engine, name, count=COUNT):
    prompts = setup_prompts(name, engine.model, count)
    params = [SamplingParams(max_new_tokens=N - 2 * i) for i in range(count)]
    return prompts, params, expected(engine, prompts, params)


def check_all(engine, prompts, params, wanted):
    done = engine.generate(prompts, params)
    assert [(d.output_ids, d.finish_reason, d.error) for d in done] == [(w, "length", None) for w in wanted]
    assert_at_rest(engine)


# -- errors in launches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", LAUNCHES)
def test_an_error_that_comes_once_changes_no_token(open_engine, label, schedule, device):
    engine = open_surviving(open_engine, "eagle-tree", schedule, device)
    prompts, params, wanted = scene(engine, "eagle-tree")
    for occurrence in (1, 2):
        fault = Fault(engine, label, once(occurrence), out_of_memory)
        check_all(engine, prompts, params, wanted)
        fault.stop()
        assert fault.struck == 1
    assert engine.scheduler.num_failures == 2
    check_all(engine, prompts, params, wanted)


@pytest.mark.parametrize("label", ["prefill", "verify", "draft_extend", "copy"])
def test_a_request_that_always_fails_ends_alone(open_engine, label, schedule, device):
    engine = open_surviving(open_engine, "eagle-tree", schedule, device)
    prompts, params, wanted = scene(engine, "eagle-tree")
    fault = Fault(engine, label, brought_by(1))
    done = engine.generate(prompts, params)
    fault.stop()
    assert [d.finish_reason for d in done] == ["length", "error", "length", "length"]
    assert "Injected: by a test" in done[1].error
    for i, (d, tokens) in enumerate(zip(done, wanted, strict=True)):
        assert d.output_ids == (tokens[: len(d.output_ids)] if i == 1 else tokens)
    assert len(done[1].output_ids) > 0 or label != "verify"
    assert engine.scheduler.num_failures == 3  # with others, again, and alone
    assert_at_rest(engine)
    check_all(engine, prompts, params, wanted)


def test_where_every_step_fails_every_request_ends_with_the_reason(open_engine, schedule, device):
    engine = open_surviving(open_engine, "standalone-tree", schedule, device)
    prompts, params, wanted = scene(engine, "standalone-tree")
    fault = Fault(engine, "verify", lambda requests, seen: True)
    done = engine.generate(prompts, params)
    fault.stop()
    assert [d.finish_reason for d in done] == ["error"] * COUNT
    # what the prefills between the failures have said is kept
    assert all(d.output_ids == tokens[: len(d.output_ids)] for d, tokens in zip(done, wanted, strict=True))
    assert engine.scheduler.num_failures <= 2 * COUNT + 2
    check_all(engine, prompts, params, wanted)


def test_what_fails_in_company_only_runs_alone(open_engine, schedule, device):
    """Memory that suffices for one: nobody is to blame, and everybody gets to the end."""
    engine = open_surviving(open_engine, "eagle-chain", schedule, device)
    prompts, params, wanted = scene(engine, "eagle-chain")
    fault = Fault(engine, "verify", in_company, out_of_memory)
    check_all(engine, prompts, params, wanted)
    assert fault.struck >= 2


def test_errors_far_apart_are_forgiven(open_engine, schedule, device):
    """A request that runs by itself meets an error now and then; between them it says enough."""
    engine = open_surviving(open_engine, "plain", schedule, device)
    params = SamplingParams(max_new_tokens=140)
    wanted = expected(engine, [(1, 2, 3)], [params])
    fault = Fault(engine, "verify", lambda requests, seen: seen in (2, 69))
    check_all(engine, [(1, 2, 3)], params, wanted)
    assert fault.struck == 2


@pytest.mark.parametrize("name", SETUPS)
def test_every_worker_starts_over(open_engine, name, schedule, device):
    """In the middle, with one request guilty, chunks, prefix hits and full pages."""
    changes = {"chunked_prefill_size": 5, "disable_radix_cache": False, "page_size": 4}
    engine = open_surviving(open_engine, name, schedule, device, **LIVELY.get(name, {}) | changes)
    prompts, params, wanted = scene(engine, name)
    for label, when in (("verify", once(2)), ("draft", brought_by(COUNT + 2)), ("stash", once(4))):
        first = engine._factory.num_requests
        fault = Fault(engine, label, when)
        done = engine.generate(prompts, params)
        fault.stop()
        assert fault.struck
        for i, (d, tokens) in enumerate(zip(done, wanted, strict=True)):
            guilty = label == "draft" and first + i == COUNT + 2
            assert d.finish_reason == ("error" if guilty else "length")
            assert d.output_ids == (tokens[: len(d.output_ids)] if guilty else tokens)
        assert_at_rest(engine)


# -- errors on the host ----------------------------------------------------------------------------------------


def raising(owner, name, occurrence, error=Injected):
    """Replace a method by one that raises the `occurrence`-th time it is called."""
    method, seen = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        seen.append(name)
        if len(seen) == occurrence:
            raise error(name)
        return method(*args, **kwargs)

    setattr(owner, name, wrapped)
    return seen


PLACES = {
    "next_batch": lambda engine: (engine.scheduler.planner, "next_batch"),
    "allocate": lambda engine: (engine.scheduler.cache.pages, "alloc"),
    "row": lambda engine: (engine.scheduler.cache.rows, "alloc"),
    "draft": lambda engine: (engine.scheduler.worker, "draft"),
    "verify": lambda engine: (engine.scheduler.worker, "verify"),
    "publish": lambda engine: (engine.scheduler, "_publish"),
    "draft_extend": lambda engine: (engine.scheduler.worker, "draft_extend"),
    "copy": lambda engine: (engine.scheduler, "_copy_result_to_host"),
    "commit": lambda engine: (engine.scheduler.processor, "process"),
    "metrics": lambda engine: (engine.scheduler.processor, "_note_decode"),
    "finish": lambda engine: (engine.scheduler.planner, "finish"),
    "free": lambda engine: (engine.scheduler.cache.pages, "free"),
    "prefix": lambda engine: (engine.scheduler.cache.prefix, "insert"),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_error_on_the_host_changes_no_token(open_engine, place, schedule, device):
    occurrence = {"sync": 1, "overlap": 3}[schedule]
    engine = open_surviving(
        open_engine, "standalone-tree", schedule, device, disable_radix_cache=False, page_size=4
    )
    prompts, params, wanted = scene(engine, "standalone-tree")
    seen = raising(*PLACES[place](engine), occurrence)
    check_all(engine, prompts, params, wanted)
    assert len(seen) > occurrence
    assert engine.scheduler.num_failures == 1


@pytest.mark.parametrize("place", ["next_batch", "allocate", "draft", "commit"])
def test_an_error_on_the_host_that_stays_ends_every_request(open_engine, place, schedule, device):
    engine = open_surviving(open_engine, "standalone-tree", schedule, device)
    prompts, params, wanted = scene(engine, "standalone-tree")
    owner, name = PLACES[place](engine)
    method = getattr(owner, name)

    def always(*args, **kwargs):
        raise Injected(place)

    setattr(owner, name, always)
    done = engine.generate(prompts, params)
    assert [d.finish_reason for d in done] == ["error"] * COUNT
    assert all(f"Injected: {place}" in d.error for d in done)
    setattr(owner, name, method)
    check_all(engine, prompts, params, wanted)


def test_a_policy_that_fails_ends_nobody_else(open_engine, schedule, device):
    """The adaptive policy is the user's code; it is asked between steps."""
    from tests.adaptive_policies import RandomPolicy

    policy = RandomPolicy(3)
    engine = open_surviving(
        open_engine, "eagle-chain", schedule, device, adaptive_policy=policy, speculative_adaptive=True
    )
    prompts, params, wanted = scene(engine, "eagle-chain")
    for name in ("choose", "observe"):
        seen = raising(policy, name, 2)
        check_all(engine, prompts, params, wanted)
        assert len(seen) > 2


# -- a stream's thread dies ------------------------------------------------------------------------------------


def kill(stream):
    """Its thread ends between two launches, though nobody closes it: what is queued behind never runs."""
    stream._queue.put(None)


@pytest.mark.parametrize("which", ["_forward_stream", "_copy_stream"])
def test_the_death_of_a_streams_thread_is_noticed_and_mended(
    open_engine, which, schedule, device, monkeypatch
):
    if device.type != "cpu":
        pytest.skip("a card's streams have no thread")
    monkeypatch.setattr("spec_v2.scheduler.streams.SECONDS_BETWEEN_LOOKS", 0.02)
    engine = open_surviving(open_engine, "eagle-tree", schedule, device)
    prompts, params, wanted = scene(engine, "eagle-tree")
    stream, process = getattr(engine, which), engine.scheduler.process_batch_result
    old, killed = stream._thread, []

    def killing(batch, result):
        if result.step == 3 and not killed:
            killed.append(result.step)
            kill(stream)
        return process(batch, result)

    engine.scheduler.process_batch_result = killing
    check_all(engine, prompts, params, wanted)
    assert killed
    old.join(10)
    assert not old.is_alive()
    assert stream._thread.is_alive()
    check_all(engine, prompts, params, wanted)


# -- recorded steps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["capture", "replay", "_feed"])
def test_an_error_in_a_recorded_step_changes_no_token(open_engine, monkeypatch, where, schedule, device):
    if device.type != "cpu":
        pytest.skip("puts errors into the simulation")
    engine = open_surviving(open_engine, "eagle-tree", schedule, device, debug=False)
    graphs = attach(engine, (1, 2, 4), monkeypatch)
    prompts, params, wanted = scene(engine, "eagle-tree")
    seen, capture = [], graphs.capture

    def failing_replay(fn, args):
        replay, outputs = capture(fn, args)

        def struck():
            replay()  # the simulation's first replay of each recording has happened when it was captured
            seen.append("replay")
            if len(seen) == 4:
                raise out_of_memory()

        return struck, outputs

    if where == "replay":
        graphs.capture = failing_replay
    else:
        seen = raising(graphs, where, 2, Injected)
    for _ in range(3):
        check_all(engine, prompts, params, wanted)
    assert len(seen) > 4 or where == "capture"
    assert engine.scheduler.num_failures == 1
    assert graphs.num_replays > 10
    assert isinstance(graphs, SimulatedGraphs)


# -- logits that are no numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "temperature"), [(math.nan, 0.0), (math.nan, 1.0), (math.inf, 1.0)])
def test_vf11_dr19_a_text_without_numbers_ends_and_spoils_no_other(
    open_engine, temperature, value, schedule, device
):
    """One request's prompt holds a token whose embedding is not finite; no other text ever has it."""
    engine = open_surviving(open_engine, "standalone-tree", schedule, device, disable_radix_cache=False)
    prompts, params = setup_prompts("standalone-tree", engine.model, 3), []
    params = [SamplingParams(max_new_tokens=N, temperature=temperature, seed=i) for i in range(3)]
    wanted = expected(engine, prompts, params)
    said = {token for text in (*prompts, *wanted) for token in text}
    token = next(t for t in range(tiny.VOCAB) if t not in said)
    with poisonous(engine.model, token, value):
        for _ in range(2):  # nothing of it is left in the prefix cache
            bad = [*prompts[:1], (*prompts[1][:4], token, *prompts[1][5:]), *prompts[2:]]
            done = engine.generate(bad, params)
            assert [d.finish_reason for d in done] == ["length", "error", "length"]
            assert "NaN or infinite after 0 tokens" in done[1].error
            assert [done[0].output_ids, done[2].output_ids] == [wanted[0], wanted[2]]
            assert_at_rest(engine)
        check_all(engine, prompts, params, wanted)
    assert engine.scheduler.num_failures == 0, "no step failed, a request did"


@pytest.mark.parametrize("name", ["standalone-tree", "standalone-chain", "eagle-tree"])
def test_dr19_a_draft_without_numbers_costs_no_request(open_engine, name, schedule, device):
    """A draft's keys and values may be NaN, and with a weight of 0 they spoil a whole step: the text goes on."""
    engine = open_surviving(open_engine, name, schedule, device, **LIVELY.get(name, {}))
    prompts = setup_prompts(name, engine.model, 3)
    params = [SamplingParams(max_new_tokens=24)] * 3
    wanted = expected(engine, prompts, params)
    said = {token for text in (*prompts, *wanted) for token in text}
    recorder = Recorder(engine)
    assert [d.output_ids for d in engine.generate(prompts, params)] == wanted
    drafted = [t for r in recorder.records for t in r.tokens if t not in said]
    assert drafted, "every draft is said by some request: this test shows nothing"
    token = max(drafted, key=drafted.count)
    with poisonous(engine.model, token):
        check_all(engine, prompts, params, wanted)


# -- tokenizers ------------------------------------------------------------------------------------------------


class Brittle:
    """A tokenizer that cannot decode one letter."""

    def __init__(self, letter):
        self._inner, self._token = letter_tokenizer(), LETTERS.index(letter)
        self.eos_token_id = None

    def __call__(self, *args, **kwargs):
        return self._inner(*args, **kwargs)

    def decode(self, ids, **kwargs):
        ids = [ids] if isinstance(ids, int) else list(ids)
        if self._token in ids:
            raise LookupError(f"no text for {self._token}")
        return self._inner.decode(ids, **kwargs)


def brittle_scene(open_engine, schedule, device):
    """(engine, prompts, wanted): the middle request says a letter that the others do not."""
    target = tiny.llama(device)
    prompts = setup_prompts("standalone-tree", target, 3)
    texts = [tiny.oracle_of(target).tokens(p, N) for p in prompts]
    place, token = next((i, t) for i, t in enumerate(texts[1]) if i > 2 and t not in texts[0] + texts[2])
    tokenizer = Brittle(LETTERS[token])
    engine = open_surviving(open_engine, "standalone-tree", schedule, device, tokenizer=tokenizer)
    first = texts[1].index(token)
    return engine, prompts, [tuple(t) for t in texts], min(place, first)


def test_a_text_that_cannot_be_searched_for_stop_strings_ends(open_engine, schedule, device):
    engine, prompts, wanted, place = brittle_scene(open_engine, schedule, device)
    params = SamplingParams(max_new_tokens=N, stop=("????",))
    done = engine.generate(prompts, params)
    assert [d.finish_reason for d in done] == ["length", "error", "length"]
    assert done[1].output_ids == wanted[1][: place + 1]
    assert "stop=('????',)" in done[1].error
    assert "LookupError" in done[1].error
    assert [done[0].output_ids, done[2].output_ids] == [wanted[0], wanted[2]]
    assert all(d.text for d in (done[0], done[2]))
    assert_at_rest(engine)


def test_a_text_that_cannot_be_decoded_keeps_its_tokens(open_engine, schedule, device):
    engine, prompts, wanted, _ = brittle_scene(open_engine, schedule, device)
    done = engine.generate(prompts, SamplingParams(max_new_tokens=N))
    assert [d.finish_reason for d in done] == ["length", "error", "length"]
    assert [d.output_ids for d in done] == wanted
    assert [bool(d.text) for d in done] == [True, False, True]
    assert "LookupError" in done[1].error
    assert "error=" in repr(done[1])
    assert "LookupError" in done[1]._repr_html_()


def test_a_stream_that_cannot_be_decoded_ends_that_request(open_engine, schedule, device):
    engine, prompts, wanted, place = brittle_scene(open_engine, schedule, device)
    texts, found = [""] * 3, [None] * 3
    for chunk in engine.stream(prompts, SamplingParams(max_new_tokens=N)):
        texts[chunk.index] += chunk.text
        found[chunk.index] = chunk.completion or found[chunk.index]
    assert [d.finish_reason for d in found] == ["length", "error", "length"]
    assert [d.text for d in found] == texts
    assert place < len(found[1].output_ids) < N or found[1].output_ids == wanted[1]
    assert [found[0].output_ids, found[2].output_ids] == [wanted[0], wanted[2]]
    assert_at_rest(engine, drained=False)


def test_a_prompt_that_cannot_be_encoded_leaves_what_runs_alone(open_engine, schedule, device):
    engine, prompts, wanted, _ = brittle_scene(open_engine, schedule, device)
    stream = engine.stream(prompts[:1], SamplingParams(max_new_tokens=N))
    next(stream)
    engine.tokenizer._inner = None
    with pytest.raises(TypeError):
        engine.generate("abc")
    engine.tokenizer._inner = letter_tokenizer()
    *_, last = stream
    assert last.completion.output_ids == wanted[0]
    assert_at_rest(engine)


def test_a_retracted_request_survives_errors_too(open_engine, schedule, device):
    engine = open_surviving(open_engine, "standalone-tree", schedule, device, max_total_tokens=104)
    retracted = count_retractions(engine)
    prompts = setup_prompts("standalone-tree", engine.model, COUNT)
    params = [SamplingParams(max_new_tokens=20)] * COUNT
    wanted = expected(engine, prompts, params)
    for occurrence in (3, 7, 11):
        fault = Fault(engine, "verify", once(occurrence))
        check_all(engine, prompts, params, wanted)
        fault.stop()
        assert fault.struck == 1
    assert retracted
