"""FROZEN_KV_MTP: the drafter owns no KV and leaves the target's as it is, at every batch size and depth."""

import pytest
import torch

from spec_v2 import SamplingParams
from spec_v2.mem_cache.kv_pool import LayerGeometry
from spec_v2.speculative.frozen_kv_mtp_worker_v2 import check_geometry
from tests import tiny_models as tiny
from tests.cells import models
from tests.draft_oracles import FrozenKvOracle, grow
from tests.harness import CHAIN, TREE_2, Recorder, check_identity


@pytest.mark.parametrize("steps", range(1, 7))
def test_dr15_every_batch_size_at_every_depth(open_engine, steps, schedule, device):
    """Batches as large as a step has tokens are among them, and the drafts are what the head says."""
    target, draft = models("FROZEN_KV_MTP", "random", device)
    shape = (steps, 1, steps + 1)
    oracle = FrozenKvOracle(target, draft)
    engine = open_engine(target, "FROZEN_KV_MTP", draft, shape, schedule=schedule, max_running_requests=8)
    for batch in range(1, 9):
        prompts = [tiny.random_prompt(10 * batch + i, 1 + (3 * i) % 7) for i in range(batch)]
        records = check_identity(engine, prompts, [SamplingParams(max_new_tokens=6)] * batch)
        record = max(records, key=lambda r: r.seq_len)
        wanted = grow(lambda path, text=record.text: oracle.next_logits(text, path), shape)
        assert tuple(record.tokens[1:]) == max(wanted, key=len)


@pytest.mark.parametrize("shape", [CHAIN, TREE_2], ids=str)
def test_drafting_writes_no_kv(open_engine, shape, schedule, device):
    target, draft = models("FROZEN_KV_MTP", "noisy", device)
    engine = open_engine(target, "FROZEN_KV_MTP", draft, shape, schedule=schedule)
    cache, stream = engine.scheduler.cache, engine._forward_stream
    assert cache.draft_pool.keys == []
    assert cache.prefix.lookahead == 0
    drafts, launch = [], stream.launch

    def watched(fn, /, *args, label=""):
        def run(*values):
            pool = cache.target_pool
            before = [buffer.clone() for buffer in (*pool.keys, *pool.values)]
            value = fn(*values)
            same = all(map(torch.equal, before, (*pool.keys, *pool.values)))
            drafts.append((label, same))
            return value

        return launch(run if label in ("draft", "draft_extend", "verify") else fn, *args, label=label)

    stream.launch = watched
    engine.generate([tiny.marked_prompt(3, 7)], SamplingParams(max_new_tokens=12))
    assert {label for label, same in drafts if same} == {"draft", "draft_extend"}
    assert {label for label, same in drafts if not same} == {"verify"}, "the check notices a write"


@pytest.mark.parametrize("layer", [0, 1])
def test_each_layer_reads_the_targets_layer_that_its_config_names(open_engine, layer, device):
    target = tiny.llama(device)
    trees = []
    for named in (layer, 1 - layer):
        head = tiny.hidden_reader(target, layers=(named,))
        assert head.target_layers == (named,)
        recorder = Recorder(engine := open_engine(target, "FROZEN_KV_MTP", head, CHAIN))
        engine.generate(tiny.random_prompt(4, 9), SamplingParams(max_new_tokens=8))
        oracle = FrozenKvOracle(target, head)
        for record in recorder.records[:3]:
            wanted = grow(lambda path, text=record.text, o=oracle: o.next_logits(text, path), CHAIN)
            assert tuple(record.tokens[1:]) == max(wanted, key=len)
        trees.append(recorder.records[0].scores)
    assert trees[0] != trees[1]


def test_kv_of_another_shape_than_the_head_reads_is_refused(device):
    head = tiny.hidden_reader(tiny.llama(device))
    check_geometry(head, (LayerGeometry(2, 8, 8), LayerGeometry(2, 8, 8)))
    for kept in (LayerGeometry(2, 8, 16), LayerGeometry(2, 16, 8), LayerGeometry(3, 8, 8)):
        with pytest.raises(ValueError, match=r"speculative_draft_model_path.*reads layer 1"):
            check_geometry(head, (LayerGeometry(2, 8, 8), kept))
