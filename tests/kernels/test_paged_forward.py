"""A model's forwards are the same whether attention gathers its keys or follows the row table to them."""

import copy
import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from spec_v2 import SamplingParams
from spec_v2.kernels import paged_attention as front_door
from spec_v2.kernels.paged_attention import triton_kernel
from spec_v2.kernels.tree_structure import ancestor_mask
from spec_v2.mem_cache.kv_pool import KvPool, LayerGeometry, RowTable
from spec_v2.model_executor.forward_batch import (
    extend_forward_batch,
    reading_forward_batch,
    reads_in_place,
    window_forward_batch,
)
from spec_v2.model_executor.model_runner import ModelRunner
from tests import tiny_models as tiny
from tests.harness import TREE_2, Recorder, make_engine
from tests.kernels.paged_cases import mend_interpreter
from tests.kernels.support import DEVICE, INTERPRETED, seeded
from tests.test_model_families import build

FAMILIES = ["llama", "mistral", "gemma2", "gpt_oss"]  # plain; sliding windows; a softcap; sinks
PARENTS = [[-1, 0, 0, 1, 2, 4], [-1, 0, 1, 2, 3, -1]]  # a tree, and a chain with a padding node


@pytest.fixture(autouse=True)
def kernel_everywhere(monkeypatch):
    """On a CPU too, in the interpreter; no other kernel is concerned."""
    monkeypatch.setattr(front_door, "dispatch", SimpleNamespace(runs_triton=lambda tensor: True))
    if INTERPRETED:
        mend_interpreter(monkeypatch)


@dataclass
class Side:
    """One of two runs of the same forwards, on KV of its own."""

    runner: ModelRunner
    pool: KvPool
    table: RowTable
    outputs: list = field(default_factory=list)

    def forward(self, ids, positions, batch):
        out = self.runner.forward(ids.flatten(), positions.flatten(), batch)
        self.outputs += [out.logits, out.hidden_states]

    def extend(self, ids, rows, prefix_lens, extend_lens):
        spans = zip(prefix_lens, extend_lens, strict=True)
        positions = torch.cat([torch.arange(p, p + n, device=DEVICE) for p, n in spans])
        batch = extend_forward_batch(
            kv_pool=self.pool,
            row_table=self.table,
            rows=rows,
            prefix_lens=prefix_lens,
            extend_lens=extend_lens,
        )
        self.forward(ids[: len(positions)], positions, batch)

    def window(self, ids, rows, prefix_lens, positions, visible):
        places = prefix_lens[:, None] + torch.arange(positions.shape[1], device=DEVICE)
        queries = positions.shape[1] if visible is None else visible.shape[1]
        batch = window_forward_batch(
            kv_pool=self.pool,
            row_table=self.table,
            rows=rows,
            prefix_lens=prefix_lens,
            max_prefix_len=100,
            window_slots=self.table.at(rows, places),
            window_positions=positions,
            visible=visible,
        )
        self.forward(ids[:, :queries], positions[:, -queries:], batch)


def make_side(runner, paged):
    slots = torch.randperm(399, generator=seeded())[:240] + 1
    pool = KvPool(runner.geometry, 400, torch.float32, DEVICE)
    pool.fill_unused(math.nan, page_size=1)
    pool.paged_attention = paged
    table = RowTable(5, 60, DEVICE)
    table.slots[1:] = slots.view(4, 60).to(DEVICE, torch.int32)
    return Side(runner, pool, table)


def run(side):
    """A prefill in two chunks, a verify, two draft steps, a draft-extend."""
    ids = torch.randint(tiny.VOCAB, (2, 30), generator=seeded()).to(DEVICE)
    rows = torch.tensor([4, 2], device=DEVICE)
    side.extend(ids.flatten(), rows, (0, 0), (9, 17))
    side.extend(ids.flatten() + 1, rows, (9, 17), (4, 1))
    lens = torch.tensor([13, 18], device=DEVICE)
    visible = ancestor_mask(torch.tensor(PARENTS, device=DEVICE))
    side.window(ids, rows, lens, lens[:, None] + visible.sum(-1) - 1, visible)
    myself = torch.eye(2, dtype=torch.bool, device=DEVICE).expand(2, 2, 2)
    side.window(ids, rows, lens + 2, (lens + 2)[:, None].expand(-1, 2), myself)
    crossed = torch.cat([myself.flip(1), myself], 2)
    depths = torch.tensor([0, 0, 1, 1], device=DEVICE)
    side.window(ids, rows, lens + 2, (lens + 2)[:, None] + depths, crossed)
    side.window(ids, rows, lens, lens[:, None] + torch.arange(3, device=DEVICE), None)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_place_and_gathered_agree(family):
    runner = ModelRunner(build(family, 0).float().to(DEVICE), tiny.CONTEXT)
    with torch.no_grad():
        gathered, in_place = make_side(runner, paged=False), make_side(runner, paged=True)
        run(gathered)
        run(in_place)
    assert len(in_place.outputs) == 12
    for got, want in zip(in_place.outputs, gathered.outputs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-4)
    for got, want in zip(in_place.pool.values, gathered.pool.values, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-4, equal_nan=True)
    runner.detach()


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("num_queries", [1, 3])
def test_readers_see_the_same_in_place_and_gathered_and_write_nothing(num_queries, window):
    """A head without KV on the target's, with a request of one token, one of many, and the padding row."""
    target = copy.deepcopy(tiny.llama(torch.device("cpu"))).float().to(DEVICE)
    head = tiny.hidden_reader(target).float().to(DEVICE)
    for layer in head.decoder.layers:
        layer.self_attn.sliding_window = window
    runner, reader = ModelRunner(target, tiny.CONTEXT), ModelRunner(head, tiny.CONTEXT)
    ids = torch.randint(tiny.VOCAB, (30,), generator=seeded()).to(DEVICE)
    rows, lens = torch.tensor([4, 0, 2], device=DEVICE), torch.tensor([1, 0, 17], device=DEVICE)
    hidden = torch.randn(3 * num_queries, 32, generator=seeded()).to(DEVICE)
    outputs = []
    with torch.no_grad():
        for paged in (False, True):
            side = make_side(runner, paged)
            side.extend(ids, rows[[0, 2]], (0, 0), (1, 17))
            before = [buffer.clone() for buffer in (*side.pool.keys, *side.pool.values)]
            batch = reading_forward_batch(
                kv_pool=side.pool,
                row_table=side.table,
                rows=rows,
                prefix_lens=lens,
                max_prefix_len=40,
                num_queries=num_queries,
            )
            positions = (lens - 1).clamp(min=0).repeat_interleave(num_queries)
            out = reader.forward(ids[: 3 * num_queries], positions, batch, target_hidden=hidden)
            outputs.append((out.logits, out.hidden_states))
            for old, new in zip(before, (*side.pool.keys, *side.pool.values), strict=True):
                assert torch.equal(old.nan_to_num(7.0), new.nan_to_num(7.0))
    for gathered, in_place in zip(*outputs, strict=True):
        assert bool(gathered.isfinite().all())
        torch.testing.assert_close(in_place, gathered, rtol=1e-3, atol=2e-4)
    runner.detach()
    reader.detach()


def test_the_default_is_where_the_kernel_runs():
    geometry = (LayerGeometry(num_kv_heads=1, key_dim=4, value_dim=4),)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        runs = DEVICE.type == "cuda" and dtype != torch.float64
        assert reads_in_place(KvPool(geometry, 4, dtype, DEVICE)) == runs
    assert not reads_in_place(KvPool((), 4, torch.float32, DEVICE))


def test_an_engine_says_the_same(schedule, monkeypatch):
    """Greedy, in fp32, where the best token wins by far: same tokens, drafted and accepted in the same steps."""
    launches = []
    original = triton_kernel.paged_attention_triton
    monkeypatch.setattr(
        triton_kernel, "paged_attention_triton", lambda *args: launches.append(args[3]) or original(*args)
    )
    target = tiny.lively(tiny.random_llama, min_margin=1e-3)
    draft = copy.deepcopy(target)
    draft.lm_head = tiny.with_noise(target.lm_head, 0.3, seed=1)
    target, draft = (model.float().to(DEVICE) for model in (target, draft))
    histories = []
    for paged in (False, True):
        with make_engine(target, "STANDALONE", draft, TREE_2, schedule=schedule, debug=False) as engine:
            for pool in (engine.scheduler.cache.target_pool, engine.scheduler.cache.draft_pool):
                pool.paged_attention = paged
            recorder = Recorder(engine)
            done = engine.generate([(1, 2, 3), tiny.random_prompt(5, 11)], SamplingParams(max_new_tokens=6))
            steps = [(r.request, r.tokens, r.parents, r.accept_len) for r in recorder.records]
            histories.append(([d.output_ids for d in done], steps))
        assert bool(launches) == paged
    assert histories[0] == histories[1]
    assert len({step[3] for step in histories[0][1]}) > 1
    assert any(view.window is not None for view in launches)  # verify
    assert any(view.query_starts is not None for view in launches)  # prefill
    assert any(view.window is None and view.query_starts is None for view in launches)  # draft-extend
