"""Cells of the identity matrix: what can be combined, and a small set in which each pair of values occurs."""

from functools import cache
from itertools import combinations, product
from typing import Any, NamedTuple

import torch

from spec_v2 import Engine, SamplingParams
from tests import tiny_models as tiny
from tests.harness import (
    CHAIN,
    CHAINS,
    SHAPES,
    TREE_2,
    TREE_4,
    Coverage,
    check_identity,
    make_engine,
    sampled,
)

DRAFTERS = {
    None: ("nothing",),
    "NGRAM": ("random", "self"),  # of prompts: nothing to copy, or their own continuation
    "STANDALONE": ("random", "self", "noisy"),
    "EAGLE": ("random", "self", "noisy"),  # the random head is the one that reads hidden states
    "MULTI_LAYER_EAGLE": ("random", "self", "noisy"),  # the same
    "FROZEN_KV_MTP": ("random", "self", "noisy"),  # the same
}
CHAINS_ONLY = ("MULTI_LAYER_EAGLE",)


class Cell(NamedTuple):
    algorithm: str | None
    drafter: str
    shape: tuple[int, int, int]
    page_size: int
    batch: int
    is_sampled: bool
    joins: bool  # more prompts than rows, so that requests join while others run

    @property
    def name(self) -> str:
        shape = "x".join(map(str, self.shape))
        kind = "sampled" if self.is_sampled else "greedy"
        joins = "-joins" if self.joins else ""
        return f"{self.algorithm or 'PLAIN'}-{self.drafter}-{shape}-p{self.page_size}-b{self.batch}-{kind}{joins}"


def all_cells() -> list[Cell]:
    cells = []
    for algorithm, drafters in DRAFTERS.items():
        shapes = (CHAINS if algorithm in CHAINS_ONLY else SHAPES) if algorithm else (CHAIN,)
        factors = (drafters, shapes, (1, 16), (1, 2, 3, 5), (False, True), (False, True))
        cells += [Cell(algorithm, *values) for values in product(*factors)]
    return cells


def pairwise_cells() -> list[Cell]:
    """A small subset in which each pair of values that can meet does meet; greedy, and always the same."""

    def pairs(cell: Cell) -> set:
        return set(combinations(enumerate(cell), 2))

    cells = all_cells()
    wanted = set().union(*map(pairs, cells))
    chosen: list[Cell] = []
    while wanted:
        best = max(cells, key=lambda cell: len(pairs(cell) & wanted))
        chosen.append(best)
        wanted -= pairs(best)
    return chosen


@cache
def models(algorithm: str | None, drafter: str, device: torch.device) -> tuple:
    """(target, draft)"""
    if algorithm == "NGRAM":
        return (tiny.markov(device) if drafter == "self" else tiny.llama(device)), None
    if algorithm == "EAGLE":
        target = tiny.mistral(device)
        heads = {"random": tiny.hidden_head, "self": tiny.constructed_head}
        head = heads[drafter](target) if drafter in heads else tiny.constructed_head(target, sigma=0.25)
        return target, head
    if algorithm == "MULTI_LAYER_EAGLE":
        target = tiny.even_mistral(device)
        if drafter == "random":
            return target, tiny.hidden_modules(target)
        return target, tiny.constructed_modules(target, sigma=0.25 if drafter == "noisy" else 0.0)
    if algorithm == "FROZEN_KV_MTP":
        if drafter == "random":
            return tiny.llama(device), tiny.hidden_reader(tiny.llama(device))
        target = tiny.marked_llama(device)
        return target, tiny.constructed_reader(target, sigma=0.25 if drafter == "noisy" else 0.0)
    target = tiny.llama(device)
    if drafter == "random":
        return target, tiny.random_llama(99, hidden_size=16).to(device)  # narrower than the target
    drafts = {"nothing": lambda: None, "self": lambda: target, "noisy": lambda: tiny.noisy_copy(target)}
    return target, drafts[drafter]()


def prompts_for(cell: Cell, target: object, count: int) -> list[tuple[int, ...]]:
    if cell.algorithm == "NGRAM" and cell.drafter == "self":
        return [tiny.copying_prompt(target, seed, 10 + 4 * seed) for seed in range(count)]
    make = tiny.marked_prompt if cell.algorithm == "FROZEN_KV_MTP" else tiny.random_prompt
    return [make(seed, (9, 1, 16, 4, 12, 2, 7)[seed % 7]) for seed in range(count)]


def params_for(cell: Cell, count: int) -> list[SamplingParams]:
    lengths = [24 + 5 * i % 17 for i in range(count)]  # they finish one after another
    if cell.is_sampled:
        return [sampled(i, max_new_tokens=n) for i, n in enumerate(lengths)]
    return [SamplingParams(max_new_tokens=n) for n in lengths]


@cache
def run_cell(cell: Cell, schedule: str, device: torch.device) -> Coverage:
    """Check one cell. What it covered is kept, so a cell runs once however many tests want it."""
    target, draft = models(cell.algorithm, cell.drafter, device)
    count = cell.batch + (2 if cell.joins else 0)
    coverage = Coverage()
    with make_engine(
        target,
        cell.algorithm,
        draft,
        cell.shape,
        schedule=schedule,
        page_size=cell.page_size,
        max_running_requests=cell.batch,
    ) as engine:
        usable = engine.scheduler.cache.pages.num_usable
        coverage.add(check_identity(engine, prompts_for(cell, target, count), params_for(cell, count)))
        assert engine.scheduler.cache.pages.num_free == usable
        assert engine.scheduler.cache.rows.num_free == cell.batch
    return coverage


# -- a few named setups, for tests that need not run every cell ---------------------------------------------

SETUPS = {
    "plain": (None, "nothing", CHAIN),
    "ngram": ("NGRAM", "self", (3, 4, 6)),
    "standalone-chain": ("STANDALONE", "noisy", CHAIN),
    "standalone-tree": ("STANDALONE", "noisy", TREE_4),
    "eagle-chain": ("EAGLE", "noisy", CHAIN),
    "eagle-tree": ("EAGLE", "noisy", TREE_2),
    "multi-layer": ("MULTI_LAYER_EAGLE", "noisy", CHAIN),
    "frozen-kv": ("FROZEN_KV_MTP", "noisy", TREE_2),
}


# The target whose text a frozen-KV head can know repeats itself soon; where a test needs a text, drafts are random.
LIVELY = {"frozen-kv": {"drafter": "random"}}


def open_setup(open_engine: Any, name: str, schedule: str, device: torch.device, **changes: Any) -> Engine:
    """The engine of a named setup. `drafter=` replaces its drafter, other keywords are the engine's."""
    algorithm, drafter, shape = SETUPS[name]
    target, draft = models(algorithm, changes.pop("drafter", drafter), device)
    return open_engine(target, algorithm, draft, changes.pop("shape", shape), schedule=schedule, **changes)


def setup_prompts(name: str, model: Any, count: int) -> list[tuple[int, ...]]:
    """Prompts of unequal length; for NGRAM they hold their own continuation, for FROZEN_KV_MTP marks."""
    if name == "ngram":
        return [tiny.copying_prompt(model, seed, 10 + 3 * seed) for seed in range(count)]
    make = tiny.marked_prompt if name == "frozen-kv" else tiny.random_prompt
    return [make(100 + seed, 9 + 3 * seed % 7) for seed in range(count)]
