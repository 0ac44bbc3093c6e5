"""Forced acceptance: every step accepts what it was told to, keeps its KV right, and says so everywhere."""

import html
import logging

import pytest
import torch

from spec_v2 import SamplingParams
from spec_v2.kernels.tree_structure import ancestor_mask
from spec_v2.observability.metrics import SpecMetrics, total
from spec_v2.server_args import ServerArgs
from spec_v2.speculative.forced_acceptance import force_acceptance
from spec_v2.speculative_hook import resolve_speculative
from spec_v2.types import DraftTree, TreeShape
from tests import tiny_models as tiny
from tests.cells import models
from tests.eagle3_models import deep_llama, eagle3_head
from tests.harness import CHAIN, LONG_CHAIN, NARROW_TREE, TREE_2, TREE_4, Recorder
from tests.surface import assert_at_rest
from tests.test_kv_state import PoolReader, check_against_recomputation

PROMPTS = [tiny.random_prompt(60 + i, 5 + 4 * i) for i in range(3)]


# --- the function ---


def random_tree(seed, b=4, n=9, padding=2):
    gen = torch.Generator().manual_seed(seed)
    parents = torch.full((b, n), -1)
    for i in range(b):
        for j in range(1, n - padding):
            parents[i, j] = torch.randint(max(0, j - 3), j, (1,), generator=gen)
    return DraftTree(
        tokens=torch.randint(1000, (b, n), generator=gen),
        parents=parents,
        scores=torch.ones(b, n),
        match_lens=torch.zeros(b, dtype=torch.long),
        draft_probs=torch.empty(b, 0, 0),
    )


def path_to(parents, node):
    nodes = [node]
    while parents[nodes[0]] >= 0:
        nodes.insert(0, parents[nodes[0]])
    return nodes


def forced_path(parents, num_drafts):
    """The first node that is deep enough, or the first of the deepest; padding is never reached."""
    nodes = [0] + [j for j in range(1, len(parents)) if parents[j] >= 0]
    paths = [path_to(parents, node) for node in nodes]
    depth = min(num_drafts, max(len(path) - 1 for path in paths))
    return next(path for path in paths if len(path) - 1 == depth)


@pytest.mark.parametrize("length", range(1, 9))
@pytest.mark.parametrize("seed", range(6))
def test_the_first_path_that_is_deep_enough_is_accepted(seed, length):
    tree, longest = random_tree(seed), 8
    shape = TreeShape(
        num_steps=8, topk=3, num_draft_tokens=9, longest_path=longest, is_tree=True, simulated_accept_length=length
    )  # fmt: skip
    target_tokens = 1000 + torch.arange(4 * 9).view(4, 9)
    found = force_acceptance(tree, ancestor_mask(tree.parents), target_tokens, shape)
    for i, (index, predict, accept_len) in enumerate(zip(*(x.tolist() for x in found), strict=True)):
        path = forced_path(tree.parents[i].tolist(), length - 1)
        rest = [-1] * (longest + 1 - len(path))
        assert accept_len == len(path)
        assert index == path + rest
        tokens = [int(tree.tokens[i, node]) for node in path[1:]]
        assert predict == [*tokens, int(target_tokens[i, path[-1]]), *rest]


# --- engines ---

CASES = [
    ("STANDALONE", "noisy", CHAIN, 3),
    ("STANDALONE", "random", TREE_4, 4),
    ("EAGLE", "random", CHAIN, 4),
    ("EAGLE", "noisy", TREE_2, 2),
    ("EAGLE", "noisy", NARROW_TREE, 3),
    ("MULTI_LAYER_EAGLE", "random", CHAIN, 3),
    ("MULTI_LAYER_EAGLE", "random", LONG_CHAIN, 2),
    ("MULTI_LAYER_EAGLE", "noisy", LONG_CHAIN, 6),
    ("FROZEN_KV_MTP", "random", CHAIN, 3),
    ("FROZEN_KV_MTP", "random", TREE_2, 2),
]


def forced_engine(open_engine, case, schedule, device, **options):
    algorithm, drafter, shape, length = case
    target, draft = models(algorithm, drafter, device)
    return open_engine(
        target, algorithm, draft, shape, schedule=schedule, speculative_simulated_accept_length=length, **options
    )  # fmt: skip


def check_steps(records, model, length):
    """Every step took the wanted path, and after it what the target says there."""
    assert records
    for r in records:
        assert r.accepted_nodes == forced_path(r.parents, length - 1)
        drafts = [r.tokens[node] for node in r.accepted_nodes[1:]]
        assert r.emitted[:-1] == drafts
        if not r.dropped:
            assert r.emitted[-1] == int(tiny.oracle_of(model).logits([*r.text, *drafts]).argmax())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}-{case[3]}")
def test_every_step_accepts_as_told_and_the_kv_is_right(open_engine, case, schedule, device):
    algorithm, drafter, shape, length = case
    engine = forced_engine(open_engine, case, schedule, device)
    recorder = Recorder(engine)
    recorder.before = reader = PoolReader(engine, algorithm)
    done = engine.generate(PROMPTS, SamplingParams(max_new_tokens=25))
    for one in done:
        assert one.completion_tokens == 25
        assert length in one.spec.accept_lens
        if shape[1] == 1:  # the best nodes of a tree need not reach as deep
            assert set(one.spec.accept_lens) == {length}
            assert one.spec.verify_ct == -(-24 // length)  # the first token is the prefill's
    check_steps(recorder.records, engine.model, length)
    check_against_recomputation((algorithm, drafter, shape), reader.shots, device)
    assert_at_rest(engine)


def test_eagle3_with_a_reduced_vocabulary(open_engine, schedule, device):
    target = deep_llama(device)
    head = eagle3_head(target, token_map=range(3, 40))
    engine = open_engine(
        target, "EAGLE3", head, CHAIN, schedule=schedule, speculative_simulated_accept_length=3
    )
    recorder = Recorder(engine)
    done = engine.generate(PROMPTS, SamplingParams(max_new_tokens=14))
    assert {one.spec.accept_lens for one in done} == {(3,) * 5}
    check_steps(recorder.records, target, 3)


def test_ngram_takes_the_deepest_path_where_it_found_less(open_engine, schedule, device):
    engine = forced_engine(open_engine, ("NGRAM", "self", TREE_4, 4), schedule, device)
    assert engine.server_args.speculative_adaptive is False
    recorder = Recorder(engine)
    prompts = [tiny.copying_prompt(engine.model, seed, 12) for seed in range(2)] + PROMPTS[:1]
    engine.generate(prompts, SamplingParams(max_new_tokens=24))
    check_steps(recorder.records, engine.model, 4)
    assert {1, 4} <= {r.accept_len for r in recorder.records}


def test_forced_to_accept_nothing_it_is_plain_decoding(open_engine, schedule, device):
    engine = forced_engine(open_engine, ("STANDALONE", "noisy", TREE_2, 1), schedule, device)
    done = engine.generate(PROMPTS, SamplingParams(max_new_tokens=12))
    wanted = [tuple(tiny.oracle_of(engine.model).tokens(prompt, 12)) for prompt in PROMPTS]
    assert [one.output_ids for one in done] == wanted
    assert {one.spec.accept_lens for one in done} == {(1,) * 11}


def test_schedules_give_the_same_forced_text(open_engine, device):
    texts = []
    for schedule in ("sync", "overlap"):
        engine = forced_engine(open_engine, CASES[3], schedule, device)
        texts.append([one.output_ids for one in engine.generate(PROMPTS, SamplingParams(max_new_tokens=20))])
    assert texts[0] == texts[1]


# --- never by accident ---


def test_everything_says_so(open_engine, device, caplog):
    with caplog.at_level(logging.WARNING, "spec_v2"):
        engine = forced_engine(open_engine, CASES[0], "overlap", device)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("speculative_simulated_accept_length=3: forced acceptance")
    (done,) = engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=6))
    assert done.spec.forced_acceptance
    assert "accept_length=3.00 by forced acceptance" in repr(done)
    assert "3.00 by forced acceptance" in html.unescape(done._repr_html_())
    *_, last = engine.stream(PROMPTS[0], SamplingParams(max_new_tokens=6))
    assert last.completion.spec.forced_acceptance


def test_nothing_says_so_where_the_target_decides(open_engine, device, caplog):
    target, draft = models("STANDALONE", "noisy", device)
    engine = open_engine(target, "STANDALONE", draft)
    (done,) = engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=6))
    assert not done.spec.forced_acceptance
    assert "forced" not in repr(done) + done._repr_html_() + caplog.text


def test_steps_in_vain_by_force_are_no_warning(open_engine, device, caplog):
    engine = forced_engine(open_engine, ("STANDALONE", "noisy", CHAIN, 1), "overlap", device)
    engine.generate([(1, 2)], SamplingParams(max_new_tokens=120))
    assert "none of its drafts" not in caplog.text


def test_metrics_that_are_forced_in_part_are_forced():
    forced, free = SpecMetrics((3, 3), (3, 3), True), SpecMetrics((1,), (3,))
    assert (free + forced).forced_acceptance
    assert total([free, forced, free]) == SpecMetrics((1, 3, 3, 1), (3, 3, 3, 3), True)
    assert not total([free, free]).forced_acceptance


def resolved(**settings):
    settings = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "d"} | settings
    return resolve_speculative(ServerArgs(**settings))


CHAIN_OF_3 = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
NARROW = {"speculative_num_steps": 5, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 4}
NGRAM_OF_8 = {
    "speculative_algorithm": "NGRAM",
    "speculative_draft_model_path": None,
    "speculative_num_draft_tokens": 8,
}


@pytest.mark.parametrize(("settings", "most"), [(CHAIN_OF_3, 4), (NARROW, 4), (NGRAM_OF_8, 8)])
def test_no_more_than_a_step_can_accept(settings, most):
    args = resolved(**settings, speculative_simulated_accept_length=most)
    assert args.accept_width == most
    assert resolve_speculative(args) == args
    with pytest.raises(
        ValueError, match=f"--speculative-simulated-accept-length {most + 1} .* at most {most}"
    ):
        resolved(**settings, speculative_simulated_accept_length=most + 1)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (CHAIN_OF_3 | {"speculative_use_rejection_sampling": True}, "--speculative-use-rejection-sampling decides"),
        (NGRAM_OF_8 | {"speculative_adaptive": True}, "--speculative-adaptive decides"),
        ({"speculative_algorithm": None, "speculative_draft_model_path": None}, "is not used by plain decoding"),
    ],
)  # fmt: skip
def test_what_cannot_go_with_it(settings, named):
    with pytest.raises(ValueError, match=named) as caught:
        resolved(**settings, speculative_simulated_accept_length=2)
    assert "--speculative-simulated-accept-length 2" in str(caught.value)
