"""How each request of a batch samples: host tensors, built when the batch changes, uploaded by the launch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spec_v2.kernels.adjust_logits import LogitInputs
from spec_v2.kernels.sample_nodes import SamplingInputs
from spec_v2.sampling_params import SamplingParams

if TYPE_CHECKING:
    from spec_v2.scheduler.schedule_batch import Request

NO_LOGPROBS = -1


@dataclass(frozen=True, slots=True)
class SamplingBatchInfo:
    """`num_logprobs`: most likely tokens wanted per place, at most over the batch; -1 where nobody wants any."""

    sampling: SamplingInputs
    logits: LogitInputs
    num_logprobs: int

    @classmethod
    def from_requests(cls, reqs: "Sequence[Request]", pin: bool, padding: int = 0) -> "SamplingBatchInfo":
        """Of a batch that is filled up with `padding` greedy rows, which want nothing."""
        wanted = [r.params.top_logprobs for r in reqs if r.params.logprobs]
        top = max(wanted, default=NO_LOGPROBS)
        return cls(_sampling(reqs, pin, padding), _logits(reqs, pin, padding), top)

    @property
    def has_fixed_shape(self) -> bool:
        """Whether all that sampling does has a shape that only the number of rows decides."""
        return self.logits.is_idle and self.num_logprobs == NO_LOGPROBS

    def to(self, device: torch.device) -> "SamplingBatchInfo":
        """The same on `device`; the copies do not block the host."""
        return SamplingBatchInfo(self.sampling.to(device), self.logits.to(device), self.num_logprobs)

    def copy_for_forward(self) -> "SamplingBatchInfo":
        """A copy that only the forward sees."""
        return SamplingBatchInfo(self.sampling, self.logits, self.num_logprobs)


def host_tensor(values: Sequence[float | int], dtype: torch.dtype, pin: bool) -> Tensor:
    """A new host tensor; pinned, its upload does not block. Never written again: a launch may read it later."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory() if pin else tensor


def _sampling(reqs: "Sequence[Request]", pin: bool, padding: int) -> SamplingInputs:
    params = [r.params for r in reqs] + [SamplingParams()] * padding
    no_limit = torch.iinfo(torch.int64).max
    return SamplingInputs(
        temperatures=host_tensor([p.temperature for p in params], torch.float32, pin),
        top_ks=host_tensor([p.top_k if p.top_k > 0 else no_limit for p in params], torch.long, pin),
        top_ps=host_tensor([p.top_p for p in params], torch.float32, pin),
        min_ps=host_tensor([p.min_p for p in params], torch.float32, pin),
        seeds=host_tensor([r.seed for r in reqs] + [0] * padding, torch.long, pin),
        all_greedy=all(p.is_greedy for p in params),
        any_filter=any(not p.is_greedy and p.filters for p in params),
    )


def _logits(reqs: "Sequence[Request]", pin: bool, padding: int) -> LogitInputs:
    params = [r.params for r in reqs] + [SamplingParams()] * padding
    bias = [(i, token, value) for i, p in enumerate(params) for token, value in p.logit_bias.items()]
    banned = [(i, t) for i, r in enumerate(reqs) if r.params.min_new_tokens for t in sorted(r.stop_token_ids)]
    allowed_from = [len(r.prompt_ids) + r.params.min_new_tokens for r in reqs] + [0] * padding
    return LogitInputs(
        repetition=host_tensor([p.repetition_penalty for p in params], torch.float32, pin),
        presence=host_tensor([p.presence_penalty for p in params], torch.float32, pin),
        frequency=host_tensor([p.frequency_penalty for p in params], torch.float32, pin),
        bias_rows=host_tensor([i for i, _, _ in bias], torch.long, pin),
        bias_tokens=host_tensor([token for _, token, _ in bias], torch.long, pin),
        bias_values=host_tensor([value for _, _, value in bias], torch.float32, pin),
        banned_rows=host_tensor([i for i, _ in banned], torch.long, pin),
        banned_tokens=host_tensor([token for _, token in banned], torch.long, pin),
        allowed_from=host_tensor(allowed_from, torch.long, pin),
        any_penalty=any(p.penalises for p in params),
        any_bias=bool(bias),
        any_ban=bool(banned),
    )
