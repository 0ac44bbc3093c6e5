"""The order of the runs: in each case every contender once to warm up, then all of them in turn, again and again.

So whatever else the machine does meets all contenders alike, and a ratio can be taken within each round.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spec_v2.bench.contenders import Contender, Sample, joined


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts of one kind, as token ids, `at_a_time` of them (all, if 0) in a batch. `ignore_eos`: answers go on past the
    model's own end, so that all are equally long; what it says then is not what users read."""

    kind: str
    prompts: tuple[tuple[int, ...], ...]
    at_a_time: int = 0
    ignore_eos: bool = True

    @property
    def batch_size(self) -> int:
        return self.at_a_time or len(self.prompts)

    @property
    def batches(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The last one may be smaller."""
        starts = range(0, len(self.prompts), self.batch_size)
        return tuple(self.prompts[start : start + self.batch_size] for start in starts)


Samples = dict[tuple[Case, str], list[Sample]]


def num_runs(contenders: Sequence[Contender], cases: Sequence[Case], repetitions: int) -> int:
    """How many runs `measure` makes, those that warm up included."""
    return sum(contender.fits(case.batch_size) for case in cases for contender in contenders) * (
        repetitions + 1
    )


def measure(
    contenders: Sequence[Contender],
    cases: Sequence[Case],
    *,
    max_new_tokens: int,
    repetitions: int,
    done: Callable[[], None],
    round_done: Callable[[Samples], None] = lambda samples: None,
) -> Samples:
    """`repetitions` samples of every contender in every case that it fits.

    `done` is called after each run, `round_done` with all samples so far after each round that counts.
    """
    samples: Samples = {}
    for case in cases:
        present = [contender for contender in contenders if contender.fits(case.batch_size)]
        for repetition in range(1 + repetitions):
            for contender in present:
                # the first round compiles, allocates and fills caches: one batch is enough for that
                batches = case.batches if repetition > 0 else case.batches[:1]
                runs = [contender.run(b, max_new_tokens, ignore_eos=case.ignore_eos) for b in batches]
                sample = joined(runs)
                if repetition > 0:
                    samples.setdefault((case, contender.name), []).append(sample)
                done()
            if repetition > 0:
                round_done(samples)
    return samples
