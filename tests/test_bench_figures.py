"""The benchmark's order and arithmetic: on contenders that follow a script, and on traces made up by hand."""

from dataclasses import replace

import pytest

from spec_v2.bench import cost_model, figures
from spec_v2.bench.contenders import Contender, Sample, until
from spec_v2.bench.measure import Case, measure, num_runs
from spec_v2.completion import Completion
from spec_v2.observability.metrics import SpecMetrics
from spec_v2.observability.trace import Span

# --- order ---


class Scripted(Contender):
    """Notes when it is called; its n-th run takes `seconds[n]`."""

    def __init__(self, name, log, seconds=(1.0,) * 9, *, algorithm=None, most=9, ids=(7, 8, 9, 7)):
        self.name, self.algorithm, self.schedule = name, algorithm, "sync" if algorithm else None
        self._log, self._seconds, self._most, self._ids = log, iter(seconds), most, ids

    def fits(self, batch_size):
        return batch_size <= self._most

    def run(self, prompts, max_new_tokens, *, ignore_eos=True):
        self._log.append((len(prompts), self.name))
        seconds, spec = next(self._seconds), SpecMetrics(accept_lens=(3,), draft_depths=(4,))
        done = Completion(
            text="", output_ids=self._ids, finish_reason="length", prompt_tokens=len(prompts[0]), spec=spec
        )
        return Sample((done,) * len(prompts), seconds + 1.0, seconds, len(prompts))


def case_of(batch_size, kind="copy"):
    return Case(kind, ((1, 2),) * batch_size)


def test_contenders_take_turns_and_the_first_round_does_not_count():
    log, ticks = [], []
    contenders = [Scripted("a", log), Scripted("b", log, most=1), Scripted("c", log)]
    cases = [case_of(1), case_of(2)]
    samples = measure(contenders, cases, max_new_tokens=4, repetitions=2, done=lambda: ticks.append(len(log)))
    assert log == [(1, "a"), (1, "b"), (1, "c")] * 3 + [(2, "a"), (2, "c")] * 3
    assert ticks == list(range(1, 16))
    assert num_runs(contenders, cases, 2) == 15
    assert {(case.batch_size, name): len(found) for (case, name), found in samples.items()} == {
        (1, "a"): 2, (1, "b"): 2, (1, "c"): 2, (2, "a"): 2, (2, "c"): 2,
    }  # fmt: skip


def test_ratios_are_taken_within_a_repetition():
    plain = Scripted("none sync", [], (9.0, 1.0, 2.0, 4.0), algorithm="none")
    fast = Scripted("NGRAM sync", [], (9.0, 0.5, 0.5, 4.0), algorithm="NGRAM")
    other = Scripted("transformers generate", [], (9.0, 2.0, 2.0, 2.0))
    contenders = [plain, fast, other]
    samples = measure(contenders, [case_of(1)], max_new_tokens=4, repetitions=3, done=lambda: None)
    first, second, third = figures.cells_of(samples, contenders, 4, None)
    assert list(first["ratios"]) == ["plain", "transformers generate"]
    assert first["ratios"]["plain"]["decode"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert second["ratios"]["plain"]["decode"] == {"median": 2.0, "min": 1.0, "max": 4.0}
    assert second["ratios"]["plain"]["whole"]["max"] == 3.0 / 1.5
    assert second["ratios"]["transformers generate"]["decode"]["median"] == 4.0
    assert third["ratios"] == {}
    assert second["decode_tokens_per_second"] == {"median": 3 / 0.5, "min": 3 / 4.0, "max": 3 / 0.5}
    assert second["whole_tokens_per_second"]["median"] == 4 / 1.5
    assert (second["mean_acceptance_length"], second["draft_acceptance_rate"]) == (3.0, 0.5)


def test_texts_and_counts_that_differ_are_told():
    contenders = [Scripted("none sync", [], algorithm="none"), Scripted("x", [], ids=(7, 8, 9))]
    samples = measure(contenders, [case_of(2)], max_new_tokens=4, repetitions=1, done=lambda: None)
    same, short = figures.cells_of(samples, contenders, 4, None)
    assert (same["texts_that_differ"], same["token_counts_equal"]) == ([], True)
    assert short["texts_compared_with"] == "none sync"
    assert [t["prompt"] for t in short["texts_that_differ"]] == [0, 1]
    assert not short["texts_that_differ"][0]["is_tie"]
    assert not short["token_counts_equal"]


def test_an_answer_may_end_early_where_all_end_at_the_models_own_end():
    class Ending(Scripted):
        def run(self, prompts, max_new_tokens, *, ignore_eos=True):
            sample = super().run(prompts, max_new_tokens)
            reason = "length" if ignore_eos else "stop"
            return replace(
                sample, completions=tuple(replace(c, finish_reason=reason) for c in sample.completions)
            )

    ends = Ending("none sync", [], ids=(7, 8, 9), algorithm="none")
    for case in (case_of(1), replace(case_of(1), ignore_eos=False)):
        samples = measure([ends], [case], max_new_tokens=4, repetitions=1, done=lambda: None)
        (cell,) = figures.cells_of(samples, [ends], 4, None)
        assert cell["token_counts_equal"] is not case.ignore_eos


def test_what_follows_an_end_is_cut_off():
    assert until([5, 2, 0, 0], (2, 9)) == [5, 2]
    assert until([5, 2], ()) == [5, 2]


def test_tokens_that_come_at_once_have_no_decode_steps():
    done = Completion(text="", output_ids=(1, 2), finish_reason="length", prompt_tokens=1, spec=SpecMetrics())
    assert Sample((done,), 0.5, 0.0, 2).decode_rate == 4.0


# --- cost model ---


def spans_of(step, start_ms, *, verify, draft=0.0, extend=0.0, gap=0.0, prefill=False):
    """A step's spans, in a row; the host has its result when all is done. Times in milliseconds."""
    spans, at = [], start_ms + gap
    for name, took in (
        ("draft", draft),
        ("prefill" if prefill else "verify", verify),
        ("draft_extend", extend),
    ):
        spans.append(Span("forward", name, step, at * 1e3, took * 1e3))
        at += took
    return [Span("host", "launch", step, start_ms * 1e3, 10.0), *spans, Span("host", "process", step, at * 1e3, 0.0)]  # fmt: skip


def trace_of(prefills, steps, **times):
    spans, at = [], 0.0
    for number in range(prefills + steps):
        part = {"verify": 50.0, "prefill": True} if number < prefills else times
        spans += spans_of(number, at, **part)
        at = spans[-1].start_us / 1e3
    return spans


def test_a_step_is_made_of_its_launches_and_gaps():
    spans = trace_of(1, 4, verify=10.0, draft=2.0, extend=3.0, gap=1.0)
    times = cost_model.step_times(spans, num_needed=4)
    assert (times.num_steps, times.step) == (4, pytest.approx(16.0))
    assert times.parts == pytest.approx({"draft": 2.0, "verify": 10.0, "draft_extend": 3.0, "gaps": 1.0})
    assert sum(times.parts.values()) == pytest.approx(times.step)
    assert cost_model.decode_seconds(spans, 4) == pytest.approx(4 * 16.0 / 1e3)


def test_a_step_that_gave_nothing_does_not_count():
    """Under overlap one more step is on its way when the last request ends."""
    spans = trace_of(2, 5, verify=10.0)
    assert cost_model.decode_steps(spans, num_needed=4) == [2, 3, 4, 5]
    assert cost_model.step_times(spans, 4) == cost_model.step_times(spans[:-5], 4)


def test_with_prompts_in_between_all_steps_count():
    spans = [*trace_of(1, 3, verify=10.0), *spans_of(4, 90.0, verify=50.0, prefill=True), *spans_of(5, 140.0, verify=10.0)]  # fmt: skip
    assert cost_model.decode_steps(spans, num_needed=2) == [1, 2, 3, 5]


def test_no_decode_step_gives_no_times():
    spans = trace_of(1, 0, verify=1.0)
    assert (cost_model.step_times(spans, 0).num_steps, cost_model.decode_seconds(spans, 0)) == (0, 0.0)


def test_the_model_predicts_what_the_trace_says():
    plain = cost_model.step_times(trace_of(1, 6, verify=18.0, gap=2.0), 6)
    mine = cost_model.step_times(trace_of(1, 3, verify=24.0, draft=8.0, extend=5.0, gap=3.0), 3)
    model = cost_model.cost_model(mine, plain, draft_passes=2, tau=3.0)
    assert (model["plain_step_ms"], model["step_ms"]) == (pytest.approx(20.0), pytest.approx(40.0))
    terms = [model[name] for name in ("v", "k", "c", "o")]
    assert terms == pytest.approx([1.2, 2, 0.2, 0.4])
    assert model["predicted_speedup"] == pytest.approx(3.0 / (1.2 + 2 * 0.2 + 0.4))


def test_the_median_run_stands_for_all():
    runs = [cost_model.StepTimes(1, step, {"gaps": step}) for step in (9.0, 1.0, 4.0)]
    assert cost_model.median_times(runs) is runs[2]
