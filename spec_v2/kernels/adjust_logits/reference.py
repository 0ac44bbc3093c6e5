"""Count the tokens of each node's path on top of what the request has emitted, then apply the rules."""

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spec_v2.types import CountReset


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitInputs:
    """What each request of a batch changes. The three flags are host knowledge: whether any request does.

    `repetition` is 1 and the others 0 where a request asks for nothing. `bias_*`: one entry per biased token.
    `banned_*`: stop tokens of requests that have `min_new_tokens`; they are banned at positions below
    `allowed_from`.
    """

    repetition: Float[Tensor, " b"]
    presence: Float[Tensor, " b"]
    frequency: Float[Tensor, " b"]
    bias_rows: Int[Tensor, " e"]
    bias_tokens: Int[Tensor, " e"]
    bias_values: Float[Tensor, " e"]
    banned_rows: Int[Tensor, " s"]
    banned_tokens: Int[Tensor, " s"]
    allowed_from: Int[Tensor, " b"]
    any_penalty: bool
    any_bias: bool
    any_ban: bool

    @property
    def is_idle(self) -> bool:
        """True where the logits stay as they are."""
        return not (self.any_penalty or self.any_bias or self.any_ban)

    def to(self, device: torch.device) -> "LogitInputs":
        """The same on `device`; the copy does not block the host."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.type is not bool}
        return replace(self, **{name: t.to(device, non_blocking=True) for name, t in tensors.items()})


class TokenCounts:
    """Per row: which tokens the prompt has, and how often the output has each. Allocated on first use."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_rows, vocab_size)
        self._device = device
        self.in_prompt: Bool[Tensor, "rows v"] | None = None
        self.in_output: Int[Tensor, "rows v"] | None = None

    def reset(self, known: CountReset) -> None:
        """Begin requests from what is known of them."""
        if self.in_output is None:
            self.in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self.in_output = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        assert self.in_prompt is not None
        host = (known.rows, known.prompt_rows, known.prompt_tokens, known.output_rows, known.output_tokens)
        rows, prompt_rows, prompt_tokens, output_rows, output_tokens = (
            t.to(self._device, non_blocking=True) for t in host
        )
        self.in_prompt.index_fill_(0, rows, False)
        self.in_output.index_fill_(0, rows, 0)
        yes = torch.ones((), dtype=torch.bool, device=self._device)
        self.in_prompt.index_put_((prompt_rows, prompt_tokens), yes)
        self.in_output.index_put_((output_rows, output_tokens), yes.int(), accumulate=True)

    def add(self, rows: Int[Tensor, " b"], predict: Int[Tensor, "b w"]) -> None:
        """Count emitted tokens; -1 counts nothing."""
        if self.in_output is None:
            return
        index = (rows[:, None].expand_as(predict), predict.clamp(min=0))
        self.in_output.index_put_(index, (predict >= 0).int(), accumulate=True)


def adjust_logits_reference(
    logits: Float[Tensor, "b n v"],
    *,
    rows: Int[Tensor, " b"],
    tokens: Int[Tensor, "b n"],
    visible: Bool[Tensor, "b n n"],
    positions: Int[Tensor, "b n"],
    inputs: LogitInputs,
    counts: TokenCounts,
) -> Float[Tensor, "b n v"]:
    """New logits. `positions`: of the token that each node's logits choose. `visible`: ancestors and self."""
    if inputs.is_idle:
        return logits
    if inputs.any_penalty:
        logits = _penalise(logits, rows, tokens, visible, inputs, counts)
    if inputs.any_bias:
        bias = torch.zeros_like(logits[:, 0])
        index = (inputs.bias_rows, inputs.bias_tokens)
        logits = logits + bias.index_put(index, inputs.bias_values.to(bias.dtype), accumulate=True)[:, None]
    if inputs.any_ban:
        banned = torch.zeros_like(logits[:, 0], dtype=torch.bool)
        yes = torch.ones((), dtype=torch.bool, device=logits.device)
        banned = banned.index_put((inputs.banned_rows, inputs.banned_tokens), yes)
        early = positions < inputs.allowed_from[:, None]
        logits = torch.where(banned[:, None] & early[:, :, None], -torch.inf, logits)
    return logits


def _penalise(
    logits: Float[Tensor, "b n v"],
    rows: Int[Tensor, " b"],
    tokens: Int[Tensor, "b n"],
    visible: Bool[Tensor, "b n n"],
    inputs: LogitInputs,
    counts: TokenCounts,
) -> Float[Tensor, "b n v"]:
    assert counts.in_output is not None
    assert counts.in_prompt is not None
    n = tokens.shape[1]
    # the root is in the row's counts already; a path adds the drafts below it
    on_path = visible.clone()
    on_path[:, :, 0] = False
    emitted = counts.in_output[rows][:, None].expand(-1, n, -1)
    emitted = emitted.scatter_add(2, tokens[:, None].expand(-1, n, -1), on_path.int())
    seen = (emitted > 0) | counts.in_prompt[rows][:, None]
    strength = inputs.repetition.to(logits.dtype)[:, None, None]
    logits = torch.where(seen, torch.where(logits > 0, logits / strength, logits * strength), logits)
    logits = logits - inputs.frequency.to(logits.dtype)[:, None, None] * emitted
    return logits - inputs.presence.to(logits.dtype)[:, None, None] * (emitted > 0)
