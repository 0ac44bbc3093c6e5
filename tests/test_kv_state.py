"""After accepting j tokens, the KV of all that is committed equals recomputation, for every j (item 8)."""

import pytest
import torch

from spec_v2 import SamplingParams
from tests import tiny_models as tiny
from tests.cells import models, setup_prompts
from tests.draft_oracles import EagleOracle, MultiLayerOracle, StandaloneOracle, model_kv
from tests.harness import CHAIN, LONG_CHAIN, NARROW_TREE, TREE_2, TREE_4, Recorder

TOLERANCE = 1e-10  # relative; the models compute in float64
CASES = [
    ("NGRAM", "self", (3, 4, 5)),
    ("STANDALONE", "noisy", CHAIN),
    ("STANDALONE", "noisy", TREE_4),
    ("EAGLE", "noisy", CHAIN),
    ("EAGLE", "noisy", TREE_2),
    ("EAGLE", "noisy", NARROW_TREE),
    ("MULTI_LAYER_EAGLE", "noisy", CHAIN),
    ("MULTI_LAYER_EAGLE", "noisy", LONG_CHAIN),
    ("FROZEN_KV_MTP", "noisy", CHAIN),
    ("FROZEN_KV_MTP", "noisy", TREE_2),
]
# heads that read hidden states; nearly all of their drafts are rejected
HIDDEN = [("EAGLE", "random", TREE_2), ("MULTI_LAYER_EAGLE", "random", LONG_CHAIN)]
ORACLES = {"STANDALONE": StandaloneOracle, "EAGLE": EagleOracle, "MULTI_LAYER_EAGLE": MultiLayerOracle}


class PoolReader:
    """Copies what the pools hold for each running request, just before a step's result is committed.

    The next step may be in flight, or done: what is committed must not change any more, so it may. A STANDALONE draft has
    one entry more than the target; of MTP module `i` the newest `i` are left out, as they are made of drafts.
    """

    def __init__(self, engine, algorithm):
        self._engine = engine
        self._ahead = int(algorithm == "STANDALONE")
        self._provisional = algorithm == "MULTI_LAYER_EAGLE"
        self.shots = []  # (request, tokens known, target KV, draft KV)

    def __call__(self, batch, result):
        self._engine._forward_stream.synchronize()
        verdict = result.verdict.get()
        for i, req in enumerate(batch.reqs):
            if req.finished:
                continue  # its slots may have another owner
            emitted = verdict.predict[i, : verdict.accept_lens[i]].tolist()
            text = (*req.prompt_ids, *req.output_ids, *emitted)
            length = int(verdict.new_seq_lens[i])
            assert len(text) == length + 1
            target = self._read("target_pool", req.row, length)
            draft = self._read("draft_pool", req.row, length + self._ahead)
            if self._provisional:
                final = [max(length - i, 0) for i in range(len(draft))]
                draft = [(k[:n], v[:n]) for (k, v), n in zip(draft, final, strict=True)]
            self.shots.append((req.request_id, text, target, draft))

    def _read(self, pool, row, length):
        cache = self._engine.scheduler.cache
        slots = cache.row_table.slots[row, :length].long()
        assert len(set(slots.tolist())) == length
        assert int(slots.min()) >= cache.pages.page_size, "page 0 is padding"
        buffers = getattr(cache, pool)
        return [(k[slots], v[slots]) for k, v in zip(buffers.keys, buffers.values, strict=True)]


def assert_same(found, wanted):
    """KV of a prefix of what `wanted` holds."""
    assert len(found) == len(wanted)
    for found_layer, wanted_layer in zip(found, wanted, strict=True):
        for mine, theirs in zip(found_layer, wanted_layer, strict=True):
            scale = float(theirs.abs().max())
            torch.testing.assert_close(mine, theirs[: len(mine)], rtol=0, atol=TOLERANCE * scale)


def check_moves_bitwise(pool):
    """Compare each move with copies of what was there before. Gives a list that grows with real moves."""
    moved, move = [], pool.move_accepted

    def checked(slots, accept_index):
        before = [buffer.clone() for buffer in (*pool.keys, *pool.values)]
        move(slots, accept_index)
        windows = zip(slots.tolist(), accept_index.tolist(), strict=True)
        pairs = [(window[node], window[place]) for window, path in windows for place, node in enumerate(path)
                 if node >= 0 and node != place]  # fmt: skip
        moved.extend(pairs)
        for old, new in zip(before, (*pool.keys, *pool.values), strict=True):
            wanted = old.clone()
            for s, t in pairs:
                wanted[t] = old[s]
            assert torch.equal(wanted, new), "a move changed something else, or not what it should"

    pool.move_accepted = checked
    return moved


def run(open_engine, case, schedule, device, page_size=1, prompts=None):
    """(records, shots, moves) of a greedy run."""
    algorithm, drafter, shape = case
    target, draft = models(algorithm, drafter, device)
    engine = open_engine(target, algorithm, draft, shape, schedule=schedule, page_size=page_size)
    recorder = Recorder(engine)
    recorder.before = reader = PoolReader(engine, algorithm)
    moves = check_moves_bitwise(engine.scheduler.cache.target_pool)
    if prompts is None:
        kinds = {"NGRAM": "ngram", "FROZEN_KV_MTP": "frozen-kv"}
        prompts = setup_prompts(kinds.get(algorithm, "other"), target, 5)
    engine.generate(prompts, SamplingParams(max_new_tokens=40))
    return recorder.records, reader.shots, moves


def check_against_recomputation(case, shots, device):
    algorithm, drafter, _ = case
    target, draft = models(algorithm, drafter, device)
    longest = {request: max((s[1] for s in shots if s[0] == request), key=len) for request, *_ in shots}
    plain = tiny.oracle_of(target).model
    target_kv = {request: model_kv(plain, text) for request, text in longest.items()}
    for request, text, found, _ in shots:
        assert text == longest[request][: len(text)]
        assert_same(found, target_kv[request])
    if algorithm not in ORACLES:
        assert not any(found for *_, found in shots), "a drafter without KV of its own has some"
    else:
        draft_kv = {r: ORACLES[algorithm](target, draft).kv(text) for r, text in longest.items()}
        for request, _, _, found in shots:
            assert_same(found, draft_kv[request][: len(found)])  # a head may have more modules than steps


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2]}")
def test_vf03_dr04_committed_kv_equals_recomputation(open_engine, case, schedule, device):
    records, shots, moves = run(open_engine, case, schedule, device)
    check_against_recomputation(case, shots, device)
    steps, _, nodes = case[2]
    longest = nodes - 1 if case[0] == "NGRAM" else min(steps, nodes - 1)
    assert {r.accept_len for r in records} == set(range(1, longest + 2)), "some j never occurred"
    assert bool(moves) == (case[2] not in (CHAIN, LONG_CHAIN))


@pytest.mark.parametrize("case", HIDDEN, ids=lambda case: case[0])
def test_dr03_draft_kv_holds_the_right_hidden_states(open_engine, case, schedule, device):
    prompts = [tiny.random_prompt(70 + length, length) for length in (1, 2, 4, 9, 14)]
    _, shots, _ = run(open_engine, case, schedule, device, prompts=prompts)
    check_against_recomputation(case, shots, device)


def test_kv18_every_offset_from_a_page_boundary(open_engine, schedule, device):
    case = ("STANDALONE", "noisy", TREE_4)
    prompts = [tiny.random_prompt(60 + length, length) for length in range(10, 18)]
    records, shots, _ = run(open_engine, case, schedule, device, page_size=16, prompts=prompts)
    check_against_recomputation(case, shots, device)
    assert {r.seq_len % 16 for r in records} == set(range(16))
