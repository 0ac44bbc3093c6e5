"""Who owns which slot: pages and rows on the host, the row table and the pools behind them."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_v2.mem_cache import kv_cache_builder
from spec_v2.mem_cache.allocator import PageAllocator, RowAllocator
from spec_v2.mem_cache.kv_cache_builder import build_kv_cache
from spec_v2.mem_cache.kv_pool import KvPool, LayerGeometry, RowTable, bytes_per_slot
from spec_v2.mem_cache.state_pool import StateGeometry, StatePool, bytes_per_state

GEOMETRY = (LayerGeometry(2, 4, 4), LayerGeometry(1, 3, 5))
CPU = torch.device("cpu")

# -- pages -------------------------------------------------------------------------------------------------


def test_all_pages_but_the_padding_one_can_be_had_once():
    pages = PageAllocator(5, page_size=4)
    assert (pages.num_usable, pages.num_free) == (4, 4)
    assert sorted(pages.alloc(4)) == [1, 2, 3, 4]
    assert pages.num_free == 0
    with pytest.raises(RuntimeError, match="1 pages wanted, 0 free"):
        pages.alloc(1)


def test_a_failed_alloc_takes_nothing():
    pages = PageAllocator(5, 1)
    with pytest.raises(RuntimeError):
        pages.alloc(5)
    assert pages.num_free == 4
    assert pages.alloc(0) == []


def test_a_freed_page_may_be_handed_out_at_once():
    pages = PageAllocator(3, 1)
    first, second = pages.alloc(2)
    pages.free([second])
    assert pages.alloc(1) == [second]
    pages.free([first, second])
    assert pages.num_free == 2


@pytest.mark.parametrize("bad", [0, -1, 5, 2])
def test_a_page_nobody_owns_cannot_be_freed(bad):
    pages = PageAllocator(5, 1)
    pages.alloc(1)  # page 1
    with pytest.raises(RuntimeError, match=f"page {bad} is not owned"):
        pages.free([bad])


def test_freed_twice_is_noticed_within_one_call():
    pages = PageAllocator(5, 1)
    (page,) = pages.alloc(1)
    with pytest.raises(RuntimeError, match="freed twice"):
        pages.free([page, page])


@pytest.mark.parametrize(("tokens", "wanted"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_ceil_pages(tokens, wanted):
    assert PageAllocator(2, 4).ceil_pages(tokens) == wanted


def test_slots_of_pages_are_in_the_order_of_the_pages():
    assert PageAllocator(9, 3).slots([5, 2]) == [15, 16, 17, 6, 7, 8]


def test_a_pool_of_padding_alone_is_refused():
    with pytest.raises(ValueError, match="num_pages=1"):
        PageAllocator(1, 4)


COMMANDS = st.lists(st.tuples(st.sampled_from(["alloc", "free"]), st.integers(0, 6)), max_size=40)


@settings(max_examples=150, deadline=None)
@given(num_pages=st.integers(2, 12), page_size=st.sampled_from([1, 4, 16]), commands=COMMANDS)
def test_any_sequence_of_alloc_and_free_keeps_the_books(num_pages, page_size, commands):
    """No page has two owners, none is lost, page 0 never leaves, and a refused call changes nothing."""
    pages, owned = PageAllocator(num_pages, page_size), []
    for command, number in commands:
        free_before = pages.num_free
        if command == "alloc" and number > free_before:
            with pytest.raises(RuntimeError):
                pages.alloc(number)
            assert pages.num_free == free_before
        elif command == "alloc":
            owned.append(pages.alloc(number))
            assert len(owned[-1]) == number
        elif owned:
            pages.free(owned.pop(number % len(owned)))
        everyone = [page for some in owned for page in some]
        assert len(set(everyone)) == len(everyone)
        assert set(everyone) <= set(range(1, num_pages))
        assert pages.num_free + len(everyone) == pages.num_usable == num_pages - 1
        slots = pages.slots(everyone)
        assert len(set(slots)) == len(everyone) * page_size
        assert all(page_size <= slot < num_pages * page_size for slot in slots)
    for some in owned:
        pages.free(some)
    assert sorted(pages.alloc(pages.num_usable)) == list(range(1, num_pages))


# -- rows --------------------------------------------------------------------------------------------------


def test_rows_are_handed_out_once_and_row_0_never():
    rows = RowAllocator(4)
    assert sorted(rows.alloc() for _ in range(3)) == [1, 2, 3]
    assert rows.num_free == 0
    with pytest.raises(IndexError):
        rows.alloc()
    rows.free(2)
    assert (rows.num_free, rows.alloc()) == (1, 2)


@pytest.mark.parametrize("bad", [0, -1, 4, 3])
def test_a_row_nobody_owns_cannot_be_freed(bad):
    rows = RowAllocator(4)
    rows.alloc()  # row 1
    with pytest.raises(RuntimeError, match=f"row {bad} is not owned"):
        rows.free(bad)


def table(num_rows=4, width=6, on_stream=None):
    return RowTable(num_rows, width, CPU, on_stream)


def test_the_row_table_says_what_was_written():
    rows = table()
    rows.write(torch.tensor([1, 1, 3]), torch.tensor([0, 2, 5]), torch.tensor([7, 8, 9]))
    assert rows.slots[1].tolist() == [7, 0, 8, 0, 0, 0]
    assert rows.slots[3].tolist() == [0, 0, 0, 0, 0, 9]
    assert not rows.slots[[0, 2]].any()
    assert rows.at(torch.tensor([3, 1]), torch.tensor([[5, 0], [2, 0]])).tolist() == [[9, 0], [8, 7]]
    assert rows.prefix(torch.tensor([1]), 3).tolist() == [[7, 0, 8]]


def test_positions_past_a_row_stay_inside_it():
    rows = table()
    rows.write(torch.tensor([1, 2]), torch.tensor([5, 0]), torch.tensor([7, 8]))
    assert rows.at(torch.tensor([1]), torch.tensor([[5, 6, 100]])).tolist() == [[7, 7, 7]]
    assert rows.prefix(torch.tensor([1]), 100).shape == (1, rows.width)


def test_slots_are_indices_whatever_the_table_stores():
    assert table().at(torch.tensor([1]), torch.tensor([[0]])).dtype == torch.long
    assert table().prefix(torch.tensor([1]), 2).dtype == torch.long


def test_only_the_stream_may_write_a_row():
    on_stream = False
    rows, one = table(on_stream=lambda: on_stream), torch.tensor([1])
    with pytest.raises(RuntimeError, match="off the forward stream"):
        rows.write(one, one, one)
    assert not rows.slots.any()
    on_stream = True
    rows.write(one, one, one)
    assert rows.slots[1, 1] == 1


# -- pools -------------------------------------------------------------------------------------------------


def filled_pool(num_slots=10):
    pool = KvPool(GEOMETRY, num_slots, torch.float64, CPU)
    for layer, geometry in enumerate(GEOMETRY):
        heads, slots = geometry.num_kv_heads, torch.arange(num_slots)
        number = slots[:, None, None] + 100.0 * layer
        key = (number + torch.zeros(num_slots, heads, geometry.key_dim)).double()
        value = (-number + torch.zeros(num_slots, heads, geometry.value_dim)).double()
        pool.write(layer, slots, key, value)
    return pool


def contents(pool, layer):
    keys, values = pool.keys[layer], pool.values[layer]
    assert (keys == keys[:, :1, :1]).all()
    assert (values == -keys[:, :1, :1]).all()
    return [int(slot) - 100 * layer for slot in keys[:, 0, 0]]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([5, 6, 7], [4, 5, 6]),
        ([4, 5, 6], [5, 6, 7]),
        ([2, 3], [3, 2]),
        ([1, 9, 9], [2, 3, 4]),
        ([3], [3]),
        ([], []),
    ],
    ids=["down", "up", "swap", "one to many", "itself", "nothing"],
)
def test_moves_behave_as_if_all_were_read_before_any_is_written(source, target):
    pool = filled_pool()
    wanted = list(range(10))
    for s, t in zip(source, target, strict=True):
        wanted[t] = s
    pool.move(torch.tensor(source, dtype=torch.long), torch.tensor(target, dtype=torch.long))
    for layer in range(len(GEOMETRY)):
        assert contents(pool, layer) == wanted


def test_padding_slots_of_a_move_may_repeat():
    pool = filled_pool()
    pool.move(torch.tensor([7, 0, 0, 0]), torch.tensor([2, 0, 0, 0]))
    assert contents(pool, 0) == [0, 1, 7, 3, 4, 5, 6, 7, 8, 9]


def test_fill_unused_spares_the_padding_page():
    pool = KvPool(GEOMETRY, 12, torch.float64, CPU)
    pool.fill_unused(float("nan"), page_size=4)
    for buffer in (*pool.keys, *pool.values):
        assert not buffer[:4].any()
        assert buffer[4:].isnan().all()


def test_bytes_per_slot_counts_what_a_pool_holds():
    pool = KvPool(GEOMETRY, 10, torch.float64, CPU)
    held = sum(buffer.numel() * buffer.itemsize for buffer in (*pool.keys, *pool.values))
    assert bytes_per_slot(GEOMETRY, torch.float64) * 10 == held


# -- the builder -------------------------------------------------------------------------------------------


def build(**changes):
    wanted = {
        "target_geometry": GEOMETRY,
        "draft_geometry": (),
        "dtype": torch.float64,
        "device": CPU,
        "page_size": 4,
        "max_running_requests": 3,
        "context_length": 20,
        "slots_per_step": 6,
    }
    return build_kv_cache(**wanted | changes)


def test_what_is_built_does_not_depend_on_the_schedule():
    assert "enable_overlap" not in inspect.signature(build_kv_cache).parameters
    assert not [name for name in inspect.signature(build_kv_cache).parameters if "overlap" in name]


def test_sizes_of_a_cache():
    cache = build(max_total_tokens=42)
    assert cache.pages.num_usable == 10  # whole pages only
    assert cache.target_pool.num_slots == cache.draft_pool.num_slots == 44  # and the padding page
    assert (cache.rows.num_rows, cache.rows.num_free) == (4, 3)
    assert cache.row_table.slots.shape == (4, 20 + 2 * 6 + 4)
    assert not cache.draft_pool.keys


def test_target_and_draft_share_slot_numbers():
    cache = build(draft_geometry=GEOMETRY[:1], max_total_tokens=16)
    assert cache.draft_pool.keys[0].shape[0] == cache.target_pool.keys[0].shape[0] == 20


def test_without_a_size_every_row_can_be_full():
    cache = build()
    assert cache.pages.num_usable * 4 == 3 * cache.row_table.width


def test_without_a_size_the_budget_is_kept(monkeypatch):
    per_slot = bytes_per_slot(GEOMETRY, torch.float64)
    monkeypatch.setattr(kv_cache_builder, "_budget_bytes", lambda device, fraction: 17 * per_slot)
    assert build().pages.num_usable == 4


def test_cf11_the_logits_of_the_largest_step_are_left_room(monkeypatch):
    per_slot = bytes_per_slot(GEOMETRY, torch.float64)
    monkeypatch.setattr(kv_cache_builder, "_budget_bytes", lambda device, fraction: 17 * per_slot)
    assert build(mem_fraction=0.5, workspace_bytes=5 * per_slot).pages.num_usable == 3
    with pytest.raises(ValueError, match=r"max_running_requests.*--speculative-num-draft-tokens"):
        build(mem_fraction=0.5, workspace_bytes=17 * per_slot)


def test_kv21_more_slots_than_32_bits_name_are_refused():
    with pytest.raises(ValueError, match=r"max_total_tokens=2147483648: .*--max-total-tokens"):
        build(max_total_tokens=2**31)


STATES = {0: StateGeometry(10, 4, 2, 3, 5), 2: StateGeometry(6, 4)}


def test_states_take_their_room_before_kv(monkeypatch):
    per_state, per_slot = bytes_per_state(STATES, torch.float64), bytes_per_slot(GEOMETRY, torch.float64)
    assert per_state == (10 * 3 + 6 * 3 + 2 * 3 * 5) * 8
    room = (
        4 * per_state + 4 * 3 * per_state + 17 * per_slot
    )  # rows; a quarter of the rest is 3 snapshots and more
    monkeypatch.setattr(kv_cache_builder, "_budget_bytes", lambda device, fraction: room)
    cache = build(target_states=STATES, prefix_cache=True)
    assert cache.snapshots.num_free in (3, 4)
    assert cache.target_states.num_rows == 4 + cache.snapshots.num_free
    assert [buffer.shape[1:] for buffer in cache.target_states.buffers()] == [(3, 10), (3, 6), (2, 3, 5)]
    assert cache.has_states
    left = room - cache.target_states.num_rows * per_state
    assert cache.pages.num_usable == min(left // per_slot, 3 * cache.row_table.width) // 4
    assert build(target_states=STATES).snapshots.num_free == 0
    assert not build().has_states


def test_states_that_do_not_fit_are_refused(monkeypatch):
    budget = 4 * bytes_per_state(STATES, torch.float64)
    monkeypatch.setattr(kv_cache_builder, "_budget_bytes", lambda device, fraction: budget)
    with pytest.raises(
        ValueError, match=r"max_running_requests=3: .*--max-running-requests .*--mem-fraction"
    ):
        build(draft_states=STATES)
    build(draft_states=STATES, max_running_requests=2, max_total_tokens=8)


def test_matrices_of_a_half_precision_model_are_in_fp32():
    pool = StatePool(STATES, 3, torch.bfloat16, CPU)
    assert {str(b.dtype) for b in pool.windows.values()} == {"torch.bfloat16"}
    assert pool.states[0].dtype == torch.float32
    assert bytes_per_state(STATES, torch.bfloat16) == (10 * 3 + 6 * 3) * 2 + 2 * 3 * 5 * 4
    assert pool
    assert not StatePool({}, 3, torch.bfloat16, CPU)


@pytest.mark.parametrize("slot", [-1, 5])
def test_kv21_debug_a_slot_outside_of_the_pool_is_caught_where_it_is_stored(slot):
    pool = KvPool(GEOMETRY, 5, torch.float64, CPU)
    pool.debug = True
    key, value = torch.ones(2, 2, 4, dtype=torch.float64), torch.ones(2, 2, 4, dtype=torch.float64)
    with pytest.raises(IndexError, match=rf"slots \[1, {slot}\]: the pool has slots 0 to 4"):
        pool.write(0, torch.tensor([1, slot]), key, value)
    pool.write(0, torch.tensor([1, 4]), key, value)


def test_a_pool_that_holds_no_page_is_refused():
    with pytest.raises(ValueError, match=r"max_total_tokens=3 .*page_size=4"):
        build(max_total_tokens=3)
