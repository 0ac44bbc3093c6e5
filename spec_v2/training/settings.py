"""What one training run is told. Nothing here needs torch, so that `--help` is quick."""

from dataclasses import dataclass

KIND_NAMES = ("eagle3", "eagle", "mtp", "frozen_kv_mtp", "standalone")
"""The kinds of draft models that can be trained, the most useful first; `kinds` says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How texts are made. `wave`: prompts that run at a time, one shard. `greedy_share`: answers that take the most
    likely token; the others are sampled at one of `temperatures`. Lengths in tokens."""

    wave: int = 1024
    greedy_share: float = 0.5
    temperatures: tuple[float, ...] = (0.6, 0.7, 0.8, 0.9, 1.0)
    prompt_temperature: float = 0.9
    min_prompt_tokens: int = 4
    max_prompt_tokens: int = 128
    max_answer_tokens: int = 384
    heldout_tokens: int = 256
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a draft model is trained. None: the kind's own, or no limit.

    `num_steps`: unrolled draft steps; `step_decay`: weight of a step's loss relative to the step before it.
    `draft_vocab_size`: ids that an EAGLE-3 head drafts from. `lr`: peak of a cosine over `time_limit` seconds or
    `max_steps`, whichever comes first; `stop_after`: steps after which one call ends, to be resumed. `ema`: decay of averaged weights, 0 for none. `measure_from`: tokens after which
    the held-out texts are measured first, then at each doubling. `save_every`: seconds.
    """

    num_steps: int | None = None
    step_decay: float = 0.8
    draft_vocab_size: int = 8192
    tokens_per_batch: int = 32768
    max_steps: int | None = None
    stop_after: int | None = None
    time_limit: float | None = None
    lr: float | None = None
    warmup_steps: int = 100
    weight_decay: float = 0.01
    clip: float = 1.0
    ema: float = 0.0
    seed: int = 0
    log_every: int = 25
    save_every: float = 60.0
    measure_from: int = 1_000_000
    compile: bool = True
