"""How one request wants its tokens chosen and when it wants to stop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_SEED = 2**63 - 1
"""Largest seed: what a signed 64-bit integer holds."""

MAX_BIAS = 1e30
"""Largest logit bias: far beyond any logit, and still finite in float32 and bfloat16."""

MAX_TOP_LOGPROBS = 20
"""Most likely tokens that can be asked for in one place."""

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
    stop: generation ends where the text contains any of these strings; the text is cut before it, the token
        ids keep the token that completed it. One string, or a list or tuple of them.
    min_new_tokens: end-of-sequence and stop tokens are impossible, and stop strings ignored, before this many.
    min_p: drop tokens less likely than this fraction of the most likely one, 0 to 1; applied after top_p.
    repetition_penalty: divides positive logits of tokens seen in prompt or output, multiplies negative ones;
        above 0, 1 is none.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens in the output, once or once per
        occurrence; -2 to 2, 0 is none.
    logit_bias: token id -> number added to its logit.
    logprobs: also give the log-probability of each token, from the model's own logits.
    json_schema, regex, ebnf: refused by name; there is no constrained decoding here.
    top_logprobs: with logprobs, also give this many most likely tokens in each place, 0 to 20.
    """

    max_new_tokens: int = 128
    # int is spelled out for run-time type checkers, which don't let it stand in for float.
    temperature: float | int = 0.0
    top_p: float | int = 1.0
    top_k: int = -1
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: str | tuple[str, ...] = ()
    min_new_tokens: int = 0
    min_p: float | int = 0.0
    repetition_penalty: float | int = 1.0
    presence_penalty: float | int = 0.0
    frequency_penalty: float | int = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # a dict has no hash
    logprobs: bool = False
    top_logprobs: int = 0
    json_schema: None = None
    regex: None = None
    ebnf: None = None

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
        self._check_stop()
        for name in ("ignore_eos", "logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise _error(name, getattr(self, name), "give True or False")
        self._check_min_new_tokens()
        self._check_penalties()
        self._check_logit_bias()
        for name in ("json_schema", "regex", "ebnf"):
            if getattr(self, name) is not None:
                raise _error(name, getattr(self, name), "give None: there is no constrained decoding here")
        if not _is_int(self.top_logprobs) or not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            remedy = f"give a whole number from 0 to {MAX_TOP_LOGPROBS}"
            raise _error("top_logprobs", self.top_logprobs, remedy)
        if self.top_logprobs and not self.logprobs:
            raise _error("top_logprobs", self.top_logprobs, "set logprobs=True too, or leave it at 0")
        object.__setattr__(self, "temperature", float(self.temperature))
        object.__setattr__(self, "top_p", float(self.top_p))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @property
    def filters(self) -> bool:
        """True when some tokens are left out before sampling."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalises(self) -> bool:
        """True when the tokens seen so far change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

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

    def _check_stop(self) -> None:
        stops: object = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, (list, tuple)) or any(not isinstance(s, str) or not s for s in stops):
            raise _error("stop", self.stop, "give a string that is not empty, or a list or tuple of them")
        object.__setattr__(self, "stop", tuple(stops))

    def _check_min_new_tokens(self) -> None:
        value = self.min_new_tokens
        if not _is_int(value) or not 0 <= value <= self.max_new_tokens:
            remedy = f"give a whole number from 0 to max_new_tokens, here {self.max_new_tokens}"
            raise _error("min_new_tokens", value, remedy)

    def _check_penalties(self) -> None:
        if not _is_finite(self.min_p) or not 0 <= self.min_p <= 1:
            raise _error("min_p", self.min_p, "give a number from 0 to 1; 0 keeps every token")
        if not _is_finite(self.repetition_penalty) or not 0 < self.repetition_penalty <= 2:
            raise _error("repetition_penalty", self.repetition_penalty, "give a number above 0, up to 2")
        for name in ("presence_penalty", "frequency_penalty"):
            if not _is_finite(getattr(self, name)) or not -2 <= getattr(self, name) <= 2:
                raise _error(name, getattr(self, name), "give a number from -2 to 2; 0 is none")
        for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            object.__setattr__(self, name, float(getattr(self, name)))

    def _check_logit_bias(self) -> None:
        remedy = f"give a dict from token ids, whole numbers of at least 0, to numbers from -{MAX_BIAS} to {MAX_BIAS}"
        if not isinstance(self.logit_bias, Mapping):
            raise _error("logit_bias", self.logit_bias, remedy)
        for token_id, value in self.logit_bias.items():
            if not _is_int(token_id) or token_id < 0 or not _is_finite(value) or abs(value) > MAX_BIAS:
                raise _error("logit_bias", {token_id: value}, remedy)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))


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
