"""Attention over paged KV: as close to float64 as torch's own attention, and the same bits every time."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import spec_v2.kernels.paged_attention as paged_attention_module
from spec_v2.kernels.paged_attention import PagedView, TreeWindow, paged_attention
from spec_v2.kernels.paged_attention.mask_bits import pack_visible_triton
from spec_v2.kernels.paged_attention.reference import pack_visible_reference
from spec_v2.kernels.paged_attention.tiling import Tiling, choose_splits, choose_tiling
from spec_v2.kernels.paged_attention.triton_kernel import paged_attention_triton
from tests.kernels.paged_cases import Case, exact, make_case, mend_interpreter, torch_attention, tree_window
from tests.kernels.support import DEVICE, INTERPRETED, assert_same, seeded, spread

SMALL = Tiling(16, 16, 4, 2)
FUSED = replace(SMALL, fused=True)
# The interpreter truncates where a GPU rounds to bf16, and multiplies the bits of bf16 as if they were integers.
DTYPES = [torch.float16, torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]
MODES = {
    "decode": ([0, 40, 33], 1, 1),
    "verify": ([0, 37, 70], 5, 5),
    "draft": ([2, 31, 64], 3, 9),
    "chain": ([0, 37, 70], 4, None),
    "prefill": ([0, 3, 17], [9, 1, 20], None),
}
OPTIONS = {
    "plain": {},
    "sliding": {"sliding_window": 3},
    "softcap": {"softcap": 4.0},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 19, "softcap": 4.0, "sinks": True},
}


def launches():
    """What compiles for sm_90: each tile in use, of models that people run, with every option at least once."""
    half = {"dtype": torch.bfloat16}
    device = torch.get_default_device()

    def call(queries, window, heads=32, kv_heads=8, dim=128, tiling=None, num_splits=1, half=half, **options):
        pools = [torch.zeros(64, kv_heads, dim, **half) for _ in range(2)]
        prefix_lens = torch.zeros(4, dtype=torch.long)
        view = PagedView(
            table=torch.zeros(4, 64, dtype=torch.int32),
            rows=torch.zeros(4, dtype=torch.long),
            prefix_lens=prefix_lens,
            max_prefix_len=4096,
            max_queries=queries,
            query_starts=torch.zeros(5, dtype=torch.long) if window is None else None,
            window=None if window is None else tree_window(seeded(), prefix_lens, queries, window, device),
        )
        query = torch.zeros(4 * queries, heads, dim, **half)
        arguments = {"scaling": 0.1, "tiling": tiling, "num_splits": num_splits} | options
        return lambda: paged_attention_triton(query, *pools, view, **arguments)

    small, gemma = {"heads": 9, "kv_heads": 3, "dim": 64}, {"heads": 16, "dim": 256, "sliding_window": 4096}
    fp32 = {"half": {"dtype": torch.float32}}
    fused = replace(choose_tiling(32, 128, 128, 2), fused=True)
    tree = tree_window(seeded(), torch.zeros(4, dtype=torch.long), 8, 70, device)
    masks = (tree.visible, tree.query_positions, tree.window_positions)
    return {
        "mask": lambda: pack_visible_triton(*masks),
        "mask of a sliding window": lambda: pack_visible_triton(*masks, 128),
        "decode": call(1, 1, num_splits=8),
        "verify": call(8, 8),
        "verify in splits": call(8, 8, num_splits=2),
        "verify in splits, merged at once": call(8, 8, num_splits=2, tiling=fused),
        "verify 16 nodes": call(16, 16),
        "verify 64 nodes": call(64, 64),
        "verify 100 nodes": call(100, 100),
        "prefill": call(512, None),
        "prefill in splits": call(512, None, num_splits=2),
        "small decode": call(1, 1, **small),
        "small prefill": call(512, None, **small),
        "sinks": call(4, 4, heads=64, dim=64, sliding_window=128, sinks=torch.zeros(64, **half)),
        "softcap": call(4, 9, softcap=50.0, **gemma),
        "softcap prefill": call(512, None, softcap=50.0, **gemma),
        "odd dimension": call(4, 4, dim=96),
        "wide dimension": call(4, 4, heads=8, kv_heads=1, dim=512),
        "fp32": call(8, 8, **fp32),
        "fp32 prefill": call(512, None, **fp32),
    }


def options_for(case, scaling=0.3, sinks=None, **options):
    heads = case.query.shape[1]
    if sinks:
        sinks = torch.linspace(-2, 3, heads).to(DEVICE, case.query.dtype)
    return {"scaling": scaling, "sinks": sinks, **options}


@pytest.fixture(autouse=True)
def interpreter_with_ranges(monkeypatch):
    if INTERPRETED:
        mend_interpreter(monkeypatch)


def attend(case, tiling=SMALL, num_splits=1, **options):
    case_options = options_for(case, **options)
    return paged_attention_triton(
        case.query, case.keys, case.values, case.view, tiling=tiling, num_splits=num_splits, **case_options
    )


def check(case, tiling=SMALL, num_splits=1, **options):
    """At most twice the error of torch's own attention; both against float64.

    In fp32 a few roundings more: how well torch does there depends on the processor.
    """
    got = attend(case, tiling, num_splits, **options)
    assert got.dtype == case.query.dtype
    given = options_for(case, **options)
    want = exact(case, **given)
    slack = 4 * torch.finfo(got.dtype).eps * rms(want) if got.dtype == torch.float32 else 0.0
    assert rms(got - want) <= 2 * rms(torch_attention(case, **given) - want) + slack
    return got


def rms(x):
    return float(x.square().mean().sqrt())


# --- what it computes ---


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_further_from_float64_than_torch(mode, options, dtype):
    prefixes, queries, window = MODES[mode]
    case = make_case(prefixes, queries, window=window, dtype=dtype)
    check(case, **OPTIONS[options])


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (4, 1), (8, 1), (20, 2)])
def test_any_group_size(heads, kv_heads):
    check(make_case([5, 20], 5, window=7, heads=heads, kv_heads=kv_heads))
    check(make_case([5, 20], [3, 7], heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize(
    ("key_dim", "value_dim"),
    [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (24, 40), (48, 16), (1, 3)],
)
def test_any_head_dimension(key_dim, value_dim):
    check(make_case([21], 2, window=4, key_dim=key_dim, value_dim=value_dim), scaling=key_dim**-0.5)


@pytest.mark.parametrize("block_n", [16, 32, 64, 128])
@pytest.mark.parametrize("window", [1, 31, 33, 63, 64, 65, 127, 130, 200])
def test_any_window_and_block(window, block_n):
    case = make_case([0, 50], min(window, 3), window=window)
    tiling = replace(SMALL, block_n=block_n)
    check(case, tiling)
    check(case, tiling, sliding_window=4)


@pytest.mark.parametrize(
    "tiling", [Tiling(16, 16, 4, 2), Tiling(32, 16, 4, 2), Tiling(64, 32, 4, 3), Tiling(128, 64, 8, 3)]
)
def test_any_tile(tiling):
    """More pairs than a tile has rows, and fewer; tiles that end in the middle of a token's heads."""
    check(make_case([30], [45], heads=6), tiling)
    check(make_case([30], 45, window=50, heads=6), tiling)


@pytest.mark.parametrize("sliding_window", [1, 2, 7, 16, 17, 1000])
def test_any_sliding_window(sliding_window):
    for mode in ("decode", "verify", "draft", "prefill"):
        prefixes, queries, window = MODES[mode]
        check(make_case(prefixes, queries, window=window), sliding_window=sliding_window)


@pytest.mark.parametrize("softcap", [0.01, 1.0, 50.0])
@pytest.mark.parametrize("scaling", [1e-3, 0.3, 3.0])
def test_softcap_of_small_and_large_logits(softcap, scaling):
    check(make_case([40], 3, window=3), softcap=softcap, scaling=scaling)


def test_a_query_that_sees_nothing_is_zero():
    case = make_case([0, 9], 2, window=3)
    case.view.window.visible[0] = False
    for options in ({}, {"sinks": True}):
        got = check_or_zero(case, **options)
        assert torch.equal(got[:2], torch.zeros_like(got[:2]))
        assert (got[2:] != 0).all()


def check_or_zero(case, **options):
    given = options_for(case, **options)
    got = attend(case, **options)
    torch.testing.assert_close(got, exact(case, **given).to(got.dtype), rtol=1e-5, atol=1e-6)
    return got


def test_nothing_but_sinks_far_above_and_below():
    case = make_case([4], 2, window=2)
    for sink in (-1e4, 1e4):
        sinks = torch.full((4,), sink, device=DEVICE)
        got = paged_attention_triton(
            case.query, case.keys, case.values, case.view, 0.3, sinks=sinks, tiling=SMALL
        )
        want = exact(case, scaling=0.3, sinks=sinks).float()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


# --- splits ---


@pytest.mark.parametrize("num_splits", [1, 2, 5, 19])
@pytest.mark.parametrize("tiling", [SMALL, FUSED], ids=["merged", "fused"])
@pytest.mark.parametrize("mode", ["verify", "prefill"])
def test_any_number_of_splits(num_splits, tiling, mode):
    """Requests of one block, of a few, and of many; all share one launch."""
    prefixes, queries, window = [0, 70, 650], 3, 5
    if mode == "prefill":
        queries, window = [3, 1, 2], None
    case = make_case(prefixes, queries, window=window, heads=2)
    for options in ({}, {"sinks": True, "sliding_window": 400}):
        check(case, tiling, num_splits, **options)


def test_splits_meet_again_in_every_layer():
    """The scratch of one view serves layer after layer: nothing of the last one is left in it."""
    case = make_case([150, 5], 2, window=2)
    for tiling in (SMALL, FUSED):
        first = attend(case, tiling, 2)
        doubled = replace(case, values=case.values * 2)
        assert_same(attend(doubled, tiling, 2), first * 2)
        assert_same(attend(case, tiling, 2), first)


# --- what must not matter ---


@pytest.mark.parametrize("tiling", [SMALL, FUSED], ids=["merged", "fused"])
@pytest.mark.parametrize("mode", ["verify", "prefill"])
def test_same_bits_every_time_and_in_any_company(mode, tiling):
    prefixes, lens, window = [70, 3, 150], [3, 3, 3], 5
    if mode == "prefill":
        lens, window = [3, 1, 6], None
    case = make_case(prefixes, lens if window is None else 3, window=window)
    whole = attend(case, tiling, 3)
    assert_same(attend(case, tiling, 3), whole)
    for i, queries in enumerate(lens):
        one, mine = slice(i, i + 1), slice(sum(lens[:i]), sum(lens[: i + 1]))
        alone = replace(case, query=case.query[mine], view=only_request(case.view, one, queries))
        assert_same(attend(alone, tiling, 3), whole[mine])


def only_request(view, one, queries):
    tree = view.window and TreeWindow(
        visible=view.window.visible[one],
        query_positions=view.window.query_positions[one],
        window_positions=view.window.window_positions[one],
    )
    return PagedView(
        table=view.table,
        rows=view.rows[one],
        prefix_lens=view.prefix_lens[one],
        max_prefix_len=view.max_prefix_len,
        max_queries=queries,
        window=tree,
    )


def test_bounds_decide_nothing_but_the_work():
    tight = make_case([0, 40, 33], 3, window=3)
    loose = replace(tight, view=replace(tight.view, max_prefix_len=100_000))
    assert_same(attend(loose), attend(tight))


@pytest.mark.parametrize("mode", ["verify", "prefill"])
def test_any_strides(mode):
    prefixes, queries, window = [70, 5], 3, 4
    if mode == "prefill":
        queries, window = [3, 6], None
    case = make_case(prefixes, queries, window=window, heads=6)
    want = attend(case, num_splits=2)
    view, tree = case.view, case.view.window
    strided = replace(
        view,
        table=torch.cat([view.table, view.table], 1)[:, : view.table.shape[1]],
        rows=spread(view.rows),
        prefix_lens=spread(view.prefix_lens),
        query_starts=None if view.query_starts is None else spread(view.query_starts),
        window=tree
        and TreeWindow(
            visible=spread(tree.visible),
            query_positions=spread(tree.query_positions),
            window_positions=spread(tree.window_positions),
        ),
    )
    both = torch.stack([case.keys, case.values], 1)  # slots with key and value side by side
    by_head = torch.stack([case.keys, case.values]).transpose(1, 2).contiguous().transpose(1, 2)
    for keys, values in ((both[:, 0], both[:, 1]), by_head):
        for query in (
            case.query,
            spread(case.query),
            case.query.transpose(0, 1).contiguous().transpose(0, 1),
        ):
            got = attend(Case(query, keys, values, strided), num_splits=2)
            assert_same(got, want)


def test_slots_far_beyond_int32():
    """A pool of more than 2**31 numbers; on a CPU, the few pages that hold these slots are all that exists of it."""
    case = make_case([20], 3, window=3, heads=2, kv_heads=1, key_dim=64, dtype=torch.float16)
    case.values = case.keys
    num_slots, want = 2**25 + 100, attend(case)
    far = (
        torch.from_numpy(np.zeros((num_slots, 1, 64), np.float16))
        if INTERPRETED
        else torch.zeros(num_slots, 1, 64, dtype=torch.float16, device=DEVICE)
    )
    shift = num_slots - len(case.keys)
    far[shift:] = case.keys
    view = replace(case.view, table=case.view.table + shift)
    assert_same(attend(Case(case.query, far, far, view)), want)


# --- the packed mask ---


@pytest.mark.parametrize("sliding_window", [None, 1, 5])
@pytest.mark.parametrize("win", [1, 63, 64, 65, 200])
def test_pack_visible_is_the_reference(win, sliding_window):
    prefixes = torch.tensor([0, 7, 70])
    tree = tree_window(seeded(), prefixes, min(win, 4), win)
    args = (tree.visible, tree.query_positions, tree.window_positions)
    want = pack_visible_reference(*args, sliding_window)
    assert_same(pack_visible_triton(*args, sliding_window), want)
    assert_same(pack_visible_triton(*(spread(x) for x in args), sliding_window), want)
    for node in range(win):  # and the reference is what it says
        bit = (want[:, :, node // 64] >> node % 64) & 1
        distance = tree.query_positions - tree.window_positions[:, node : node + 1]
        seen = tree.visible[:, :, node] & (distance < (sliding_window or 1 << 30))
        assert_same(bit.bool(), seen)


def test_the_mask_is_packed_once_per_sliding_window(monkeypatch):
    packed = []
    original = paged_attention_module.pack_visible
    monkeypatch.setattr(
        paged_attention_module, "pack_visible", lambda *args: packed.append(args[3]) or original(*args)
    )
    case = make_case([5], 3, window=3)
    for sliding_window in (None, 2, None, 2, 9):
        attend(case, sliding_window=sliding_window)
    assert packed == [None, 2, 9]


# --- the front door ---


def test_the_front_door_computes_the_same():
    case = make_case([5, 70], 3, window=5)
    got = paged_attention(case.query, case.keys, case.values, case.view, scaling=0.3, softcap=4.0)
    torch.testing.assert_close(got, exact(case, scaling=0.3, softcap=4.0).float(), rtol=1e-5, atol=1e-6)


def test_no_tokens_no_work():
    case = make_case([5], [1])
    view = replace(case.view, query_starts=case.view.query_starts * 0, max_queries=0)
    assert paged_attention_triton(case.query[:0], case.keys, case.values, view, 1.0).shape == (0, 4, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: replace(c, query=c.query[:, :3]), "heads=3"),
        (lambda c: replace(c, keys=c.keys.half()), "float16"),
        (lambda c: replace(c, keys=spread(c.keys)), "strides of keys"),
        (lambda c: replace(c, view=replace(c.view, table=spread(c.view.table))), "row table"),
        (lambda c: replace(c, query=c.query[:-1]), "max_queries=3"),
        (lambda c: replace(c, view=replace(c.view, query_starts=torch.tensor([0, 3, 6]))), "query_starts"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    case = change(make_case([5, 9], 3, window=3))
    with pytest.raises(ValueError, match=message):
        paged_attention(case.query, case.keys, case.values, case.view, scaling=1.0)


@pytest.mark.parametrize("options", [{"scaling": 0.0}, {"scaling": -1.0}, {"scaling": 1.0, "softcap": 0.0}])
def test_factors_are_positive(options):
    case = make_case([5], 1)
    with pytest.raises(ValueError, match="positive"):
        paged_attention(case.query, case.keys, case.values, case.view, **options)


# --- how work is cut ---


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("pairs", [1, 4, 16, 17, 32, 60, 64, 100, 4096])
def test_tiles_hold_the_pairs(pairs, dim, itemsize):
    tiling = choose_tiling(pairs, dim, dim, itemsize)
    assert tiling.block_m & (tiling.block_m - 1) == 0
    assert tiling.block_m >= 16
    assert tiling.block_m < 2 * max(pairs, 9)


def test_splits_keep_the_device_busy():
    assert choose_splits(tiles=8, max_keys=200, num_sms=132) == 1  # short: one program reads it all
    assert choose_splits(tiles=8, max_keys=1 << 20, num_sms=132) > 24  # batch 1: spread over the device
    assert choose_splits(tiles=256, max_keys=4096, num_sms=132) == 1  # 32 requests fill it already
    assert choose_splits(tiles=100_000, max_keys=4096, num_sms=132) == 1
    for tiles in range(8, 600):
        splits = choose_splits(tiles, 8192, 132)
        assert 1 <= splits <= 32
        waves = tiles * splits / 264
        assert waves / -(-tiles * splits // 264) > 0.6


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_a_recorded_launch_serves_other_lengths(fused):
    """Bounds are the recording's, lengths those of the day: from one key to all that the rows can hold."""
    case = make_case([3000, 2, 700], 4, window=6, heads=8, key_dim=64, dtype=torch.bfloat16)
    tiling = replace(choose_tiling(16, 64, 64, 2), fused=fused)
    attend(case, tiling, 5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(case, tiling, 5)
    for pool in (case.keys, case.values):
        pool.nan_to_num_(nan=1.0)  # rows change owners: all of them are used here
    for prefixes in ([3000, 2, 700], [0, 2999, 1], [5, 3000, 2990], [256, 255, 257]):
        case.view.rows.copy_(case.view.rows.roll(1))
        shift = torch.tensor(prefixes, device=DEVICE) - case.view.prefix_lens
        case.view.prefix_lens.add_(shift)
        case.view.window.window_positions.add_(shift[:, None])  # the queries' positions are a part of these
        for _ in range(3):
            graph.replay()
            assert_same(out, attend(case, tiling, 5))
        assert rms(out - exact(case, scaling=0.3)) < 0.01
