"""The draft side is right: a drafter that knows the target is always accepted (item 3).

Losslessness is blind to every error of a drafter, which only makes it slow. So drafters that must agree with
the target are held to that, and every tree is compared with one grown by full forwards of the drafter.
"""

import pytest

from spec_v2 import SamplingParams
from tests import tiny_models as tiny
from tests.cells import CHAINS_ONLY, models
from tests.draft_oracles import EagleOracle, FrozenKvOracle, MultiLayerOracle, StandaloneOracle, grow
from tests.harness import (
    CHAIN,
    FLAT_TREE,
    LONG_CHAIN,
    NARROW_TREE,
    SHORT_CHAIN,
    TREE_2,
    TREE_4,
    Recorder,
    check_identity,
)

TREES = (TREE_2, TREE_4, NARROW_TREE, FLAT_TREE)
DRAFT_ORACLES = {
    "STANDALONE": StandaloneOracle,
    "EAGLE": EagleOracle,
    "MULTI_LAYER_EAGLE": MultiLayerOracle,
    "FROZEN_KV_MTP": FrozenKvOracle,
}
WITH_TREES = [name for name in DRAFT_ORACLES if name not in CHAINS_ONLY]
# module `i` of an MTP head has the window's last token in entry `WINDOW - 1`, and the text's first `1 + i` nowhere
ENOUGH = {"EAGLE": (9, 12, 20, 10, 15), "MULTI_LAYER_EAGLE": (9, 12, 20, 10, 15)}


def prompts(lengths, algorithm=None):
    make = tiny.marked_prompt if algorithm == "FROZEN_KV_MTP" else tiny.random_prompt
    return [make(40 + i, length) for i, length in enumerate(lengths)]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("shape", [CHAIN, SHORT_CHAIN, LONG_CHAIN], ids=str)
@pytest.mark.parametrize("algorithm", DRAFT_ORACLES)
def test_a_chain_is_accepted_whole(open_engine, algorithm, shape, page_size, schedule, device):
    target, draft = models(algorithm, "self", device)
    engine = open_engine(target, algorithm, draft, shape, schedule=schedule, page_size=page_size)
    lengths = ENOUGH.get(algorithm, (1, 2, 9, 20, 5))
    records = check_identity(engine, prompts(lengths, algorithm), [SamplingParams(max_new_tokens=30)] * 5)
    assert {r.accept_len for r in records} == {shape[0] + 1}


@pytest.mark.parametrize("algorithm", ENOUGH)
def test_a_windowed_head_agrees_from_the_windows_length_on(open_engine, algorithm, schedule, device):
    target, head = models(algorithm, "self", device)
    engine = open_engine(target, algorithm, head, CHAIN, schedule=schedule)
    records = check_identity(engine, prompts((1, 2, 3, 4, 5)), [SamplingParams(max_new_tokens=40)] * 5)
    early = {r.accept_len for r in records if r.seq_len + 1 < tiny.WINDOW}
    late = {r.accept_len for r in records if r.seq_len >= tiny.WINDOW}
    assert late == {CHAIN[0] + 1}
    assert min(early) < CHAIN[0] + 1, "the head never saw less than the target: this test shows nothing"


@pytest.mark.parametrize("shape", TREES, ids=str)
@pytest.mark.parametrize("algorithm", WITH_TREES)
def test_a_tree_is_accepted_along_its_longest_greedy_path(open_engine, algorithm, shape, schedule, device):
    target, draft = models(algorithm, "self", device)
    engine = open_engine(target, algorithm, draft, shape, schedule=schedule)
    params = [SamplingParams(max_new_tokens=30)] * 5
    # check_identity finds the longest path by trying every node
    records = check_identity(engine, prompts((9, 10, 20, 12, 15), algorithm), params)
    # the arg-max child of the root has the best score of all, so it is in every tree
    assert min(r.accept_len for r in records) >= 2
    assert max(r.accept_len for r in records) == min(shape[0], shape[2] - 1) + 1


@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [(name, shape) for name in DRAFT_ORACLES for shape in (CHAIN, LONG_CHAIN)]
    + [(name, shape) for name in WITH_TREES for shape in TREES],
    ids=str,
)
@pytest.mark.parametrize("drafter", ["random", "noisy"])
def test_dr04_the_tree_is_what_plain_chains_of_the_drafter_give(
    open_engine, algorithm, drafter, shape, schedule, device
):
    target, draft = models(algorithm, drafter, device)
    oracle = DRAFT_ORACLES[algorithm](target, draft)
    recorder = Recorder(engine := open_engine(target, algorithm, draft, shape, schedule=schedule))
    # texts shorter than the modules are many, and longer
    engine.generate(prompts((3, 8, 13, 1), algorithm), SamplingParams(max_new_tokens=16))
    for request in range(4):
        for record in recorder.of_request(request)[:6]:
            wanted = grow(lambda path, text=record.text: oracle.next_logits(text, path), shape)
            nodes = {
                tuple(record.tokens[n] for n in record.path(node)[1:]): record.scores[node]
                for node in range(1, len(record.tokens))
            }
            assert len(record.text) == record.seq_len + 1
            assert record.tokens[0] == record.text[-1]
            assert nodes == pytest.approx(wanted, rel=1e-4, abs=1e-30), (
                f"request {request}, step {record.step}"
            )


def test_tb09_more_nodes_are_never_accepted_less(open_engine, schedule, device):
    """Each step of the larger tree emits at least what the smaller tree offers from the same text."""
    target, draft = models("STANDALONE", "noisy", device)
    oracle = StandaloneOracle(target, draft)
    recorder = Recorder(engine := open_engine(target, "STANDALONE", draft, (3, 4, 16), schedule=schedule))
    (prompt,) = prompts((8,))
    engine.generate(prompt, SamplingParams(max_new_tokens=40))
    plain = tiny.oracle_of(target).tokens(prompt, 60)
    for record in recorder.of_request(0):
        smaller = grow(lambda path, text=record.text: oracle.next_logits(text, path), TREE_2)
        follow = plain[len(record.text) - len(prompt) :]
        offered = max((len(p) for p in smaller if list(p) == follow[: len(p)]), default=0)
        assert record.accept_len >= 1 + offered
