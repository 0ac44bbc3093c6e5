"""Who competes: our engine under each algorithm and schedule, and transformers' own ways to generate.

All get the same token ids, are greedy, go on past any end-of-sequence token or all end there, and use as many threads. On a CPU
only one at a time may own helper threads, see `spec_v2.scheduler.openmp`: an engine's run is over when its
forward stream has let go of its own, and when it begins it takes the main thread's away.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spec_v2.bench.cost_model import StepTimes, decode_seconds, joined_times, step_times
from spec_v2.bench.settings import name_of
from spec_v2.completion import Completion
from spec_v2.engine import Engine
from spec_v2.observability.metrics import SpecMetrics
from spec_v2.sampling_params import SamplingParams

Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed run over a batch. `decode_seconds`: from the first tokens, `first_tokens` of them, to the last."""

    completions: tuple[Completion, ...]
    whole_seconds: float
    decode_seconds: float
    first_tokens: int
    steps: StepTimes | None = None

    @property
    def tokens(self) -> int:
        return sum(c.completion_tokens for c in self.completions)

    @property
    def whole_rate(self) -> float:
        """Tokens per second, the prompts' forward included."""
        return self.tokens / self.whole_seconds

    @property
    def decode_rate(self) -> float:
        """Tokens per second of the decode steps alone; of everything, where all tokens came at once."""
        if self.tokens == self.first_tokens:
            return self.whole_rate
        return (self.tokens - self.first_tokens) / self.decode_seconds


def joined(samples: Sequence[Sample]) -> Sample:
    """Runs over several batches, one after the other, as one."""
    steps = [sample.steps for sample in samples if sample.steps is not None]
    return Sample(
        tuple(c for sample in samples for c in sample.completions),
        sum(sample.whole_seconds for sample in samples),
        sum(sample.decode_seconds for sample in samples),
        sum(sample.first_tokens for sample in samples),
        joined_times(steps) if steps else None,
    )


class Contender(ABC):
    """Abstract. `algorithm` and `schedule` are None where they are not ours."""

    name: str
    algorithm: str | None = None
    schedule: str | None = None

    def fits(self, batch_size: int) -> bool:
        """Whether it can take that many prompts at a time."""
        return True

    @abstractmethod
    def run(self, prompts: Prompts, max_new_tokens: int, *, ignore_eos: bool = True) -> Sample:
        """Generate, and say how long it took."""


class EngineContender(Contender):
    """One engine: an algorithm under a schedule. Whoever opened the engine closes it."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine = name, engine
        self.algorithm = name_of(engine.server_args)
        self.schedule = engine.server_args.schedule

    @property
    def draft_passes(self) -> int:
        """Forwards that grow a tree; the first drafts come from the step before. NGRAM and ORACLE look once, and so
        does a worker whose modules have drafted already; a drafter without KV of its own drafts all levels here."""
        args = self.engine.server_args
        if not args.algorithm.needs_draft_model() or args.enable_multi_layer_eagle:
            return 1
        return max(1, args.num_steps - 1) if args.algorithm.has_draft_kv() else args.num_steps

    def run(self, prompts: Prompts, max_new_tokens: int, *, ignore_eos: bool = True) -> Sample:
        params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
        self.engine.trace.clear()
        start = time.perf_counter()
        completions = self.engine.generate(prompts, params, progress=False)
        whole = time.perf_counter() - start
        self.engine.scheduler.forward_stream.synchronize()
        spans, num_needed = self.engine.trace.spans(), max(c.spec.verify_ct for c in completions)
        steps, decode = step_times(spans, num_needed), decode_seconds(spans, num_needed)
        return Sample(tuple(completions), whole, decode, len(prompts), steps)


class TransformersContender(Contender):
    """transformers' `generate` with some options. `speculates`: then it takes one prompt at a time. `eos_token_ids`: the
    model's, whose own generation config has none here."""

    def __init__(
        self,
        name: str,
        model: Any,
        num_threads: int | None,
        *,
        speculates: bool = False,
        eos_token_ids: Collection[int] = (),
        **options: Any,
    ) -> None:
        self.name = f"transformers {name}"
        self.model = model
        self.options = options
        self._num_threads = num_threads or torch.get_num_threads()
        self._speculates = speculates
        self._eos_token_ids = tuple(eos_token_ids)

    def fits(self, batch_size: int) -> bool:
        return batch_size == 1 or not self._speculates

    def run(self, prompts: Prompts, max_new_tokens: int, *, ignore_eos: bool = True) -> Sample:
        eos = () if ignore_eos else self._eos_token_ids
        width = max(map(len, prompts))
        ids = torch.tensor([(0,) * (width - len(p)) + p for p in prompts], device=self.model.device)
        mask = torch.tensor([(0,) * (width - len(p)) + (1,) * len(p) for p in prompts], device=ids.device)
        clock, threads = TokenClock(), torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            start = time.perf_counter()
            output = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                pad_token_id=0,  # never looked at: what follows an end is cut off
                eos_token_id=list(eos) or None,
                do_sample=False,
                use_cache=True,
                max_new_tokens=max_new_tokens,
                streamer=clock,
                **self.options,
            )
            whole = time.perf_counter() - start
        finally:
            torch.set_num_threads(threads)
        # one prompt's counts per step; the first step of a speculating run is at once prefill and verification
        spec = SpecMetrics(accept_lens=tuple(clock.counts[1:])) if self._speculates else SpecMetrics()
        rows = [until(row, eos) for row in output[:, width:].tolist()]
        completions = tuple(_completion(p, row, eos, spec) for p, row in zip(prompts, rows, strict=True))
        return Sample(completions, whole, clock.times[-1] - clock.times[0], clock.counts[0])


class TokenClock:
    """A transformers streamer that notes when tokens come, and how many at a time."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []
        self._saw_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._saw_prompt:
            self.times.append(time.perf_counter())
            self.counts.append(value.numel())
        self._saw_prompt = True

    def end(self) -> None:
        """Nothing to do: generate returns."""


def until(ids: list[int], ends: Collection[int]) -> list[int]:
    """The ids up to the first of `ends`, which is the last one kept."""
    return next((ids[: place + 1] for place, token in enumerate(ids) if token in ends), ids)


def _completion(
    prompt: tuple[int, ...], ids: list[int], ends: Collection[int], spec: SpecMetrics
) -> Completion:
    reason = "stop" if ids[-1] in ends else "length"
    return Completion(
        text="", output_ids=tuple(ids), finish_reason=reason, prompt_tokens=len(prompt), spec=spec
    )
