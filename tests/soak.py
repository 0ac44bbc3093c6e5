"""A random driver: requests come, are called off, retracted, struck by errors; after every step everything is counted.

    python -m tests.soak                    # 50,000 steps over all workers, schedules and kinds of pools
    python -m tests.soak --seed 7 --cells 1 # one run again

A run is a list of actions, so one that fails can be made shorter: `shrink` leaves out what it does not need. With `world`
the streams take turns as a seed says (`scheduling_helpers.World`), so that a run can be repeated to the letter.
"""

import argparse
import logging
import random
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import fields
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch

from spec_v2 import SamplingParams
from tests import hybrid_models as hybrids
from tests import tiny_models as tiny
from tests.adaptive_policies import RandomPolicy
from tests.cells import SETUPS, models
from tests.eagle3_models import deep_llama, eagle3_head
from tests.faults import LAUNCHES, Injected
from tests.harness import CHAIN, TREE_2, make_engine, sampled
from tests.scheduling_helpers import World
from tests.surface import assert_at_rest
from tests.tiny_tokenizers import LETTERS, letter_tokenizer

CPU = torch.device("cpu")
MOST_TOKENS = 14
KINDS = range(3)  # greedy, and two ways to sample
WORKERS = (*SETUPS, "eagle3", "hybrid")
ADAPTS = {
    "ngram",
    "standalone-chain",
    "standalone-tree",
    "eagle-chain",
    "eagle-tree",
    "multi-layer",
    "frozen-kv",
}
# what an action is, and how often it is taken
ACTIONS = {"submit": 5, "step": 20, "abort": 1, "retract": 1, "error": 1}


class Cell(NamedTuple):
    """Where a run happens."""

    worker: str
    schedule: str
    page_size: int
    chunk: int | None
    shares_prefixes: bool
    adapts: bool
    world: int | None  # the seed of the streams' turns; None: real threads


class Action(NamedTuple):
    """`value` seeds whatever the action has to choose."""

    kind: str
    value: int


def cell_of(seed: int) -> Cell:
    """Cells go round the workers and schedules; the rest is drawn."""
    rng = random.Random(seed)
    worker = WORKERS[seed % len(WORKERS)]
    return Cell(
        worker=worker,
        schedule=("overlap", "sync")[seed // len(WORKERS) % 2],
        page_size=rng.choice((1, 4)),
        chunk=rng.choice((None, 3, 5)),
        shares_prefixes=rng.random() < 0.6,
        adapts=worker in ADAPTS and rng.random() < 0.4,
        world=rng.randrange(1000) if rng.random() < 0.8 else None,
    )


def actions_of(seed: int, count: int) -> list[Action]:
    rng = random.Random(seed)
    kinds = rng.choices(list(ACTIONS), list(ACTIONS.values()), k=count)
    return [Action(kind, rng.randrange(1 << 30)) for kind in kinds]


@cache
def models_of(worker: str) -> tuple[Any, str | None, Any, tuple[int, int, int]]:
    """(target, algorithm, draft, shape)"""
    if worker == "eagle3":
        target = deep_llama(CPU)
        return target, "EAGLE3", eagle3_head(target), TREE_2
    if worker == "hybrid":
        target = hybrids.hybrid("qwen3_5_text", CPU)
        return target, "STANDALONE", hybrids.drafter("noisy", "qwen3_5_text", CPU), CHAIN
    algorithm, drafter, shape = SETUPS[worker]
    return (models(algorithm, drafter, CPU)[0], algorithm, models(algorithm, drafter, CPU)[1], shape)


class CountedWorld(World):
    """`num_choices`: how often more than one stream could have gone on, and the seed chose."""

    num_choices = 0

    def _step(self) -> bool:
        self.num_choices += self.running is None and sum(stream.is_ready() for stream in self.streams) > 1
        return super()._step()


def open_cell(cell: Cell, world: World | None) -> Any:
    """An engine in debug mode that goes on after errors, with NaN in all memory that nobody has written."""
    target, algorithm, draft, shape = models_of(cell.worker)
    options: dict[str, Any] = {}
    if cell.adapts:
        options = {"adaptive_policy": RandomPolicy(11, longest_run=5), "speculative_adaptive": True}
    elif algorithm == "NGRAM":
        options = {"speculative_adaptive": False}
    with mock.patch("spec_v2.engine.make_stream", world.make_stream) if world else nullcontext():
        engine = make_engine(
            target, algorithm, draft, shape, schedule=cell.schedule, page_size=cell.page_size,
            chunked_prefill_size=cell.chunk, disable_radix_cache=not cell.shares_prefixes, max_running_requests=3,
            max_total_tokens=112, tokenizer=letter_tokenizer(), **options,
        )  # fmt: skip
    engine.scheduler.survives_errors = True
    cache = engine.scheduler.cache
    for pool in (cache.target_pool, cache.draft_pool):
        pool.fill_unused(float("nan"), cell.page_size)
    for states in (cache.target_states, cache.draft_states):
        states.fill_unused(float("nan"))
    return engine


@cache
def prompts_of(worker: str) -> list[tuple[int, ...]]:
    """Of unequal lengths; some begin alike."""
    target = models_of(worker)[0]
    if worker == "ngram":
        return [tiny.copying_prompt(target, seed % 3, 5 + 2 * seed) for seed in range(6)]
    make = tiny.marked_prompt if worker == "frozen-kv" else tiny.random_prompt
    stem = make(7, 9)
    found = [make(seed, 3 + 2 * seed) for seed in range(3)]
    found += [(*stem, *make(seed, 2 + seed)) for seed in range(8)]
    return [prompt for prompt in found if is_certain(worker, prompt)][:8]


def is_certain(worker: str, prompt: tuple[int, ...]) -> bool:
    try:
        return all(plain(worker, prompt, kind) for kind in KINDS)
    except tiny.NearTie:
        return False


@cache
def plain(worker: str, prompt: tuple[int, ...], kind: int) -> list[int]:
    """Plain decoding, longer than any request asks for."""
    return tiny.oracle_of(models_of(worker)[0]).tokens(prompt, MOST_TOKENS, base_params(kind))


def base_params(kind: int) -> SamplingParams:
    return (
        SamplingParams(max_new_tokens=MOST_TOKENS) if kind == 0 else sampled(kind, max_new_tokens=MOST_TOKENS)
    )


class Run:
    """One engine under a list of actions. `counts`: steps, requests and so on."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.counts: Counter[str] = Counter()
        self.world = None if cell.world is None else CountedWorld(cell.world)
        self.engine = open_cell(cell, self.world)
        self.scheduler = self.engine.scheduler
        self.wanted: dict[int, tuple[Any, tuple[int, ...], str]] = {}  # by request id: request, text, reason
        self._loop: Any = None
        self._error_at: str | None = None
        self._errors = 0
        self._full_rows: set[int] = set()  # rows that a step has stashed and none has read since
        self._watch_rows()
        self._watch_isolation()
        self._watch_recovery()
        for stream in (self.engine._forward_stream, self.engine._copy_stream):
            stream.on_run = self._strike

    # -- actions ---------------------------------------------------------------------------------------------

    def take(self, action: Action) -> None:
        rng = random.Random(action.value)
        getattr(self, f"_{action.kind}")(rng)
        check(self)

    def _submit(self, rng: random.Random) -> None:
        if len(self.scheduler.planner.waiting) > 4:
            return
        prompt = rng.choice(prompts_of(self.cell.worker))
        kind = rng.choice(KINDS)
        text = plain(self.cell.worker, prompt, kind)
        count = rng.randint(1, MOST_TOKENS)
        end = rng.choice(("length", "length", "token", "string"))
        stop = rng.choice(text)
        params: dict[str, Any] = {"max_new_tokens": count}
        if end == "token":
            params["stop_token_ids"] = (stop,)
        elif end == "string":
            params["stop"] = (LETTERS[stop],)
        place = text.index(stop) + 1
        is_cut = end != "length" and place <= count
        wanted = tuple(text[: place if is_cut else count])
        changed = {f.name: getattr(base_params(kind), f.name) for f in fields(SamplingParams)} | params
        (req,) = self.engine._requests([prompt], SamplingParams(**changed))
        self.wanted[req.request_id] = (req, wanted, "stop" if is_cut else "length")
        self.scheduler.add_requests([req])
        self.counts["requests"] += 1

    def _step(self, rng: random.Random) -> None:
        if self._loop is None:
            self._loop = self.scheduler.event_loop()
        before = self.scheduler.num_steps_launched
        if next(self._loop, None) is None:
            self._loop = None
        self.counts["steps"] += self.scheduler.num_steps_launched - before

    def _abort(self, rng: random.Random) -> None:
        unfinished = [r for r, _, _ in self.wanted.values() if not r.finished]
        if unfinished:
            self.engine.abort(rng.choice(unfinished).request_id)
            self.counts["aborts"] += 1

    def _retract(self, rng: random.Random) -> None:
        """What a full pool does, whenever it likes: between two steps the planner may take memory back."""
        planner = self.scheduler.planner
        running = [r for r in planner.live.values() if not r.finished and r is not planner.chunked]
        if running:
            planner.retract(rng.choice(running))
            self.counts["retractions"] += 1

    def _error(self, rng: random.Random) -> None:
        self._error_at = rng.choice(LAUNCHES)

    def _strike(self, label: str, step: int) -> None:
        if self._error_at == label:
            self._error_at = None
            self._errors += 1
            self.counts["errors"] += 1
            raise Injected(f"{label} of step {step}")

    def finish(self) -> None:
        """Run to the end, and compare every text."""
        self._error_at = None
        while self.scheduler.has_requests or self.scheduler.result_queue or self._loop is not None:
            self.take(Action("step", 0))
        assert_at_rest(self.engine)
        for req, wanted, reason in self.wanted.values():
            said = tuple(req.output_ids)
            self.counts[f"ended by {req.finish_reason}"] += 1
            self.counts["prefix hits"] += req.cached_tokens > 0
            self.counts["prompts in chunks"] += (
                self.cell.chunk is not None and len(req.prompt_ids) > self.cell.chunk
            )
            self.counts["changes of setting"] += sum(a != b for a, b in pairwise(req.settings))
            if req.finish_reason in ("abort", "error"):
                assert said == wanted[: len(said)]
                assert req.finish_reason == "abort" or self._errors >= 2
            else:
                assert (said, req.finish_reason) == (wanted, reason)
        self.engine.close()

    # -- what is watched ---------------------------------------------------------------------------------------

    def _watch_rows(self) -> None:
        """A row is stashed once per step, and read at most once before it is stashed again."""
        rows_of, future_map = self._full_rows, self.scheduler.future_map
        stash, resolve = future_map.stash, future_map.resolve

        def stashing(rows: Any, *rest: Any) -> None:
            numbers = rows.tolist()
            assert len(set(numbers)) == len(numbers), "a launch writes a row twice"
            stash(rows, *rest)
            rows_of.update(numbers)

        def resolving(rows: Any, *rest: Any) -> Any:
            assert rows_of.issuperset(rows.tolist()), "a row is read that no step has written since"
            rows_of.difference_update(rows.tolist())
            return resolve(rows, *rest)

        future_map.stash, future_map.resolve = stashing, resolving

    def _watch_isolation(self) -> None:
        """Whatever a worker does to the batch, each field is the same object afterwards."""
        isolate = self.scheduler._forward_isolation

        def watching(batch: Any, *, overlap: bool) -> Any:
            before = {f.name: getattr(batch, f.name) for f in fields(batch)}
            context = isolate(batch, overlap=overlap)
            leave = context.__exit__

            def leaving(*error: Any) -> Any:
                suppressed = leave(*error)
                changed = [name for name, value in before.items() if getattr(batch, name) is not value]
                assert not changed, f"not restored: {changed}"
                self.counts["isolations"] += 1
                return suppressed

            return _Context(context.__enter__, leaving)

        self.scheduler._forward_isolation = watching

    def _watch_recovery(self) -> None:
        """Only what was put in is survived: an error of the engine's own, or of what is watched here, is not."""
        start_over = self.scheduler.start_over

        def watching(error: Exception) -> Any:
            if not isinstance(error, Injected):
                raise error
            return start_over(error)

        self.scheduler.start_over = watching


class _Context:
    def __init__(self, enter: Any, leave: Any) -> None:
        self._enter, self._leave = enter, leave

    def __enter__(self) -> Any:
        return self._enter()

    def __exit__(self, *error: object) -> Any:
        return self._leave(*error)


def check(run: Run) -> None:
    """Each page, row and snapshot has one owner; the host's counts are in order; nobody has said a wrong token."""
    scheduler, cache = run.scheduler, run.scheduler.cache
    planner, prefix = scheduler.planner, cache.prefix
    live, nodes = list(planner.live.values()), prefix._nodes()
    own = [page for req in live for page in req.pages[len(req.cached_path) :]]
    pages = sorted([*cache.pages._free, *(node.page for node in nodes), *own])
    assert pages == list(range(1, cache.pages.num_pages)), "a page has no owner, or two"
    assert sorted([*cache.rows._free, *(req.row for req in live)]) == list(range(1, cache.rows.num_rows))
    snapshots = [row for req in live for _, row in req.snapshots]
    kept = sorted([*cache.snapshots._free, *(n.state_row for n in nodes if n.state_row), *snapshots])
    assert kept == list(range(cache.snapshots.first, cache.snapshots.num_rows)), (
        "a state has no owner, or two"
    )
    locks = Counter(id(node) for req in live for node in req.cached_path)
    assert all(node.locks == locks[id(node)] for node in nodes)
    assert prefix.num_evictable == sum(node.locks == 0 for node in nodes)
    assert not {id(r) for r in live} & {id(r) for r in planner.waiting}, "a request runs and waits"
    for req in live:
        assert not req.finished
        shared = [node.page for node in req.cached_path]
        assert req.pages[: len(shared)] == shared
        room = len(req.pages) * cache.pages.page_size
        assert 0 <= req.kv_committed_len <= room
        assert req.kv_allocated_len <= room <= cache.row_table.width + cache.pages.page_size - 1
        flying = [
            1
            for batch, result in scheduler.result_queue
            for other, epoch in zip(batch.reqs, result.epochs, strict=True)
            if other is req and epoch == req.epoch
        ]
        assert 0 <= req.num_in_flight <= len(flying) <= 1
    for req in planner.waiting:
        assert not req.pages
        assert (req.row, req.num_in_flight, req.kv_committed_len) == (0, 0, 0)
    for req, wanted, _ in run.wanted.values():
        assert tuple(req.output_ids) == wanted[: len(req.output_ids)], "a wrong token"


def play(cell: Cell, actions: list[Action]) -> Counter[str]:
    """One run. Raises what went wrong."""
    run = Run(cell)
    try:
        for action in actions:
            run.take(action)
        run.finish()
    finally:
        run.engine._forward_stream.on_run = run.engine._copy_stream.on_run = None
        run.engine.close()
    run.counts["turns of streams drawn" if run.world else "runs on threads"] += (
        run.world.num_choices if run.world else 1
    )
    return run.counts


def shrink(cell: Cell, actions: list[Action]) -> list[Action]:
    """Leave out all actions without which the run still fails: halves first, then ever shorter pieces."""

    def fails(some: list[Action]) -> bool:
        try:
            play(cell, some)
        except Exception:  # noqa: BLE001 - whatever it is
            return True
        return False

    size = max(len(actions) // 2, 1)
    while size:
        start = 0
        while start < len(actions):
            fewer = actions[:start] + actions[start + size :]
            if fails(fewer):
                actions = fewer
            else:
                start += size
        size //= 2
    return actions


def soak(
    first_seed: int, num_steps: int, actions_per_run: int = 120, cells: int | None = None
) -> Counter[str]:
    """Runs with one seed after the other until `num_steps` were launched (or so many `cells` ran)."""
    total: Counter[str] = Counter()
    seed = first_seed
    while total["steps"] < num_steps if cells is None else seed < first_seed + cells:
        cell, actions = cell_of(seed), actions_of(seed, actions_per_run)
        try:
            counts = play(cell, actions)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {cell}\nfails with {shrink(cell, actions)}") from error
        total += counts
        total["runs"] += 1
        seed += 1
    return total


def describe(total: Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(total.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=50_000, help="steps to launch in all (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first run (default: %(default)s)")
    parser.add_argument("--cells", type=int, help="run so many seeds instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # each injected error is said there
    total: Counter[str] = Counter()
    seed, began = options.seed, time.perf_counter()
    while total["steps"] < options.steps:
        total += soak(seed, options.steps, cells=options.cells or 5)
        seed += 5
        print(f"{time.perf_counter() - began:5.0f} s: {describe(total)}", flush=True)
        if options.cells:
            break
    print(f"soak passed: {describe(total)}")


if __name__ == "__main__":
    sys.exit(main())
