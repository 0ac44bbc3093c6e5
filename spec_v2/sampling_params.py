"""How one request wants its tokens chosen and when it wants to stop."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_SEED = 2**63 - 1
"""Largest seed: what a signed 64-bit integer holds."""

MIN_TEMPERATURE = 1e-6
"""Smallest temperature other than 0; below it, dividing logits by the temperature overflows float32."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The options of one request. A value that can't be honoured raises ValueError naming the option.

    max_new_tokens: most tokens to generate, at least 1.
    temperature: divides the logits; 0 takes the most likely token (greedy).
    top_p: sample among the most likely tokens that together have this probability, above 0 and up to 1.
    top_k: sample among this many most likely tokens; -1 is all of them.
    seed: 0..2**63-1 fixes the sampled tokens; None leaves the choice of a seed to the engine.
    stop_token_ids: generation ends after any of these; a list is accepted and stored as a tuple.
    ignore_eos: keep going past the model's own end-of-sequence tokens.
    """

    max_new_tokens: int = 128
    # int is spelled out for run-time type checkers, which don't let it stand in for float.
    temperature: float | int = 0.0
    top_p: float | int = 1.0
    top_k: int = -1
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not _is_int(self.max_new_tokens) or self.max_new_tokens < 1:
            raise _error("max_new_tokens", self.max_new_tokens, "give a whole number of at least 1")
        self._check_temperature()
        if not _is_finite(self.top_p) or not 0 < self.top_p <= 1:
            raise _error("top_p", self.top_p, "give a number above 0 and up to 1; 1.0 keeps every token")
        if not _is_int(self.top_k) or not (self.top_k == -1 or self.top_k >= 1):
            raise _error("top_k", self.top_k, "give a whole number of at least 1, or -1 for every token")
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed <= MAX_SEED):
            raise _error("seed", self.seed, "give a whole number from 0 to 2**63-1, or None")
        self._check_stop_token_ids()
        if not isinstance(self.ignore_eos, bool):
            raise _error("ignore_eos", self.ignore_eos, "give True or False")
        object.__setattr__(self, "temperature", float(self.temperature))
        object.__setattr__(self, "top_p", float(self.top_p))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @property
    def is_greedy(self) -> bool:
        """True when each token is the most likely one and no seed matters."""
        return self.temperature == 0

    def _check_temperature(self) -> None:
        value = self.temperature
        if not _is_finite(value) or value < 0:
            raise _error("temperature", value, "give a finite number of at least 0; 0 is greedy")
        if 0 < value < MIN_TEMPERATURE:
            raise _error("temperature", value, f"give 0 for greedy, or at least {MIN_TEMPERATURE}")

    def _check_stop_token_ids(self) -> None:
        remedy = "give a list or tuple of token ids, whole numbers of at least 0"
        if not isinstance(self.stop_token_ids, (list, tuple)):
            raise _error("stop_token_ids", self.stop_token_ids, remedy)
        for token_id in self.stop_token_ids:
            if not _is_int(token_id) or token_id < 0:
                raise _error("stop_token_ids", token_id, remedy)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _error(name: str, value: object, remedy: str) -> ValueError:
    return ValueError(f"{name} is {value!r}: {remedy}.")
