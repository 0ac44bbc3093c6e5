"""Plain decoding with every request option, in plain Python; and what must hold of an engine at rest."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from spec_v2.kernels.sample_nodes import inverse_cdf, position_coins
from tests.tiny_models import VOCAB, oracle_of


class Plain(NamedTuple):
    """What a request must give. `logprobs`: rows of log_softmax of the raw logits, one per token."""

    output_ids: tuple[int, ...]
    finish_reason: str
    logprobs: list[list[float]]


class FullOracle:
    """One token at a time by full forwards: penalties, bias, bans, filters and stops as their texts read."""

    def __init__(self, model: Any) -> None:
        self._oracle = oracle_of(model)
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        key = tuple(ids)
        if key not in self._known:
            self._known[key] = self._oracle.logits(key)
        return self._known[key]

    def run(self, prompt: Sequence[int], params: Any) -> Plain:
        ids, rows = list(prompt), []
        while True:
            raw = self.logits(ids)
            output = ids[len(prompt) :]
            scores = adjusted(raw.tolist(), prompt, output, params)
            token = scores.index(max(scores)) if params.is_greedy else draw(scores, len(ids), params)
            ids.append(token)
            rows.append(raw.log_softmax(-1).tolist())
            count = len(ids) - len(prompt)
            if token in params.stop_token_ids and count >= params.min_new_tokens:
                return Plain(tuple(ids[len(prompt) :]), "stop", rows)
            if count == params.max_new_tokens:
                return Plain(tuple(ids[len(prompt) :]), "length", rows)


@cache
def full_oracle(model: Any) -> FullOracle:
    """One per model: what it computed once stays known."""
    return FullOracle(model)


def adjusted(
    logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], params: Any
) -> list[float]:
    """The logits after `prompt + output`, by the definition of each option."""
    out = list(logits)
    for token in range(len(out)):
        if token in prompt or token in output:
            strength = params.repetition_penalty
            out[token] = out[token] / strength if out[token] > 0 else out[token] * strength
        out[token] -= params.frequency_penalty * list(output).count(token)
        out[token] -= params.presence_penalty * (token in output)
        out[token] += params.logit_bias.get(token, 0.0)
        if len(output) < params.min_new_tokens and token in params.stop_token_ids:
            out[token] = -float("inf")
    return out


def kept_tokens(probs: Sequence[float], params: Any) -> list[int]:
    """Top-k, then top-p of what is left, then min-p."""
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    if params.top_k > 0:
        order = order[: params.top_k]
    total, mass, kept = sum(probs[token] for token in order), 0.0, []
    for token in order:
        if params.top_p < 1 and mass >= params.top_p * total:
            break
        kept.append(token)
        mass += probs[token]
    return [token for token in kept if probs[token] >= params.min_p * probs[order[0]]]


def draw(scores: Sequence[float], position: int, params: Any) -> int:
    """The token at the coin of (seed, position)."""
    probs = (torch.tensor(scores, dtype=torch.float64) / params.temperature).softmax(-1).tolist()
    kept = set(kept_tokens(probs, params))
    weights = torch.tensor([p if token in kept else 0.0 for token, p in enumerate(probs)])
    coin = position_coins(torch.tensor([params.seed]), torch.tensor([position])).double()
    return int(inverse_cdf(weights.double()[None], coin)[0])


def check_surface(engine: Any, prompts: list, params: list) -> list:
    """Generate, and demand tokens, reasons and log-probabilities of plain decoding. Returns the completions."""
    oracle = full_oracle(engine.model)
    completions = engine.generate(prompts, params)
    for prompt, param, done in zip(prompts, params, completions, strict=True):
        wanted = oracle.run(prompt, param)
        assert (done.output_ids, done.finish_reason) == wanted[:2], param
        check_logprobs(done, wanted, param)
    return completions


def check_logprobs(done: Any, wanted: Plain, params: Any) -> None:
    """One entry per output token, of the raw logits (fp32, hence the tolerance)."""
    count = len(done.output_ids) if params.logprobs else 0
    assert (len(done.logprobs), len(done.top_logprobs)) == (count, count)
    for token, found, top, row in zip(
        done.output_ids, done.logprobs, done.top_logprobs, wanted.logprobs, strict=False
    ):
        assert abs(found - row[token]) < 1e-4
        best = sorted(range(VOCAB), key=lambda t: -row[t])[: params.top_logprobs]
        assert list(top) == best
        assert all(abs(value - row[t]) < 1e-4 for t, value in top.items())


# -- engines at rest and under pressure ----------------------------------------------------------------------


def count_retractions(engine: Any) -> list:
    """A list that grows by (request, steps in flight for it, whether its prompt was partly computed)."""
    planner, seen = engine.scheduler.planner, []
    retract = planner.retract

    def counted(req: Any) -> None:
        seen.append((req.request_id, req.num_in_flight, req.kv_committed_len < len(req.fill_ids)))
        retract(req)
        assert req.num_in_flight == 0

    planner.retract = counted
    return seen


def assert_at_rest(engine: Any, *, drained: bool = True) -> None:
    """Nothing runs or waits, nothing is locked, and free and cached pages are all the pages there are.

    `drained=False`: a step may still be in flight, for requests that have ended.
    """
    scheduler, cache = engine.scheduler, engine.scheduler.cache
    assert not scheduler.planner.live
    assert not scheduler.planner.waiting
    assert scheduler.planner.chunked is None
    assert not (drained and scheduler.result_queue)
    nodes = cache.prefix._nodes()
    assert all(node.locks == 0 for node in nodes)
    assert cache.prefix.num_pages == cache.prefix.num_evictable == len(nodes)
    pages = sorted([*cache.pages._free, *(node.page for node in nodes)])
    assert pages == list(range(1, cache.pages.num_pages))
    assert sorted(cache.rows._free) == list(range(1, cache.rows.num_rows))
    kept = sorted([*cache.snapshots._free, *(node.state_row for node in nodes if node.state_row)])
    assert kept == list(range(cache.snapshots.first, cache.snapshots.num_rows))
    for pool in (cache.target_states, cache.draft_states):
        assert not any(bool(buffer[0].any()) for buffer in pool.buffers()), "row 0 is the state of no text"
