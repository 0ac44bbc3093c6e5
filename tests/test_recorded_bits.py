"""A replayed step leaves the bits that the same step leaves when it is called: tokens, trees, drafts, and all KV.

At the same padded size, for every batch size up to two more than the largest recorded one. On a GPU in bfloat16, the
engine's own kernels in CUDA graphs; without one the recordings are simulated.
"""

import pytest
import torch

from tests.recorded_runs import (
    CAPTURED,
    LARGEST,
    ROWS,
    SETUPS,
    SIZES,
    WIDE_TREE,
    Watched,
    lengths,
    memory_of,
    open_recorded,
    plain_tokens,
    prompts_for,
    same_bits,
)

TOKENS = 20


def left_behind(name, schedule, device, monkeypatch, replays):
    """(output ids, steps, memory, batch sizes, recordings) of batches of 1, 2 ... LARGEST."""
    with open_recorded(name, schedule, device, monkeypatch, replays=replays) as engine:
        watched, outputs = Watched(engine), []
        for count in range(1, LARGEST + 1):
            done = engine.generate(prompts_for(name, count), lengths(count, TOKENS))
            outputs.append([d.output_ids for d in done])
        recordings = getattr(engine._forward_stream.graphs, "num_captures", 0)
        return outputs, watched.steps, memory_of(engine), watched.sizes, recordings


@pytest.mark.parametrize("name", SETUPS)
def test_gr01_replayed_steps_leave_the_bits_of_called_ones(name, schedule, device, monkeypatch):
    called = left_behind(name, schedule, device, monkeypatch, replays=False)
    replayed = left_behind(name, schedule, device, monkeypatch, replays=True)
    assert called[4] == 0
    assert replayed[4] >= len(SIZES), "too few recordings: the comparison says nothing"
    wanted = {(n, next((s for s in SIZES if s >= n), n)) for n in range(1, LARGEST + 1)}
    assert called[3] == replayed[3] >= wanted
    assert called[0] == replayed[0]
    assert len(called[1]) == len(replayed[1])
    for step, pair in enumerate(zip(called[1], replayed[1], strict=True)):
        for place, (mine, theirs) in enumerate(zip(*pair, strict=True)):
            assert same_bits(mine, theirs), f"step {step}, tensor {place}"
    for what, mine in called[2].items():
        assert same_bits(mine, replayed[2][what]), what
    accepted = {int(n) for step in called[1] for n in step[1]}
    assert name == "plain" or max(accepted) > 1, "no draft was accepted"


@pytest.mark.parametrize("shape", [WIDE_TREE, (2, 4, 7), (5, 4, 4)], ids=str)
@pytest.mark.parametrize("name", ["eagle-tree", "eagle3-tree"])
def test_gr01_wide_trees_have_no_nan_and_give_the_plain_tokens(name, shape, schedule, device, monkeypatch):
    """Recorded draft-extends of topk 4 with num_draft_tokens != num_steps + 1 gave NaN elsewhere, from batch 2 on.

    In float32 on a GPU: bfloat16 would part from plain decoding at a tie, float64 takes no kernel.
    """
    steps, topk, nodes = shape
    assert nodes not in (steps + 1, topk * steps)
    dtype = torch.float32 if device.type == "cuda" else torch.float64
    counts = (2, 3, CAPTURED, CAPTURED + 1)
    with open_recorded(name, schedule, device, monkeypatch, dtype=dtype, shape=shape) as engine:
        outputs, watched = [], Watched(engine)
        for count in counts:
            prompts, params = prompts_for(name, count), lengths(count, TOKENS)
            outputs.append((prompts, params, [d.output_ids for d in engine.generate(prompts, params)]))
        memory = memory_of(engine)
        assert engine._forward_stream.graphs.num_captures > 0
    # KV is zero until it is written; the map's rows are NaN until they have an owner
    owned = {what: tensor[:CAPTURED] if what in ROWS else tensor for what, tensor in memory.items()}
    assert [what for what, tensor in owned.items() if not bool(torch.isfinite(tensor).all())] == []
    assert all(bool(torch.isfinite(tensor).all()) for step in watched.steps for tensor in step)
    for prompts, params, said in outputs:
        assert said == plain_tokens(name, device, dtype, prompts, params)
