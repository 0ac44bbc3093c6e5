"""A stop string may end anywhere inside an accepted run; ids, text, log-probabilities and chunks agree on where."""

import pytest

from spec_v2 import SamplingParams
from spec_v2.scheduler.stop_strings import StopStrings
from tests import tiny_models as tiny
from tests.cells import SETUPS, open_setup, setup_prompts
from tests.harness import CHAIN, Recorder
from tests.surface import assert_at_rest
from tests.tiny_tokenizers import byte_tokenizer, letter_tokenizer

WIDTH = CHAIN[0] + 1
N = 2 * WIDTH + 3


def open_texts(open_engine, setup, schedule, device, tokenizer=None, **changes):
    """A drafter that is right nearly always, so that runs are long; and a tokenizer of letters."""
    drafter = {"plain": "nothing"}.get(setup, "self")
    engine = open_setup(
        open_engine,
        setup,
        schedule,
        device,
        drafter=drafter,
        tokenizer=tokenizer or letter_tokenizer(),
        **changes,
    )
    return engine, Recorder(engine)


def plain_text(engine, setup, count=N):
    """(prompt, tokens, their letters), a prompt whose first tokens are all different."""
    for prompt in setup_prompts(setup, engine.model, 30):
        tokens = tiny.oracle_of(engine.model).tokens(prompt, count)
        if len(set(tokens)) == count:
            return prompt, tokens, engine.tokenizer.decode(tokens)
    raise AssertionError("no prompt gives distinct tokens")


def collect(engine, prompt, many):
    """The completions of one batch, streamed; the chunks must add up to them."""
    texts, ids, done = [""] * len(many), [()] * len(many), [None] * len(many)
    for chunk in engine.stream([prompt] * len(many), many):
        assert done[chunk.index] is None, "news after the end"
        texts[chunk.index] += chunk.text
        ids[chunk.index] += chunk.output_ids
        done[chunk.index] = chunk.completion
    assert [d.text for d in done] == texts
    assert [d.output_ids for d in done] == ids
    return done


def check_cut(engine, done, tokens, text, stop, length):
    """The first `length` tokens, the last of which completed `stop`; the text ends before it."""
    assert (done.finish_reason, done.matched_stop) == ("stop", stop)
    assert done.output_ids == tuple(tokens[:length])
    assert done.text == text[: text.index(stop)]
    assert len(done.logprobs) == len(done.top_logprobs) == length
    assert sum(done.step_lens) == done.completion_tokens == length


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("setup", SETUPS)
def test_sp02_sp05_a_stop_string_at_every_place_of_a_run(open_engine, setup, width, schedule, device):
    engine, recorder = open_texts(open_engine, setup, schedule, device)
    prompt, tokens, text = plain_text(engine, setup)
    stops = [text[i : i + width] for i in range(len(text) - width + 1)]
    many = [SamplingParams(max_new_tokens=N, stop=s, logprobs=True, top_logprobs=2) for s in stops]
    for i, (done, stop) in enumerate(zip(collect(engine, prompt, many), stops, strict=True)):
        check_cut(engine, done, tokens, text, stop, i + width)
    if "chain" in setup:
        ends = {i: len(prompt) + i + width - 1 for i in range(len(stops))}  # position of the last token
        places = {ends[r.request] - r.seq_len - 1 for r in recorder.records if not r.dropped}
        assert set(range(WIDTH)) <= places
    assert_at_rest(engine)


@pytest.mark.parametrize("setup", SETUPS)
def test_sp01_the_earliest_cut_wins(open_engine, setup, schedule, device):
    engine, _ = open_texts(open_engine, setup, schedule, device)
    prompt, tokens, text = plain_text(engine, setup)
    cases = [(place, budget) for place in range(WIDTH + 2) for budget in range(1, WIDTH + 3)]
    many = [
        SamplingParams(max_new_tokens=budget, stop=(text[place : place + 2], "??")) for place, budget in cases
    ]
    for (place, budget), done in zip(cases, collect(engine, prompt, many), strict=True):
        ends = place + 2
        assert done.finish_reason == ("stop" if ends <= budget else "length"), (place, budget)
        assert done.output_ids == tuple(tokens[: min(ends, budget)])
        assert done.text == text[: place if ends <= budget else budget]


@pytest.mark.parametrize("setup", SETUPS)
def test_the_first_of_several_and_ids_beside_strings(open_engine, setup, schedule, device):
    engine, _ = open_texts(open_engine, setup, schedule, device)
    prompt, tokens, text = plain_text(engine, setup)
    late, early = text[5:7], text[2:4]
    cases = (
        ({"stop": (late, early)}, early, 4, 2),
        ({"stop": (late,), "stop_token_ids": (tokens[3],)}, tokens[3], 4, 4),
        ({"stop": (early,), "stop_token_ids": (tokens[8],)}, early, 4, 2),
        (
            {"stop": (text[1:4], text[3])},
            text[1:4],
            4,
            1,
        ),  # both end at one token: the text ends at the first
    )
    many = [SamplingParams(max_new_tokens=N, **options) for options, *_ in cases]
    for done, (_, matched, length, shown) in zip(collect(engine, prompt, many), cases, strict=True):
        assert done.matched_stop == matched
        assert done.output_ids == tuple(tokens[:length])
        assert done.text == text[:shown]


@pytest.mark.parametrize("setup", SETUPS)
def test_sp06_stop_strings_wait_for_min_new_tokens(open_engine, setup, schedule, device):
    """A stop string before the minimum stops nothing, and does not cut the text either."""
    engine, _ = open_texts(open_engine, setup, schedule, device)
    prompt, tokens, text = plain_text(engine, setup)
    early, late = text[1:3], text[6:8]
    many = [
        SamplingParams(max_new_tokens=N, stop=(early, late), min_new_tokens=minimum)
        for minimum in (0, 3, 4, 8)
    ]
    lengths = (3, 3, 8, 8)
    for done, length in zip(collect(engine, prompt, many), lengths, strict=True):
        assert done.output_ids == tuple(tokens[:length])
        assert done.finish_reason == "stop"
        assert done.text == text[: length - 2]
    (done,) = collect(engine, prompt, [SamplingParams(max_new_tokens=5, stop=early, min_new_tokens=5)])
    assert (done.text, done.finish_reason) == (text[:5], "length")


@pytest.mark.parametrize("setup", ["plain", "standalone-tree", "eagle-chain"])
def test_a_stop_string_of_half_characters(open_engine, setup, schedule, device):
    """Tokens are bytes, so a character is complete only some tokens later."""
    engine, _ = open_texts(open_engine, setup, schedule, device, tokenizer=byte_tokenizer())
    prompt = setup_prompts(setup, engine.model, 1)[0]
    tokens = tiny.oracle_of(engine.model).tokens(prompt, 40)
    text = engine.tokenizer.decode(tokens)
    stop = next(c for c in text if ord(c) > 127 and c != "�")
    (done,) = collect(engine, prompt, [SamplingParams(max_new_tokens=40, stop=stop)])
    assert done.finish_reason == "stop"
    assert stop in engine.tokenizer.decode(done.output_ids)
    assert stop not in engine.tokenizer.decode(done.output_ids[:-1])
    assert done.text == engine.tokenizer.decode(done.output_ids)[: -len(stop)]


# -- the search itself ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 5, 40])
def test_a_long_history_changes_nothing(length):
    tokenizer = letter_tokenizer()
    ids = [i % 60 for i in range(300)]
    text = tokenizer.decode(ids)
    for end in (length, 100, 300):
        stop = text[end - length : end]
        found = StopStrings(tokenizer, ("never?", stop))
        assert found.find(ids[:end]) == stop
        first = text.index(stop) + length
        before = found.find(ids[: first - 1])
        assert before is None
    assert StopStrings(tokenizer, ()).find(ids) is None


def test_special_tokens_are_no_text():
    tokenizer = letter_tokenizer()
    tokenizer.add_special_tokens({"eos_token": tokenizer.decode([5])})
    stops = StopStrings(tokenizer, ("ab",))
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    special = tokenizer.eos_token_id
    assert stops.find([a, *[special] * 30, b]) == "ab"
    assert stops.cut([b, a, *[special] * 30, b]) == "b"
