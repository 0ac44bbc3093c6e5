"""Which setting is chosen, from scripted accept lengths and given costs: nothing here looks at a clock."""

import json
from collections import Counter
from itertools import count, cycle

import jaxtyping
import pytest

import spec_v2
from spec_v2 import Outlook, SamplingParams, StepObservation
from spec_v2.adaptive_config import AdaptiveConfig, candidate_settings, default_candidates, read_config
from spec_v2.scheduler.future_map import MOST_UNREAD
from spec_v2.server_args import ServerArgs
from spec_v2.speculative.acceptance_rates import FIRST_GUESS, AcceptanceRates
from spec_v2.speculative.adaptive import LAST_LOOK, SpeedPolicy, candidate_shapes
from spec_v2.speculative.step_costs import StepCosts, bucket
from spec_v2.speculative_hook import resolve_speculative
from spec_v2.types import ROOT_ONLY
from tests import tiny_models as tiny
from tests.adaptive_policies import ScriptedClock, ScriptedPolicy
from tests.cells import models
from tests.harness import check_identity

PLAIN = (0, 1, 1)


def resolved(trio=(7, 1, 8), **settings):
    steps, topk, tokens = trio
    return resolve_speculative(
        ServerArgs(
            **{
                "speculative_algorithm": "EAGLE",
                "speculative_draft_model_path": "d",
                "speculative_adaptive": True,
                "speculative_num_steps": steps,
                "speculative_eagle_topk": topk,
                "speculative_num_draft_tokens": tokens,
            }
            | settings
        )
    )


def shapes_of(*trio):
    (shapes,) = candidate_shapes(resolved(trio)).values()
    return shapes


CHAINS = shapes_of(7, 1, 8)
TREES = shapes_of(5, 4, 8)


def cpu_seconds(shape, batch_size):
    """As on two cores: a token more is 3% of a step of one, a pass of a small head 10%."""
    o = 0.25 if shape.drafts else 0
    return 1 + 0.03 * (batch_size * shape.num_draft_tokens - 1) + 0.1 * shape.num_steps + o


def gpu_seconds(shape, batch_size):
    """A step waits for the weights, until there are many tokens."""
    o = 0.25 if shape.drafts else 0
    return 1 + 0.02 * batch_size * shape.num_draft_tokens + 0.06 * shape.num_steps + o


def new_policy(token_cost=0.03, **config):
    return SpeedPolicy(AdaptiveConfig(candidates={}, **config), StepCosts(token_cost))


def drive(policy, shapes, drafts, seconds_of, batch_size, num_steps, in_flight=0):
    """Choose and observe, `in_flight` steps late. `drafts`: how many drafts would be right, step by step. The settings."""
    chosen, waiting = [], []
    for step in range(num_steps):
        shape = policy.choose(
            Outlook(batch_size=batch_size, candidates=shapes, expected_gains=[0.5] * batch_size)
        )
        chosen.append(shape.setting)
        right = [next(drafts) for _ in range(batch_size)]
        waiting.append(
            StepObservation(
                shape=shape,
                batch_size=batch_size,
                max_seq_len=512,
                num_correct_drafts=[min(n, shape.longest_path) for n in right],
                draft_depths=[shape.longest_path] * batch_size,
                seconds=seconds_of(shape, batch_size),
            )
        )
        if len(waiting) > in_flight:
            policy.observe(waiting.pop(0))
        assert step < num_steps
    return chosen


SCRIPTS = {0.2: [0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1], 3: [3], 6: [6]}


def settled(drafts, batch_size, in_flight=0, seconds_of=cpu_seconds):
    """The setting after 30 steps; asserts that it stays, but for a few tries of others."""
    policy, script = new_policy(0.002 if seconds_of is gpu_seconds else 0.03), cycle(SCRIPTS[drafts])
    drive(policy, CHAINS, script, seconds_of, batch_size, 30, in_flight)
    after = drive(policy, CHAINS, script, seconds_of, batch_size, 200, in_flight)
    (setting, times), *_ = Counter(after[:20]).most_common(1)
    assert times >= 15
    assert after.count(setting) >= 180
    return setting


def speed(drafts, batch_size, seconds_of, setting):
    """Tokens per second, counted out."""
    shape = next(shape for shape in CHAINS if shape.setting == setting)
    accepted = [min(n, shape.longest_path) for n in SCRIPTS[drafts]]
    return (1 + sum(accepted) / len(accepted)) / seconds_of(shape, batch_size)


# -- settling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [0, 1], ids=["sync", "overlap"])
@pytest.mark.parametrize("seconds_of", [cpu_seconds, gpu_seconds])
def test_it_settles_on_the_fastest_setting_within_30_steps(seconds_of, in_flight):
    """Or on one that the hysteresis keeps."""
    found = {}
    for batch_size in (1, 32):
        for drafts in SCRIPTS:
            mine = found[drafts, batch_size] = settled(drafts, batch_size, in_flight, seconds_of)
            speeds = {s.setting: speed(drafts, batch_size, seconds_of, s.setting) for s in CHAINS}
            assert speeds[mine] > max(speeds.values()) / 1.06
    assert len({found[drafts, 1] for drafts in SCRIPTS}) == 3
    assert any(found[drafts, 1] != found[drafts, 32] for drafts in SCRIPTS)


def test_the_settings_by_name():
    """What the test above finds on a CPU, written down."""
    assert [settled(drafts, 1) for drafts in SCRIPTS] == [PLAIN, (3, 1, 4), (7, 1, 8)]
    assert [settled(drafts, 32) for drafts in SCRIPTS] == [PLAIN, (3, 1, 4), (5, 1, 6)]


@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_tree_is_chosen_where_it_is_accepted_more(in_flight):
    """The tree gets all of its depth accepted, chains get two drafts."""
    policy = new_policy()
    tree = TREES[-1]
    assert tree.setting == (5, 4, 8)

    def run(num_steps):
        chosen = []
        for _ in range(num_steps):
            shape = policy.choose(Outlook(batch_size=1, candidates=TREES, expected_gains=[0.5]))
            correct = shape.longest_path if shape == tree else min(2, shape.longest_path)
            policy.observe(
                StepObservation(
                    shape=shape, batch_size=1, max_seq_len=512, num_correct_drafts=[correct],
                    draft_depths=[shape.longest_path], seconds=gpu_seconds(shape, 1),
                )
            )  # fmt: skip
            chosen.append(shape.setting)
        return chosen

    run(40)
    assert set(run(60)) == {(5, 4, 8)}


def test_batches_of_other_sizes_are_other_decisions():
    policy = new_policy()
    for _ in range(2):
        for batch_size in (1, 32):
            drive(policy, CHAINS, cycle([6]), cpu_seconds, batch_size, 40)
    last = [drive(policy, CHAINS, cycle([6]), cpu_seconds, b, 20) for b in (1, 32)]
    assert [set(settings) for settings in last] == [{(7, 1, 8)}, {(5, 1, 6)}]


def test_a_batch_size_seen_later_starts_from_known_acceptance():
    policy = new_policy()
    drive(policy, CHAINS, cycle([0]), cpu_seconds, 1, 40)
    first = drive(policy, CHAINS, cycle([0]), cpu_seconds, 32, 1)
    assert first == [PLAIN]


def test_a_prediction_that_is_a_little_wrong_is_found_out():
    """A chain of 5 takes less than the line between the others: as long as it is not tried, 7 looks better."""
    policy = new_policy()

    def seconds_of(shape, batch_size):
        return cpu_seconds(shape, batch_size) * (0.9 if shape.setting == (5, 1, 6) else 1)

    drive(policy, CHAINS, cycle([6]), seconds_of, 1, 30)
    assert set(drive(policy, CHAINS, cycle([6]), seconds_of, 1, 60)) == {(5, 1, 6)}


def test_hysteresis_keeps_what_is_nearly_as_good():
    """Two settings within 4% of each other: no amount of noise in that range makes it move."""
    policy, noise = new_policy(), cycle([0.99, 1.01, 1.0, 1.02, 0.98, 1.0, 1.01])
    shapes = CHAINS[2:4]

    def seconds_of(shape, batch_size):
        tokens = 1 + min(3, shape.longest_path)
        return tokens * (1.03 if shape == shapes[0] else 1.0) * next(noise)

    drive(policy, shapes, cycle([3]), seconds_of, 1, 40)
    assert len(set(drive(policy, shapes, cycle([3]), seconds_of, 1, 300))) == 1


# -- the tier without drafts -----------------------------------------------------------------------------------


def looks(chosen):
    return [step for step, setting in enumerate(chosen) if setting != PLAIN]


def test_without_drafts_it_looks_ever_more_seldom():
    policy = new_policy()
    drive(policy, CHAINS, cycle([0]), cpu_seconds, 1, 30)
    chosen = drive(policy, CHAINS, cycle([0]), cpu_seconds, 1, 600)
    assert set(chosen) == {PLAIN, (1, 1, 2)}, "a look is as cheap as drafting can be"
    gaps = [b - a for a, b in zip(looks(chosen), looks(chosen)[1:], strict=False)]
    assert gaps == sorted(gaps)
    assert gaps[0] < 64
    assert gaps[-1] == LAST_LOOK == MOST_UNREAD  # so that the draft model never has to catch up for nothing


@pytest.mark.parametrize("in_flight", [0, 1], ids=["sync", "overlap"])
def test_it_comes_back_when_drafts_pay_again(in_flight):
    policy = new_policy()
    drive(policy, CHAINS, cycle([0]), cpu_seconds, 1, 400, in_flight)
    chosen = drive(policy, CHAINS, cycle([6]), cpu_seconds, 1, LAST_LOOK + 30, in_flight)
    assert chosen[-1] == (7, 1, 8)


def test_one_lucky_draft_does_not_bring_it_back():
    policy = new_policy()
    drive(policy, CHAINS, cycle([0]), cpu_seconds, 1, 400)
    script = (1 if step == LAST_LOOK - 1 else 0 for step in count())
    chosen = drive(policy, CHAINS, script, cpu_seconds, 1, 300)
    assert len(looks(chosen)) <= 12
    assert set(chosen) == {PLAIN, (1, 1, 2)}


def test_in_a_large_batch_somebody_is_always_lucky():
    """A look is judged by what the whole batch gained."""
    policy, script = new_policy(), cycle([1] + [0] * 15)
    drive(policy, CHAINS, script, cpu_seconds, 32, 60)
    assert len(looks(drive(policy, CHAINS, script, cpu_seconds, 32, 256))) <= 256 / 32


def test_drafts_deeper_than_lately_are_tried_again():
    policy = new_policy()
    drive(policy, CHAINS, cycle([2]), cpu_seconds, 1, 60)
    assert drive(policy, CHAINS, cycle([2]), cpu_seconds, 1, 1) == [(2, 1, 3)]
    assert drive(policy, CHAINS, cycle([6]), cpu_seconds, 1, 300)[-1] == (7, 1, 8)


def test_without_the_tier_it_always_drafts():
    policy = new_policy()
    assert PLAIN not in drive(policy, CHAINS[1:], cycle([0]), cpu_seconds, 1, 100)


# -- rates and costs -------------------------------------------------------------------------------------------


def test_expected_tokens_are_counted_depth_by_depth():
    rates, chain = AcceptanceRates(0.1), CHAINS[-1]
    for _ in range(400):
        rates.update(chain, [2, 2, 3, 0], [7] * 4)
    assert [round(rates.rate(chain, depth), 2) for depth in (1, 2, 3, 4)] == [0.75, 0.99, 0.35, 0.03]
    assert rates.expected_tokens(CHAINS[1]) == pytest.approx(1.75, abs=0.02)
    assert rates.expected_tokens(CHAINS[3]) == pytest.approx(1 + 0.75 + 0.75 + 0.25, abs=0.03)
    assert rates.expected_tokens(ROOT_ONLY) == 1


def test_what_was_never_seen_is_guessed_from_its_neighbours():
    rates = AcceptanceRates(0.1)
    assert rates.rate(CHAINS[-1], 5) == pytest.approx(FIRST_GUESS)
    for _ in range(100):
        rates.update(CHAINS[1], [1, 1, 0, 0], [1] * 4)
    assert rates.rate(CHAINS[-1], 5) == pytest.approx(0.5, abs=0.01)
    assert rates.rate(TREES[-1], 1) == pytest.approx(0.7, abs=0.01)
    assert rates.expected_tokens(TREES[-1]) > rates.expected_tokens(CHAINS[4])


def test_a_short_offer_is_no_failure():
    """NGRAM and narrow trees offer less than the longest path: what was not offered was not tried."""
    rates = AcceptanceRates(0.1)
    for _ in range(100):
        rates.update(CHAINS[-1], [2], [2])
    assert rates.rate(CHAINS[-1], 3) > 0.9


def test_terms_are_found_from_whole_steps():
    costs = StepCosts(0.002)
    for shape in (*CHAINS, *TREES):
        for _ in range(8):
            costs.add(4, shape, 5e-3 * gpu_seconds(shape, 4))
    terms = costs.terms(4)
    unit = gpu_seconds(ROOT_ONLY, 4)
    assert terms.plain == pytest.approx(5e-3 * unit, rel=0.02)
    assert terms.c == pytest.approx(0.06 / unit, rel=0.25)
    assert terms.per_token == pytest.approx(0.02 / unit, rel=0.2)
    assert terms.o == pytest.approx(0.25 / unit, rel=0.3)


def test_few_times_already_say_what_other_settings_cost():
    costs, truth = StepCosts(0.03), cpu_seconds
    for shape in (ROOT_ONLY, CHAINS[3]):
        for _ in range(8):
            costs.add(1, shape, truth(shape, 1))
    for shape, predicted in zip(CHAINS, costs.seconds(1, CHAINS), strict=True):
        assert predicted == pytest.approx(truth(shape, 1), rel=0.12), shape.setting


def test_outliers_and_first_times_do_not_count():
    costs, shape = StepCosts(0.03, skip=2), CHAINS[2]
    for seconds in (9.0, 9.0, 1.0, 1.01, 5.0, 0.2, 1.02):
        costs.add(1, shape, seconds, bound=512)
    assert costs.seconds(1, [shape]) == [1.0]
    costs.add(1, shape, 9.0, bound=1024)  # set up anew
    costs.add(1, shape, 9.0, bound=1024)
    costs.add(1, shape, 1.1, bound=1024)
    assert costs.seconds(1, [shape]) == [1.01]


def test_an_untimed_step_changes_no_cost():
    policy = new_policy()
    drive(policy, CHAINS, cycle([3]), lambda shape, b: None, 1, 30)
    assert not policy.costs.is_measured(1, CHAINS[-1])


def test_sizes_share_buckets():
    assert [bucket(n) for n in (1, 2, 3, 4, 9, 33, 600)] == [1, 2, 4, 4, 16, 48, 512]


# -- candidates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("largest", "wanted"),
    [
        ((3, 1, 4), [PLAIN, (1, 1, 2), (2, 1, 3), (3, 1, 4)]),
        ((7, 1, 8), [PLAIN, (1, 1, 2), (2, 1, 3), (3, 1, 4), (5, 1, 6), (7, 1, 8)]),
        ((1, 1, 2), [PLAIN, (1, 1, 2)]),
        ((3, 4, 9), [PLAIN, (1, 1, 2), (2, 1, 3), (3, 1, 4), (2, 4, 5), (3, 4, 9)]),
        ((5, 3, 4), [PLAIN, (1, 1, 2), (3, 3, 2), (2, 1, 3), (3, 1, 4), (5, 3, 4)]),
        ((1, 4, 5), [PLAIN, (1, 1, 2), (1, 4, 3), (1, 4, 5)]),
    ],
)
def test_default_candidates_are_few_and_fit_what_is_reserved(largest, wanted):
    found = list(default_candidates(largest))
    assert sorted(found) == sorted(wanted)
    assert [s[2] for s in found] == sorted(s[2] for s in found)
    assert all(mine <= most for s in found for mine, most in zip(s, largest, strict=True))
    assert len(default_candidates((16, 8, 64))) <= 10


def config_file(tmp_path, content):
    path = tmp_path / "adaptive.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_file_chooses_candidates_by_batch_size(tmp_path, open_engine, device, schedule):
    path = config_file(
        tmp_path,
        {"8": {"candidate_steps": [0, 1]}, "1": {"candidate_steps": [1, [3, 4, 8], 3]}, "ema_alpha": 0.5},
    )
    target, draft = models("STANDALONE", "noisy", device)
    engine = open_engine(
        target, "STANDALONE", draft, (5, 4, 9), schedule=schedule, adaptive_policy=ScriptedPolicy([0]),
        speculative_adaptive_config=path,
    )  # fmt: skip
    shapes = engine.scheduler.planner.shapes
    assert [s.setting for s in shapes._for(1)] == [(1, 1, 2), (3, 1, 4), (3, 4, 8)]
    assert [s.setting for s in shapes._for(7)] == [(1, 1, 2), (3, 1, 4), (3, 4, 8)]
    assert [s.setting for s in shapes._for(40)] == [PLAIN, (1, 1, 2)]
    assert read_config(engine.server_args).ema_alpha == 0.5
    assert [s.is_tree for s in shapes._for(1)] == [False, False, True]


def test_the_trio_follows_the_file(tmp_path):
    path = config_file(tmp_path, {"1": {"candidate_steps": [0, 1, 7]}, "4": {"candidate_steps": [[2, 3, 9]]}})
    args = resolve_speculative(
        ServerArgs(
            speculative_algorithm="EAGLE",
            speculative_draft_model_path="d",
            speculative_adaptive=True,
            speculative_adaptive_config=path,
        )
    )
    assert (args.num_steps, args.topk, args.num_draft_tokens) == (7, 3, 9)
    assert resolve_speculative(args) == args
    assert candidate_settings(args, read_config(args)) == {
        1: (PLAIN, (1, 1, 2), (7, 1, 8)),
        4: ((2, 3, 9),),
    }


BAD_FILES = {
    "not JSON": ("{", "readable JSON file"),
    "a list": ([1], "give an object"),
    "no list": ({"1": {"candidate_steps": 3}}, "give a list that is not empty"),
    "an empty list": ({"1": {"candidate_steps": []}}, "give a list that is not empty"),
    "a negative number": ({"1": {"candidate_steps": [-1]}}, r"has -1 in candidate_steps of .1."),
    "a true number": ({"1": {"candidate_steps": [True]}}, "has True"),
    "two numbers": ({"1": {"candidate_steps": [[3, 1]]}}, r"\[steps, topk, draft tokens\]"),
    "batch size 0": ({"0": {"candidate_steps": [1]}}, "the smallest is"),
    "a key of all sizes": ({"1": {"candidate_steps": [1], "ema_alpha": 0.1}}, "for all batch sizes"),
    "an unknown key": ({"ema": 0.1}, "key 'ema'.*ema_alpha"),
    "alpha": ({"ema_alpha": 0}, "ema_alpha 0; give a number above 0"),
    "interval": ({"update_interval": 0.5}, "update_interval 0.5; give a whole number"),
    "warm-up": ({"warmup_batches": -1}, "warmup_batches -1"),
    "hysteresis": ({"hysteresis": 1}, "hysteresis 1"),
    "SGLang's thresholds": ({"up_hysteresis": 0.5}, r'up_hysteresis.*give "hysteresis"'),
    "more than reserved": ({"1": {"candidate_steps": [8]}}, r"\[8, 1, 9\], more than --speculative-num-steps 7"),
    "a wide tree": ({"1": {"candidate_steps": [[2, 2, 3]]}}, "--speculative-eagle-topk 1"),
    "no chain": ({"1": {"candidate_steps": [[3, 1, 5]]}}, "make exactly 4 draft tokens"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_named_with_key_and_remedy(kind, tmp_path):
    content, message = BAD_FILES[kind]
    path = config_file(tmp_path, content)
    with pytest.raises(ValueError, match=message) as caught:
        resolved(speculative_adaptive_config=path)
    assert "--speculative-adaptive-config" in str(caught.value)
    assert "adaptive.json" in str(caught.value)


# -- engines ---------------------------------------------------------------------------------------------------


def open_adaptive(open_engine, schedule, device, drafter="noisy", shape=(5, 1, 6), **changes):
    target, draft = models("STANDALONE", drafter, device)
    return open_engine(
        target, "STANDALONE", draft, shape, schedule=schedule, speculative_adaptive=True, **changes
    )


PROMPTS = [tiny.random_prompt(60 + i, 5 + 4 * i) for i in range(3)]


def test_forced_to_accept_nothing_it_decodes_plainly(open_engine, schedule, device):
    engine = open_adaptive(open_engine, schedule, device, speculative_simulated_accept_length=1)
    ScriptedClock(engine, cpu_seconds)
    for _ in range(2):
        done = engine.generate(PROMPTS, SamplingParams(max_new_tokens=60))
    assert [one.output_ids for one in done] == [
        tuple(tiny.oracle_of(engine.model).tokens(p, 60)) for p in PROMPTS
    ]
    for one in done:
        settings = one.spec.settings
        assert len(settings) == one.spec.verify_ct == 59
        assert settings.count(PLAIN) >= 56
        assert set(settings) <= {PLAIN, (1, 1, 2)}


@pytest.mark.parametrize(("forced", "wanted"), [(6, (5, 1, 6)), (3, (2, 1, 3))])
def test_forced_to_accept_more_it_drafts_that_much(open_engine, forced, wanted, schedule, device):
    engine = open_adaptive(open_engine, schedule, device, speculative_simulated_accept_length=forced)
    ScriptedClock(engine, cpu_seconds)
    done = engine.generate([PROMPTS[0]] * 2, SamplingParams(max_new_tokens=140))
    done = engine.generate([PROMPTS[0]] * 2, SamplingParams(max_new_tokens=140))
    settings = done[0].spec.settings
    assert settings.count(wanted) >= len(settings) - 6


@pytest.mark.parametrize("drafter", ["random", "noisy", "self"])
@pytest.mark.parametrize("shape", [(5, 1, 6), (3, 4, 9)], ids=str)
def test_the_built_in_policy_gives_the_plain_tokens(open_engine, drafter, shape, schedule, device):
    engine = open_adaptive(open_engine, schedule, device, drafter, shape)
    ScriptedClock(engine, cpu_seconds)
    lengths = [60, 20, 40]
    check_identity(engine, PROMPTS, [SamplingParams(max_new_tokens=n) for n in lengths])
    chosen = set(engine.trace.settings().values())
    assert len(chosen) >= 2 or drafter == "self"
    if drafter == "random":
        assert PLAIN in chosen


def test_real_times_do_as_well(open_engine, schedule, device):
    """With the real clock too; which settings are chosen is the machine's business."""
    engine = open_adaptive(open_engine, schedule, device, shape=(3, 4, 9))
    check_identity(engine, PROMPTS, [SamplingParams(max_new_tokens=50)] * 3)


def test_steps_are_timed_from_landing_to_landing(open_engine, schedule, device):
    """Each step's scripted length is what the policy is told, but for steps that caught up."""
    policy = ScriptedPolicy([0, 0, -1, 1])
    told = []
    policy.observe = told.append
    engine = open_adaptive(open_engine, schedule, device, adaptive_policy=policy)
    ScriptedClock(engine, cpu_seconds)
    engine.generate(PROMPTS[:2], SamplingParams(max_new_tokens=40))
    timed = [step for step in told if step.seconds is not None]
    assert all(step.seconds == pytest.approx(cpu_seconds(step.shape, step.batch_size)) for step in timed)
    assert {step.shape.setting for step in timed} == {PLAIN, (1, 1, 2)}
    assert {step.shape.setting for step in told if step.seconds is None} == {(5, 1, 6)}


# -- a policy of one's own -------------------------------------------------------------------------------------


class ByBatchSize:
    """Long chains for one request, none for more."""

    def choose(self, outlook):
        return outlook.candidates[-1] if outlook.batch_size == 1 else outlook.candidates[0]

    def observe(self, step):
        pass


def test_a_policy_of_ones_own(open_engine, schedule, device):
    assert isinstance(ByBatchSize(), spec_v2.AdaptivePolicy)
    target, draft = models("STANDALONE", "self", device)
    engine = open_engine(
        target, "STANDALONE", draft, (5, 1, 6), schedule=schedule, adaptive_policy=ByBatchSize()
    )
    assert engine.server_args.speculative_adaptive is True
    params = [SamplingParams(max_new_tokens=n) for n in (10, 60)]
    records = check_identity(engine, PROMPTS[:2], params)
    sizes = {step: sum(r.step == step for r in records) for step in {r.step for r in records}}
    for r in records:
        assert len(r.tokens) == (6 if sizes[r.step] == 1 else 1)
    assert set(sizes.values()) == {1, 2}


def test_ngram_with_a_policy_of_ones_own(open_engine, schedule, device):
    target = tiny.markov(device)
    engine = open_engine(
        target, "NGRAM", None, (3, 4, 6), schedule=schedule, adaptive_policy=ByBatchSize(), speculative_adaptive=True
    )  # fmt: skip
    records = check_identity(
        engine, [tiny.copying_prompt(target, i, 10) for i in range(2)], [SamplingParams(max_new_tokens=n) for n in (8, 30)]
    )  # fmt: skip
    assert {len(r.tokens) for r in records} == {1, 6}


class Stubborn(ByBatchSize):
    def choose(self, outlook):
        return (3, 1, 4)


def test_a_policy_that_chooses_something_else_is_named(open_engine, schedule, device):
    engine = open_adaptive(open_engine, schedule, device, adaptive_policy=Stubborn())
    with pytest.raises(
        ValueError, match=r"adaptive_policy=Stubborn chose \(3, 1, 4\).*\(0, 1, 1\), \(1, 1, 2\)"
    ):
        engine.generate(PROMPTS, SamplingParams(max_new_tokens=5))
    engine.scheduler.planner.shapes.policy = ByBatchSize()
    check_identity(engine, PROMPTS, [SamplingParams(max_new_tokens=9)] * 3)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"adaptive_policy": object()}, "no policy: give an object with the methods choose and observe"),
        ({"adaptive_policy": ByBatchSize(), "speculative_adaptive": False}, "leave one of them out"),
    ],
)
def test_a_policy_that_cannot_be_used_is_refused(open_engine, changes, named, device, monkeypatch):
    monkeypatch.setattr(
        jaxtyping.config, "jaxtyping_disable", True
    )  # refusing a wrong type is what is tested
    target, draft = models("STANDALONE", "noisy", device)
    with pytest.raises(ValueError, match=named):
        open_engine(target, "STANDALONE", draft, **changes)


def test_plain_decoding_has_nothing_to_adapt(open_engine, device):
    with pytest.raises(ValueError, match="--speculative-adaptive is not used by plain decoding"):
        open_engine(tiny.llama(device), adaptive_policy=ByBatchSize())


def test_a_worker_that_always_drafts_the_same_is_refused(monkeypatch):
    from spec_v2 import spec_registry
    from spec_v2.speculative.base_spec_worker import BaseSpecWorker

    monkeypatch.setattr(spec_registry, "_registered", {})

    class Fixed(BaseSpecWorker):
        pass

    class Following(BaseSpecWorker):
        follows_shape = True

    for worker, fits in ((Fixed, False), (Following, True)):
        spec_v2.register_algorithm("own", worker)
        args = ServerArgs(speculative_algorithm="own", speculative_adaptive=True)
        if fits:
            assert resolve_speculative(args).speculative_adaptive
        else:
            with pytest.raises(ValueError, match="--speculative-adaptive is not used by OWN"):
                resolve_speculative(args)
