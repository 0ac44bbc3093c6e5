"""stream(): pieces that add up to the completion and are never taken back; leaving early frees everything."""

import pytest

from spec_v2 import SamplingParams
from tests import tiny_models as tiny
from tests.cells import LIVELY, SETUPS, open_setup, setup_prompts
from tests.harness import sampled
from tests.surface import assert_at_rest
from tests.tiny_tokenizers import CHAT, byte_tokenizer, letter_tokenizer

N = 16
COUNT = 3


class Injected(Exception):
    """Raised by a test inside the engine."""


def open_texts(open_engine, setup, schedule, device, tokenizer=None, **changes):
    tokenizer = tokenizer or letter_tokenizer()
    return open_setup(
        open_engine, setup, schedule, device, tokenizer=tokenizer, **LIVELY.get(setup, {}), **changes
    )


def collect(chunks):
    """{index: (texts, ids, completion)}; no news may come after the last."""
    found = {}
    for chunk in chunks:
        texts, ids, done = found.setdefault(chunk.index, ([], [], []))
        assert not done
        texts.append(chunk.text)
        ids.extend(chunk.output_ids)
        done += [chunk.completion] if chunk.finished else []
    return found


def check_pieces(found, count):
    assert sorted(found) == list(range(count))
    for texts, ids, (done,) in found.values():
        assert "".join(texts) == done.text
        assert tuple(ids) == done.output_ids
        assert done.text.startswith("".join(texts[:-1])), "something was taken back"


@pytest.mark.parametrize("setup", SETUPS)
def test_pieces_add_up_and_equal_generate(open_engine, setup, schedule, device):
    engine = open_texts(open_engine, setup, schedule, device, max_running_requests=2)
    prompts = setup_prompts(setup, engine.model, COUNT)
    params = [sampled(i, max_new_tokens=N + i) for i in range(COUNT)]
    found = collect(engine.stream(prompts, params))
    check_pieces(found, COUNT)
    assert [found[i][2][0] for i in range(COUNT)] == engine.generate(prompts, params)
    assert all(len(texts) > 2 for texts, _, _ in found.values())
    assert_at_rest(engine)


@pytest.mark.parametrize("setup", SETUPS)
def test_half_characters_wait_for_their_other_half(open_engine, setup, schedule, device):
    engine = open_texts(open_engine, setup, schedule, device, byte_tokenizer())
    prompts = setup_prompts(setup, engine.model, COUNT)
    found = collect(engine.stream(prompts, SamplingParams(max_new_tokens=40)))
    check_pieces(found, COUNT)
    assert any(ord(c) > 127 and c != "�" for _, _, (done,) in found.values() for c in done.text)


def stops_in(text):
    """Stop strings that end in a two-byte character, with and without a letter before it."""
    places = [i for i, c in enumerate(text) if ord(c) > 127 and c != "�"]
    return [text[max(i - before, 0) : i + 1] for i in places for before in (0, 1, 2)]


@pytest.mark.parametrize("setup", SETUPS)
def test_sp05_the_beginning_of_a_stop_string_is_held_back(open_engine, setup, schedule, device):
    """Also where half a character of it is there already."""
    engine = open_texts(open_engine, setup, schedule, device, byte_tokenizer())
    prompt = setup_prompts(setup, engine.model, 1)[0]
    (free_run,) = engine.generate(prompt, SamplingParams(max_new_tokens=60))
    stops = stops_in(free_run.text)[:9]
    assert any(len(stop) > 1 for stop in stops)
    many = [SamplingParams(max_new_tokens=60, stop=stop) for stop in stops]
    found = collect(engine.stream([prompt] * len(many), many))
    check_pieces(found, len(many))
    for (_, _, (done,)), stop in zip((found[i] for i in range(len(many))), stops, strict=True):
        assert done.matched_stop == stop
        assert done.text == free_run.text[: free_run.text.index(stop)]


@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize("setup", SETUPS)
def test_leaving_early_aborts_and_frees(open_engine, setup, chunks, schedule, device):
    engine = open_texts(
        open_engine, setup, schedule, device, max_running_requests=2, disable_radix_cache=False
    )
    prompts = setup_prompts(setup, engine.model, COUNT)
    stream = engine.stream(prompts, SamplingParams(max_new_tokens=40))
    for _ in range(chunks):
        next(stream)
    stream.close()
    assert_at_rest(engine, drained=False)
    done = engine.generate(prompts, SamplingParams(max_new_tokens=9))
    assert [list(d.output_ids) for d in done] == [tiny.oracle_of(engine.model).tokens(p, 9) for p in prompts]
    assert_at_rest(engine)


def test_a_stream_that_nobody_started_leaves_nothing_queued(open_engine, schedule, device):
    engine = open_texts(open_engine, "standalone-chain", schedule, device)
    stream = engine.stream([1, 2, 3])
    assert_at_rest(engine)
    stream.close()
    assert_at_rest(engine)
    assert engine.scheduler.num_steps_launched == 0


@pytest.mark.parametrize("setup", ["plain", "ngram", "standalone-tree", "eagle-chain"])
def test_generate_inside_a_stream_joins_it(open_engine, setup, schedule, device):
    engine = open_texts(open_engine, setup, schedule, device)
    prompts = setup_prompts(setup, engine.model, 4)
    plain = [tuple(tiny.oracle_of(engine.model).tokens(p, N)) for p in prompts]
    found, inner = {}, []
    for i, chunk in enumerate(engine.stream(prompts[:2], SamplingParams(max_new_tokens=N))):
        if chunk.finished:
            found[chunk.index] = chunk.completion.output_ids
        if i in (1, 2):
            inner += engine.generate(prompts[2 + (i > 1)], SamplingParams(max_new_tokens=N))
    assert [found[0], found[1], *(d.output_ids for d in inner)] == plain
    assert_at_rest(engine)


def test_a_stream_inside_a_stream_may_be_left(open_engine, schedule, device):
    engine = open_texts(open_engine, "eagle-tree", schedule, device)
    prompts = setup_prompts("eagle-tree", engine.model, 2)
    outer = engine.stream(prompts[0], SamplingParams(max_new_tokens=N))
    chunks = [next(outer)]
    inner = engine.stream(prompts[1], SamplingParams(max_new_tokens=N))
    next(inner)
    inner.close()
    chunks += list(outer)
    assert chunks[-1].completion.output_ids == tuple(tiny.oracle_of(engine.model).tokens(prompts[0], N))
    assert_at_rest(engine)


def test_abort_ends_one_request_of_a_stream(open_engine, schedule, device):
    engine = open_texts(open_engine, "standalone-tree", schedule, device)
    prompts = setup_prompts("standalone-tree", engine.model, COUNT)
    seen = []
    found = {}
    for chunk in engine.stream(prompts, SamplingParams(max_new_tokens=N)):
        seen.append(chunk.index)
        if chunk.index == 1 and seen.count(1) == 2:
            engine.abort(chunk.request_id)
        if chunk.finished:
            found[chunk.index] = chunk.completion
    assert [found[i].finish_reason for i in range(COUNT)] == ["length", "abort", "length"]
    assert 0 < found[1].completion_tokens < N
    assert_at_rest(engine)


@pytest.mark.parametrize("label", ["prefill", "verify"])
def test_an_error_inside_a_stream_frees_everything(open_engine, label, schedule, device):
    engine = open_texts(open_engine, "eagle-chain", schedule, device)

    def fail(name, step):
        if name == label and step >= 0:
            raise Injected(label)

    engine._forward_stream.on_run = fail
    with pytest.raises(Injected):
        list(engine.stream([1, 2, 3], SamplingParams(max_new_tokens=N)))
    engine._forward_stream.on_run = None
    assert_at_rest(engine)
    check_pieces(collect(engine.stream([1, 2, 3], SamplingParams(max_new_tokens=N))), 1)


# -- chat ----------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "xyz"}]


def test_chat_messages_go_through_the_template(open_engine, schedule, device):
    tokenizer = letter_tokenizer(CHAT)
    engine = open_texts(open_engine, "standalone-chain", schedule, device, tokenizer)
    ids = tokenizer("uhelloaxyzA")["input_ids"]
    params = SamplingParams(max_new_tokens=N)
    alone, first, second, text = (
        engine.generate(MESSAGES, params)[0],
        *engine.generate([MESSAGES, MESSAGES[:1]], params),
        engine.generate("uhelloaxyzA", params)[0],
    )
    assert alone.output_ids == first.output_ids == text.output_ids
    assert alone.output_ids == tuple(tiny.oracle_of(engine.model).tokens(ids, N))
    assert alone.prompt_tokens == len(ids)
    assert second.prompt_tokens == len("uhelloA")
    (chunks,) = collect(engine.stream(MESSAGES, params)).values()
    assert chunks[2] == [alone]


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        ([MESSAGES], "no chat template"),
        ([], "prompts is empty"),
        ([[]], r"prompts\[0\] is empty"),
        ("", r"prompts\[0\] is empty"),
        ([[1], [tiny.VOCAB]], r"prompts\[1\] holds 64"),
        ([[1, -1]], r"prompts\[0\] holds -1"),
    ],
)
def test_prompts_that_cannot_work_are_named_at_the_call(open_engine, prompts, named, schedule, device):
    """At the call, not at the first chunk."""
    engine = open_texts(open_engine, "standalone-chain", schedule, device)
    for method in (engine.stream, engine.generate):
        with pytest.raises(ValueError, match=named):
            method(prompts, SamplingParams(max_new_tokens=N))
    assert_at_rest(engine)


def test_bad_messages_are_shown(open_engine, schedule, device):
    engine = open_texts(open_engine, "plain", schedule, device, letter_tokenizer(CHAT))
    bad = [{"role": "user"}]
    with pytest.raises(ValueError, match=r"prompts\[0\] holds \{'role': 'user'\}"):
        engine.generate(bad)


def test_without_a_tokenizer_text_and_stop_strings_are_refused(open_engine, schedule, device):
    engine = open_setup(open_engine, "plain", schedule, device)
    with pytest.raises(ValueError, match="no tokenizer"):
        engine.stream("text")
    with pytest.raises(ValueError, match="stop="):
        engine.stream([1, 2], SamplingParams(stop="x"))
    (done,) = [c.completion for c in engine.stream([1, 2], SamplingParams(max_new_tokens=3)) if c.finished]
    assert done.text == ""
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.stream([1, 2])
