"""Engines for tests, and a record of what each of their steps drafted and accepted."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from spec_v2 import Engine, SamplingParams
from tests.tiny_models import CONTEXT, oracle_of

# (num_steps, topk, num_draft_tokens). For trees num_draft_tokens differs from num_steps + 1, both ways.
CHAIN = (3, 1, 4)
SHORT_CHAIN = (1, 1, 2)
TREE_2 = (3, 2, 6)
TREE_4 = (3, 4, 9)
NARROW_TREE = (5, 3, 4)  # fewer nodes than num_steps + 1
FLAT_TREE = (1, 4, 5)  # depth 1
LONG_CHAIN = (5, 1, 6)
CHAINS = (CHAIN, SHORT_CHAIN, LONG_CHAIN)
SHAPES = (CHAIN, SHORT_CHAIN, TREE_2, TREE_4, NARROW_TREE, FLAT_TREE)


def make_engine(
    target: Any,
    algorithm: str | None = None,
    draft: Any = None,
    shape: tuple[int, int, int] = CHAIN,
    *,
    schedule: str = "overlap",
    debug: bool = True,
    **server_args: Any,
) -> Engine:
    """An engine on tiny models. NGRAM takes topk as its breadth and the last number as its nodes.

    MULTI_LAYER_EAGLE stands for EAGLE with `enable_multi_layer_eagle`.
    """
    steps, topk, nodes = shape
    if algorithm == "MULTI_LAYER_EAGLE":
        algorithm, server_args = "EAGLE", {"enable_multi_layer_eagle": True} | server_args
    # Prefixes are not shared and NGRAM always drafts, unless a test asks: then a request alone does what it does here.
    settings = {
        "context_length": CONTEXT,
        "max_running_requests": 5,
        "disable_radix_cache": True,
    } | server_args
    if algorithm == "NGRAM":
        settings |= {"speculative_ngram_max_bfs_breadth": topk, "speculative_num_draft_tokens": nodes}
        settings.setdefault("speculative_adaptive", False)
    elif algorithm is not None:
        settings |= {
            "speculative_num_steps": steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": nodes,
        }
    return Engine(
        target,
        draft_model=draft,
        debug=debug,
        speculative_algorithm=algorithm,
        disable_overlap_schedule=schedule == "sync",
        **settings,
    )


@dataclass(frozen=True)
class StepRecord:
    """One request's part of one decode step. `text`: all that was known before it, the bonus token included."""

    step: int
    request: int
    seq_len: int
    tokens: list[int]
    parents: list[int]
    scores: list[float]
    accept_len: int
    accept_index: list[int]
    predict: list[int]
    text: tuple[int, ...]
    dropped: bool  # the request had finished when the step landed

    @property
    def emitted(self) -> list[int]:
        return self.predict[: self.accept_len]

    @property
    def accepted_nodes(self) -> list[int]:
        return self.accept_index[: self.accept_len]

    def children(self, node: int) -> list[int]:
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`."""
        nodes = [node]
        while self.parents[nodes[0]] >= 0:
            nodes.insert(0, self.parents[nodes[0]])
        return nodes

    def longest_greedy_path(self, continuation: list[int]) -> int:
        """Most drafts on a path from the root that say `continuation`, found by trying all nodes."""
        best = 0
        for node in range(1, len(self.tokens)):
            if self.parents[node] < 0:
                continue
            drafts = [self.tokens[i] for i in self.path(node)[1:]]
            if drafts == continuation[: len(drafts)]:
                best = max(best, len(drafts))
        return best


class Recorder:
    """Notes every decode step of an engine when its result is processed.

    `before`, `after`: called with (batch, result) around the commit, for tests that look at memory. Requests
    are numbered in the order of the prompts of the first `generate`.
    """

    def __init__(self, engine: Engine) -> None:
        self.records: list[StepRecord] = []
        self.before: Any = None
        self.after: Any = None
        self._process = engine.scheduler.processor.process
        engine.scheduler.processor.process = self.process  # type: ignore[method-assign]

    def process(self, batch: Any, result: Any) -> Any:
        result.copy_done.synchronize()
        if self.before is not None:
            self.before(batch, result)
        if not batch.forward_mode.is_extend():
            self._note(batch, result)
        finished = self._process(batch, result)
        if self.after is not None:
            self.after(batch, result)
        return finished

    def _note(self, batch: Any, result: Any) -> None:
        tree, verdict = result.tree.get(), result.verdict.get()
        old_lens = (verdict.new_seq_lens - verdict.accept_lens).tolist()
        for i, req in enumerate(batch.reqs):
            self.records.append(
                StepRecord(
                    step=result.step,
                    request=req.request_id,
                    seq_len=old_lens[i],
                    tokens=tree.tokens[i].tolist(),
                    parents=tree.parents[i].tolist(),
                    scores=tree.scores[i].tolist(),
                    accept_len=int(verdict.accept_lens[i]),
                    accept_index=verdict.accept_index[i].tolist(),
                    predict=verdict.predict[i].tolist(),
                    text=(*req.prompt_ids, *req.output_ids),
                    dropped=req.finished,
                )
            )

    def of_request(self, request: int) -> list[StepRecord]:
        return [r for r in self.records if r.request == request and not r.dropped]


@dataclass
class Coverage:
    """What a set of runs has exercised. A test of identity proves nothing about what never happened."""

    accepted: set[int] = field(default_factory=set)
    full: bool = False
    rows_differed: bool = False
    later_child: bool = False
    moved: bool = False

    def add(self, records: list[StepRecord]) -> None:
        by_step = defaultdict(set)
        for r in records:
            width = len(r.accept_index)
            self.accepted.add(r.accept_len)
            self.full |= r.accept_len == width > 1
            by_step[r.step].add(r.accept_len)
            nodes = r.accepted_nodes
            self.moved |= nodes != list(range(len(nodes)))
            self.later_child |= any(node != r.children(r.parents[node])[0] for node in nodes[1:])
        self.rows_differed |= any(len(lens) > 1 for lens in by_step.values())

    def merge(self, other: "Coverage") -> None:
        self.accepted |= other.accepted
        self.full |= other.full
        self.rows_differed |= other.rows_differed
        self.later_child |= other.later_child
        self.moved |= other.moved

    def check(self, has_trees: bool = True) -> None:
        assert 1 in self.accepted, "no step accepted nothing"
        assert self.full, "no step accepted all that it could"
        assert len(self.accepted - {1, max(self.accepted)}) >= 2, f"only {self.accepted} occurred"
        assert self.rows_differed, "all rows of each batch accepted as much"
        assert self.later_child == has_trees, "no child but the first was accepted, or chains branch"
        assert self.moved == has_trees, "compaction moved nothing, or something in a chain"


def check_identity(engine: Engine, prompts: list, params: list[SamplingParams]) -> list[StepRecord]:
    """Generate, and demand plain decoding's tokens and, where greedy, the longest path that a tree offers."""
    recorder = Recorder(engine)
    first = engine._factory.num_requests
    completions = engine.generate(prompts, params)
    oracle = oracle_of(engine.model)
    for i, (prompt, param, done) in enumerate(zip(prompts, params, completions, strict=True)):
        assert done.output_ids == oracle.expected(prompt, param), f"prompt {i}, {param}"
        steps = recorder.of_request(first + i)
        assert tuple(r.accept_len for r in steps) == done.spec.accept_lens
        assert all(
            n - 1 <= depth for n, depth in zip(done.spec.accept_lens, done.spec.draft_depths, strict=True)
        )
    for r in recorder.records:
        i = r.request - first
        known = r.seq_len + 1 - len(prompts[i])  # tokens of the output, the bonus token included
        count = known + r.accept_len
        continuation = oracle.tokens(prompts[i], count, params[i])[known:]
        assert r.emitted == continuation, f"prompt {i}, step {r.step}"
        longest = r.longest_greedy_path(oracle.tokens(prompts[i], count + 1, params[i])[known:])
        assert r.accept_len == 1 + longest, f"prompt {i}, step {r.step}"
    return recorder.records


def sampled(i: int, **changes: Any) -> SamplingParams:
    """The `i`-th of a mixed bag of sampling settings; greedy is among them."""
    bag = (
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.7},
        {},
        {"temperature": 0.6},
        {"temperature": 1.0, "top_k": 8, "top_p": 0.8},
        {"temperature": 0.3, "top_k": 3},
    )
    return SamplingParams(**({"seed": 1000 + i} | bag[i % len(bag)] | changes))
