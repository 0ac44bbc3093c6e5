"""The prefix cache: who owns a page, what a match may return, and that sharing changes no token and no draft."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_v2 import SamplingParams
from spec_v2.mem_cache.allocator import PageAllocator, RowAllocator
from spec_v2.mem_cache.prefix_cache import PrefixCache
from spec_v2.server_args import ServerArgs
from spec_v2.spec_info import SpeculativeAlgorithm
from spec_v2.speculative_hook import resolve_speculative
from tests.cells import SETUPS, open_setup, setup_prompts
from tests.harness import Recorder, check_identity, sampled
from tests.surface import assert_at_rest
from tests.tiny_models import oracle_of, random_prompt


def new_cache(num_pages=20, page_size=2, lookahead=0):
    return PrefixCache(PageAllocator(num_pages + 1, page_size), lookahead=lookahead)


def give(cache, tokens):
    """A request that computed `tokens` leaves them; returns the pages that the tree took."""
    path = cache.match(tokens)
    cache.lock(path)
    pages = [node.page for node in path] + cache.pages.alloc(cache.pages.ceil_pages(len(tokens)) - len(path))
    cache.insert(tokens, pages, path)
    cache.unlock(path)
    cache.pages.free(pages[len(path) :])
    return [node.page for node in path]


# -- the tree ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("length", range(1, 9))
def test_kv09_a_match_always_leaves_a_token_to_compute(lookahead, length):
    cache = new_cache(lookahead=lookahead)
    give(cache, tuple(range(12)))
    found = len(cache.match(tuple(range(length)))) * 2
    assert found < length
    if not lookahead:
        assert found >= length - 2
    else:
        assert found == max(length - lookahead, 0) // 2 * 2, "what a page looks ahead to is in the prompt"


def test_kv09_keys_that_look_ahead_tell_pages_with_other_tokens_behind_apart():
    for lookahead, shared in ((0, 2), (1, 1), (2, 1), (3, 0)):
        cache = new_cache(lookahead=lookahead)
        give(cache, (1, 2, 3, 4, 5, 6))
        assert len(cache.match((1, 2, 3, 4, 9, 9))) == shared


@pytest.mark.parametrize(("lookahead", "pages"), [(0, 2), (1, 1), (2, 1), (3, 0)])
def test_kv08_only_full_pages_enter_together_with_what_they_look_ahead_to(lookahead, pages):
    cache = new_cache(lookahead=lookahead)
    assert len(give(cache, (1, 2, 3, 4))) == pages


def test_kv10_pair_keys_are_for_shifted_drafts_and_no_others():
    shifted = {a.name for a in SpeculativeAlgorithm if a.draft_is_shifted()}
    assert shifted == {"EAGLE", "EAGLE3"}


def test_kv10_keys_look_as_far_ahead_as_drafts_do():
    def lookahead(algorithm, **changes):
        args = ServerArgs(speculative_algorithm=algorithm, **changes)
        return resolve_speculative(
            args, draft_model_given=args.algorithm.needs_draft_model()
        ).prefix_lookahead

    plain = {name: lookahead(name) for name in (None, "NGRAM", "STANDALONE", "FROZEN_KV_MTP")}
    assert set(plain.values()) == {0}
    assert lookahead("EAGLE") == lookahead("EAGLE3") == 1
    assert lookahead("EAGLE", enable_multi_layer_eagle=True) == 3
    trio = {
        "speculative_num_steps": 5,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 6,
    }
    assert lookahead("EAGLE", enable_multi_layer_eagle=True, **trio) == 5


def test_the_least_recently_used_leaf_goes_first_and_what_is_used_stays():
    cache = new_cache()
    give(cache, (1, 2, 3, 4))
    give(cache, (5, 6))
    give(cache, (7, 8))
    held = cache.match((5, 6, 0))
    cache.lock(held)
    assert cache.evict(1) == 1
    assert len(cache.match((1, 2, 3, 4, 0))) == 1, "a leaf goes before its parent"
    assert cache.evict(1) == 1
    assert [len(cache.match((*t, 0))) for t in ((1, 2), (5, 6), (7, 8))] == [0, 1, 1]
    assert cache.evict(9) == 1, "the page in use is not for taking"
    assert len(cache.match((5, 6, 0))) == 1
    cache.unlock(held)
    assert cache.evict(9) == 1
    assert cache.pages.num_free == 20


def test_a_page_that_the_tree_has_already_stays_with_its_request():
    cache = new_cache()
    give(cache, (1, 2))
    pages, path = cache.pages.alloc(2), []
    cache.insert((1, 2, 3, 4), pages, path)
    assert path == []
    assert cache.num_pages == 1


def test_a_cache_that_is_off_keeps_nothing():
    cache = PrefixCache(PageAllocator(5, 1), lookahead=0, enabled=False)
    assert give(cache, (1, 2, 3)) == []
    assert cache.match((1, 2, 3)) == []
    assert cache.pages.num_free == 4


class Users:
    """Requests that come, grow and go, against a list of everything that was ever inserted."""

    def __init__(self, page_size, lookahead, num_snapshots=None):
        self.cache = new_cache(16, page_size, lookahead)
        self.running = []  # (tokens, pages, path)
        self.inserted = set()
        self.states = {}  # row -> the text whose state it holds
        if num_snapshots is not None:  # behind 4 rows of requests
            self.cache.snapshots = RowAllocator(5 + num_snapshots, first=5)

    def begin(self, tokens):
        path = self.cache.match(tokens)
        size = self.cache.pages.page_size
        covered = len(path) * size
        assert covered < len(tokens)
        for i, node in enumerate(path):
            key = tokens[: (i + 1) * size + self.cache.lookahead]
            assert (key, node.page) in self.inserted, "a match that nobody put there"
        if self.cache.snapshots is not None and path:
            assert self.states[path[-1].state_row] == tokens[:covered], "the state of another text"
        self.cache.lock(path)
        missing = self.cache.pages.ceil_pages(len(tokens)) - len(path)
        if missing > self.cache.pages.num_free:
            self.cache.evict(missing - self.cache.pages.num_free)
        if missing > self.cache.pages.num_free:
            self.cache.unlock(path)
            return
        pages = [node.page for node in path] + self.cache.pages.alloc(missing)
        self.running.append((tokens, pages, path))

    def publish(self, i):
        tokens, pages, path = self.running[i % len(self.running)]
        before, size = len(path), self.cache.pages.page_size
        self.cache.insert(tokens, pages, path)
        for j in range(before, len(path)):
            self.inserted.add((tokens[: (j + 1) * size + self.cache.lookahead], pages[j]))

    def snapshot(self, i):
        """Take the state at the last page boundary that leaves a token; keep it, or give it back."""
        tokens, _, _ = self.running[i % len(self.running)]
        size = self.cache.pages.page_size
        length = (len(tokens) - 1) // size * size
        if length and (row := self.cache.new_snapshot()):
            self.states[row] = tokens[:length]
            if not self.cache.keep_snapshot(tokens, length, row):
                self.cache.snapshots.free(row)

    def end(self, i):
        _, pages, path = self.running.pop(i % len(self.running))
        self.cache.unlock(path)
        self.cache.pages.free(pages[len(path) :])

    def check(self):
        nodes = self.cache._nodes()
        locks = [sum(node in path for _, _, path in self.running) for node in nodes]
        assert [node.locks for node in nodes] == locks
        assert self.cache.num_pages == len(nodes)
        assert self.cache.num_evictable == locks.count(0)
        assert all(child.locks <= node.locks for node in nodes for child in node.children.values())
        owned = [page for _, pages, path in self.running for page in pages[len(path) :]]
        everything = [*self.cache.pages._free, *owned, *(node.page for node in nodes)]
        assert sorted(everything) == list(range(1, 17)), "a page with two owners, or none"
        if self.cache.snapshots is not None:
            rows = [*self.cache.snapshots._free, *(n.state_row for n in nodes if n.state_row)]
            assert sorted(rows) == list(range(5, self.cache.snapshots.num_rows))


def commands_of(kinds):
    return st.tuples(
        st.sampled_from(kinds), st.integers(0, 30), st.lists(st.integers(0, 1), min_size=1, max_size=9)
    )


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([1, 2, 3]), st.sampled_from([0, 1, 3]), st.lists(commands_of("bbppeev"), max_size=40))
def test_any_sequence_of_uses_keeps_the_books(page_size, lookahead, commands):
    users = Users(page_size, lookahead)
    for kind, number, tokens in commands:
        if kind == "b":
            users.begin(tuple(tokens))
        elif kind == "v":
            assert users.cache.evict(number % 3) <= number % 3
        elif users.running:
            {"p": users.publish, "e": users.end}[kind](number)
        users.check()


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([1, 2, 3]),
    st.sampled_from([0, 1, 3]),
    st.integers(0, 3),
    st.lists(commands_of("bbppsssev"), max_size=40),
)
def test_with_snapshots_a_match_ends_where_a_state_is_known(page_size, lookahead, num_snapshots, commands):
    users = Users(page_size, lookahead, num_snapshots)
    for kind, number, tokens in commands:
        if kind == "b":
            users.begin(tuple(tokens))
        elif kind == "v":
            assert users.cache.evict(number % 3) <= number % 3
        elif users.running:
            {"p": users.publish, "e": users.end, "s": users.snapshot}[kind](number)
        users.check()


def test_a_snapshot_in_use_is_not_taken_and_the_oldest_idle_one_is():
    users = Users(2, lookahead=0, num_snapshots=2)
    for tokens in ((1, 2, 9), (3, 4, 9)):
        users.begin(tokens)
        users.publish(-1)
        users.snapshot(-1)
    cache = users.cache
    assert cache.new_snapshot() == 0, "both are in use"
    users.end(0)
    assert cache.new_snapshot() > 0
    assert (len(cache.match((1, 2, 0))), len(cache.known((1, 2, 0)))) == (0, 1), "its KV stays"
    assert len(cache.match((3, 4, 0))) == 1


# -- the engine ----------------------------------------------------------------------------------------------


def open_cached(open_engine, setup, schedule, device, **changes):
    engine = open_setup(open_engine, setup, schedule, device, disable_radix_cache=False, **changes)
    engine._forward_stream.synchronize()
    for pool in (engine.scheduler.cache.target_pool, engine.scheduler.cache.draft_pool):
        pool.fill_unused(math.nan, engine.scheduler.cache.pages.page_size)
    return engine


def count_prefilled(engine):
    """A list of (request, tokens computed) that grows with each prefill."""
    planner, seen = engine.scheduler.planner, []
    extend = planner._extend_batch

    def counted(reqs, spans):
        seen.extend((r.request_id, end - start) for r, (start, end) in zip(reqs, spans, strict=True))
        return extend(reqs, spans)

    planner._extend_batch = counted
    return seen


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("setup", SETUPS)
def test_kv11_kv12_a_second_time_almost_nothing_is_computed(open_engine, setup, page_size, schedule, device):
    engine = open_cached(open_engine, setup, schedule, device, page_size=page_size)
    prompt = setup_prompts(setup, engine.model, 3)[2]
    computed = count_prefilled(engine)
    specs = []
    for i in range(3):
        check_identity(engine, [prompt], [SamplingParams(max_new_tokens=20)])
        assert_at_rest(engine)
        (done,) = engine.generate(prompt, SamplingParams(max_new_tokens=20))
        specs.append(done.spec)
        again = [n for request, n in computed if request > 0]
        assert max(again) <= page_size + max(engine.server_args.prefix_lookahead, 1), f"run {i}"
        assert done.cached_tokens == len(prompt) - again[-1]
    assert specs[0] == specs[1] == specs[2], "shared draft KV is not what the request would have written"


def forks(setup, model):
    """Prompts that share a beginning and part at every place around the boundaries of pages."""
    base = setup_prompts(setup, model, 3)[2]
    cuts = range(max(len(base) - 9, 1), len(base) + 1)
    return [base, *(base[:cut] + random_prompt(cut, 3) for cut in cuts), base]


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("setup", SETUPS)
def test_kv09_shared_prefixes_change_no_accept_length(open_engine, setup, page_size, chunk, schedule, device):
    runs = []
    for off in (True, False):
        changes = {} if off else {"page_size": page_size, "chunked_prefill_size": chunk}
        opened = open_setup if off else open_cached
        engine = opened(open_engine, setup, schedule, device, **changes)
        done = engine.generate(forks(setup, engine.model), SamplingParams(max_new_tokens=9))
        runs.append([(d.output_ids, d.spec) for d in done])
    assert_at_rest(engine)
    assert sum(d.cached_tokens for d in done) > 0 or page_size == 16, "nothing was shared"
    assert runs[0] == runs[1]


@pytest.mark.parametrize("setup", ["eagle-tree", "standalone-chain", "ngram", "multi-layer"])
def test_kv08_after_every_step_the_tree_holds_committed_tokens_only(open_engine, setup, schedule, device):
    engine = open_cached(open_engine, setup, schedule, device, page_size=2, max_running_requests=2)
    recorder, cache = Recorder(engine), engine.scheduler.cache
    said, checked = {}, []

    def check(batch, result):
        for req in batch.reqs:
            said[req.request_id] = (*req.prompt_ids, *req.output_ids)
        for node in cache.prefix._nodes():
            tokens, walk = node.key, node.parent
            while walk.parent is not None:
                tokens, walk = walk.key[: cache.pages.page_size] + tokens, walk.parent
            assert any(text[: len(tokens)] == tokens for text in said.values())
            checked.append(len(tokens))

    recorder.after = check
    prompts = setup_prompts(setup, engine.model, 4)
    engine.generate(prompts, SamplingParams(max_new_tokens=14))
    assert max(checked) > max(map(len, prompts)), "no output entered the tree"


@pytest.mark.parametrize("setup", ["ngram", "eagle-tree", "multi-layer"])
def test_kv15_random_aborts_with_shared_prefixes(open_engine, setup, schedule, device):
    engine = open_cached(open_engine, setup, schedule, device, page_size=2, max_running_requests=3)
    prompts = forks(setup, engine.model)[:6]
    rng, aborted = random.Random(15), 0
    params = [sampled(i, max_new_tokens=12) for i in range(len(prompts))]
    plain = [oracle_of(engine.model).expected(*pair) for pair in zip(prompts, params, strict=True)]
    for _ in range(50 if setup == "ngram" else 12):
        victims = {}
        for chunk in engine.stream(prompts, params):
            if chunk.finished:
                victims[chunk.index] = chunk.completion
            elif rng.random() < 0.15:
                engine.abort(chunk.request_id)
        for i, done in victims.items():
            aborted += done.finish_reason == "abort"
            wanted = plain[i] if done.finish_reason == "length" else plain[i][: len(done.output_ids)]
            assert done.output_ids == wanted
        assert_at_rest(engine)
    assert aborted > 5
