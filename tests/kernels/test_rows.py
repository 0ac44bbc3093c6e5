"""Rows and slots: the row table, the FutureMap's columns, KV written and moved. Bit for bit the references."""

import pytest
import torch

from spec_v2.kernels.future_rows.reference import (
    gather_rows_reference,
    publish_rows_reference,
    stash_rows_reference,
)
from spec_v2.kernels.future_rows.triton_kernel import (
    gather_rows_triton,
    publish_rows_triton,
    stash_rows_triton,
)
from spec_v2.kernels.move_kv.reference import SlotBuffers, move_accepted_kv_reference
from spec_v2.kernels.move_kv.triton_kernel import move_accepted_kv_triton
from spec_v2.kernels.row_slots.reference import (
    extend_inputs_reference,
    place_window_reference,
    slots_at_reference,
    write_slots_reference,
)
from spec_v2.kernels.row_slots.triton_kernel import (
    extend_inputs_triton,
    place_window_triton,
    slots_at_triton,
    write_slots_triton,
)
from spec_v2.kernels.write_kv.reference import write_kv_reference
from spec_v2.kernels.write_kv.triton_kernel import write_kv_triton
from spec_v2.types import NextDraft
from tests.kernels.support import DEVICE, assert_same, seeded, spread


def launches():
    """What compiles for sm_90: the shapes of a Llama-3.1-8B decode step."""
    ids, table = torch.zeros(4, dtype=torch.long), torch.zeros(5, 128, dtype=torch.int32)
    path, rows = torch.zeros(4, 4, dtype=torch.long), torch.zeros(9, dtype=torch.long)
    key = torch.zeros(4, 8, 128, dtype=torch.bfloat16)
    pool = SlotBuffers.of(tuple(torch.zeros(9, 8, 128, dtype=torch.bfloat16) for _ in range(4)))
    drafts, batch = (
        NextDraft(
            topk_p=torch.zeros(n, 4),
            topk_index=torch.zeros(n, 4, dtype=torch.long),
            hidden_states=torch.zeros(n, 4096, dtype=torch.bfloat16),
            draft_probs=torch.zeros(n, 0),
        )
        for n in (9, 4)
    )
    history = torch.zeros(9, 20, dtype=torch.long)
    return {
        "row table": lambda: (write_slots_triton(table, ids, ids, ids), slots_at_triton(table, ids, path)),
        "window": lambda: (
            place_window_triton(table, ids, ids, 12, 4),
            extend_inputs_triton(table, ids, ids, path, ids),
        ),
        "write": lambda: write_kv_triton(*pool.tensors[:2], ids, key, key),
        "move": lambda: move_accepted_kv_triton(pool, path, path),
        "gather": lambda: gather_rows_triton(ids, rows, rows, drafts),
        "publish": lambda: publish_rows_triton(ids, ids, rows),
        "stash": lambda: stash_rows_triton(ids, path, ids, ids, batch, rows, drafts, history),
    }


# -- the row table ---------------------------------------------------------------------------------------------


def make_table(gen, rows=6, width=40):
    return torch.randint(0, 10**9, (rows, width), generator=gen, dtype=torch.int32)


@pytest.mark.parametrize("slot_type", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("t", [0, 1, 300])
def test_slots_are_written_where_they_belong(t, slot_type):
    gen = seeded(t)
    want = make_table(gen, 20)
    places = torch.randperm(20 * 40, generator=gen)[:t]
    slots = torch.randint(0, 2**31 - 1, (t,), generator=gen).to(slot_type)
    args = (places // 40, places % 40, slots)
    got = want.to(DEVICE, copy=True)
    write_slots_triton(got, *map(spread, args))
    write_slots_reference(want, *args)
    assert_same(got, want)


def test_slots_are_read_at_positions_and_at_the_end_of_a_row():
    gen = seeded()
    table, rows = make_table(gen), torch.tensor([5, 0, 2])
    positions = torch.randint(0, 60, (3, 5), generator=gen)
    assert_same(
        slots_at_triton(table.to(DEVICE), spread(rows), spread(positions)),
        slots_at_reference(table, rows, positions),
    )


@pytest.mark.parametrize(("length", "per_position"), [(1, 1), (5, 1), (6, 3), (12, 4)])
def test_a_window_is_the_reference(length, per_position):
    table, rows, starts = make_table(seeded()), torch.tensor([5, 1, 3]), torch.tensor([0, 7, 38])
    got = place_window_triton(table.to(DEVICE), spread(rows), spread(starts), length, per_position)
    assert_same(got, place_window_reference(table, rows, starts, length, per_position))


@pytest.mark.parametrize("w", [1, 4, 5])
def test_what_a_draft_model_reads_of_a_verdict(w):
    gen = seeded(w)
    table, rows, starts = make_table(gen), torch.tensor([5, 1, 3]), torch.tensor([0, 7, 38])
    accept_lens = torch.randint(1, w + 1, (3,), generator=gen)
    predict = torch.where(
        torch.arange(w) < accept_lens[:, None], torch.randint(0, 99, (3, w), generator=gen), -1
    )
    got = extend_inputs_triton(table.to(DEVICE), *map(spread, (rows, starts, predict, accept_lens)))
    want = extend_inputs_reference(table, rows, starts, predict, accept_lens)
    for name in ("input_ids", "positions", "slots", "newest"):
        assert_same(getattr(got, name), getattr(want, name))


# -- KV --------------------------------------------------------------------------------------------------------


def make_pool(gen, shapes, num_slots, dtype):
    return [torch.randn(num_slots, *shape, generator=gen).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("slot_type", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("t", "heads", "key_dim", "value_dim"), [(1, 1, 1, 3), (5, 3, 6, 4), (2, 3, 400, 64), (0, 2, 4, 4)]
)
def test_kv_is_written_to_its_slots(t, heads, key_dim, value_dim, slot_type, dtype):
    gen = seeded(t)
    want = make_pool(gen, [(heads, key_dim), (heads, value_dim)], 9, dtype)
    got = [x.to(DEVICE, copy=True) for x in want]
    slots = torch.randperm(9, generator=gen)[:t].to(slot_type)
    key, value = (torch.randn(t, heads, d, generator=gen).to(dtype) for d in (key_dim, value_dim))
    write_kv_triton(*got, spread(slots), spread(key), spread(value))
    write_kv_reference(*want, slots, key, value)
    assert_same(got, want)


def test_kv_of_another_dtype_is_refused():
    pool, key = torch.zeros(3, 1, 2, device=DEVICE), torch.zeros(1, 1, 2, device=DEVICE).double()
    with pytest.raises(ValueError, match=r"key torch.float64.*keeps torch.float32"):
        write_kv_triton(pool, pool, torch.zeros(1, device=DEVICE).long(), key, key)


def random_paths(gen, b, n, w):
    """Rising node numbers from the root on, -1 behind the path; the first one nothing, the second one all in place."""
    index = torch.full((b, w), -1)
    for i in range(b):
        length = 1 if i == 0 else int(torch.randint(1, w + 1, (1,), generator=gen))
        nodes = torch.randperm(n - 1, generator=gen)[: length - 1].sort().values + 1
        index[i, :length] = torch.cat([torch.zeros(1, dtype=torch.long), nodes])
    index[1] = torch.arange(w)
    return index


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("n", "w"), [(2, 2), (6, 4), (5, 5), (13, 6)])
def test_vf03_accepted_kv_moves_to_the_front(n, w, dtype):
    """Sources and targets overlap; layers differ in shape; one slot has an odd number of elements."""
    gen, b = seeded(n), 5
    want = make_pool(gen, [(2, 6), (2, 6), (1, 33), (2, 4), (1, 1)], 80, dtype)
    got = SlotBuffers.of(tuple(x.to(DEVICE, copy=True) for x in want))
    slots = torch.randperm(79, generator=gen)[: b * n].view(b, n) + 1
    index = random_paths(gen, b, n, w)
    for slot_type in (torch.int32, torch.int64):
        move_accepted_kv_triton(got, spread(slots.to(slot_type)), spread(index))
        move_accepted_kv_reference(SlotBuffers.of(tuple(want)), slots, index)
        assert_same(got.tensors, tuple(want))


def test_a_pool_with_gaps_is_refused():
    with pytest.raises(ValueError, match="contiguous"):
        SlotBuffers.of((torch.zeros(4, 4).t(),))
    with pytest.raises(ValueError, match="same number of slots"):
        SlotBuffers.of((torch.zeros(4, 4), torch.zeros(3, 4)))


# -- FutureMap -------------------------------------------------------------------------------------------------


def make_drafts(gen, rows, k, h, dv, dtype=torch.float32):
    return NextDraft(
        topk_p=torch.rand(rows, k, generator=gen),
        topk_index=torch.randint(0, 2**40, (rows, k), generator=gen),
        hidden_states=torch.randn(rows, h, generator=gen).to(dtype),
        draft_probs=torch.rand(rows, dv, generator=gen),
    )


NAMES = ("topk_p", "topk_index", "hidden_states", "draft_probs")
WIDTHS = [(1, 3, 0), (4, 1500, 0), (3, 5, 1100), (0, 0, 0)]


def on_device(drafts, place):
    return NextDraft(**{name: place(getattr(drafts, name)) for name in NAMES})


@pytest.mark.parametrize(("k", "h", "dv"), WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_rows_are_gathered(k, h, dv, dtype):
    gen = seeded(h)
    lens, bonus = torch.randint(0, 2**40, (2, 7), generator=gen)
    drafts, rows = make_drafts(gen, 7, k, h, dv, dtype), torch.tensor([6, 0, 3, 0])
    got = gather_rows_triton(
        spread(rows), lens.to(DEVICE), bonus.to(DEVICE), on_device(drafts, lambda x: x.to(DEVICE))
    )
    want = gather_rows_reference(rows, lens, bonus, drafts)
    assert_same(got[:2], want[:2])
    for name in NAMES:
        assert_same(getattr(got[2], name), getattr(want[2], name))


@pytest.mark.parametrize("b", [0, 3, 150])
def test_lengths_are_published(b):
    """Padding rows may be many, and keep length 0."""
    want = torch.arange(200) * 2**33
    rows = torch.randperm(199, generator=seeded())[:b] + 1
    rows[1::3] = 0
    lens = torch.arange(b) + 2**40
    got = want.to(DEVICE, copy=True)
    publish_rows_triton(spread(rows), spread(lens), got)
    publish_rows_reference(rows, lens, want)
    assert_same(got, want)


@pytest.mark.parametrize("width", [0, 9, 60])
@pytest.mark.parametrize(("k", "h", "dv"), WIDTHS)
def test_rows_are_stashed(k, h, dv, width):
    """Nothing but the given rows changes; a history that ends keeps its tokens inside."""
    gen, w = seeded(h), 4
    rows, accept_lens = torch.tensor([6, 2, 3]), torch.tensor([1, 4, 0])
    new_seq_lens = torch.tensor([3, 10, 8])
    predict = torch.where(
        torch.arange(w) < accept_lens[:, None], torch.randint(0, 99, (3, w), generator=gen), -1
    )
    batch, table = make_drafts(gen, 3, k, h, dv), make_drafts(gen, 7, k, h, dv)
    bonus, history = torch.arange(7), torch.arange(7 * width).view(7, width)
    own = on_device(table, lambda x: x.to(DEVICE, copy=True))
    own_bonus, own_history = bonus.to(DEVICE, copy=True), history.to(DEVICE, copy=True)
    step = (rows, predict, accept_lens, new_seq_lens)
    stash_rows_triton(*map(spread, step), on_device(batch, spread), own_bonus, own, own_history)
    stash_rows_reference(*step, batch, bonus, table, history)
    assert_same((own_bonus, own_history), (bonus, history))
    for name in NAMES:
        assert_same(getattr(own, name), getattr(table, name))


# -- what is refused under SPEC_V2_DEBUG_KERNELS ---------------------------------------------------------------

BAD = {
    "rows: not a row": lambda: slots_at_triton(*ints([[0, 1]], [1], [[0]])),
    "positions: negative": lambda: slots_at_triton(*ints([[0, 1]], [0], [[-1]])),
    "positions: outside": lambda: write_slots_triton(*ints([[0, 1]], [0], [2], [5])),
    "slots: outside of what the table": lambda: write_slots_triton(*ints([[0, 1]], [0], [0], [-1])),
    "slots: outside of the pool": lambda: write_kv_triton(*floats(3, 3), *ints([3]), *floats(1, 1)),
    "slots: source": lambda: move_accepted_kv_triton(SlotBuffers.of(floats(3)), *ints([[0, 1, 7]], [[0, 2]])),
    "slots: target": lambda: move_accepted_kv_triton(
        SlotBuffers.of(floats(3)), *ints([[0, -4, 1]], [[0, 2]])
    ),
    "accept_index": lambda: move_accepted_kv_triton(SlotBuffers.of(floats(3)), *ints([[0, 1]], [[0, 2]])),
}


def ints(*values):
    return tuple(torch.tensor(v, device=DEVICE) for v in values)


def floats(*sizes):
    return tuple(torch.zeros(n, 1, 4, device=DEVICE) for n in sizes)


@pytest.mark.usefixtures("checked_kernels")
@pytest.mark.parametrize("message", BAD)
def test_kv21_a_slot_outside_of_the_pool_stops_where_it_is_used(message):
    with pytest.raises(Exception, match=message):
        BAD[message]()


@pytest.mark.usefixtures("checked_kernels")
def test_what_is_inside_passes_the_checks():
    test_vf03_accepted_kv_moves_to_the_front(6, 4, torch.float32)
    test_rows_are_stashed(3, 5, 0, 60)
    test_rows_are_gathered(3, 5, 0, torch.float64)
    test_slots_are_written_where_they_belong(300, torch.int64)
    test_what_a_draft_model_reads_of_a_verdict(4)
    test_kv_is_written_to_its_slots(5, 3, 6, 4, torch.int32, torch.float32)
