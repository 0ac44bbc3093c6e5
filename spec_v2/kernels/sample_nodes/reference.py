"""Temperature, top-k, top-p, min-p, then the first id whose running sum exceeds the coin."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInputs:
    """What sampling needs of each request. `temperatures` 0 is greedy, `top_ks` is at least 1.

    The two flags are host knowledge: whether every row is greedy, and whether any row filters.
    """

    temperatures: Float[Tensor, " b"]
    top_ks: Int[Tensor, " b"]
    top_ps: Float[Tensor, " b"]
    min_ps: Float[Tensor, " b"]
    seeds: Int[Tensor, " b"]
    all_greedy: bool
    any_filter: bool

    def to(self, device: torch.device) -> "SamplingInputs":
        """The same on `device`; the copy does not block the host."""
        return SamplingInputs(
            temperatures=self.temperatures.to(device, non_blocking=True),
            top_ks=self.top_ks.to(device, non_blocking=True),
            top_ps=self.top_ps.to(device, non_blocking=True),
            min_ps=self.min_ps.to(device, non_blocking=True),
            seeds=self.seeds.to(device, non_blocking=True),
            all_greedy=self.all_greedy,
            any_filter=self.any_filter,
        )


def sample_nodes_reference(
    logits: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], sampling: SamplingInputs
) -> Int[Tensor, "b n"]:
    """Both ways for every row, and the temperature says which one counts."""
    greedy = logits.argmax(-1)  # first maximum: ties go to the lowest id
    if sampling.all_greedy:
        return greedy
    b, n = positions.shape
    probs = node_probs(logits, sampling).flatten(0, 1)
    coins = position_coins_reference(sampling.seeds[:, None].expand(b, n), positions)
    sampled = inverse_cdf_reference(probs, coins.flatten().to(probs.dtype)).view(b, n)
    return torch.where(sampling.temperatures[:, None] > 0, sampled, greedy)


def node_probs(logits: Float[Tensor, "b n v"], sampling: SamplingInputs) -> Float[Tensor, "b n v"]:
    """`processed_probs` of every node, with the options of its request."""
    n = logits.shape[1]
    return processed_probs(
        logits.flatten(0, 1),
        sampling.temperatures.repeat_interleave(n),
        sampling.top_ks.repeat_interleave(n),
        sampling.top_ps.repeat_interleave(n),
        sampling.min_ps.repeat_interleave(n),
        any_filter=sampling.any_filter,
    ).view_as(logits)


def node_distributions_reference(
    logits: Float[Tensor, "b n v"], sampling: SamplingInputs
) -> Float[Tensor, "b n v"]:
    """`node_probs`, made to sum to 1; the arg-max alone for greedy requests."""
    probs = node_probs(logits, sampling)
    greedy = torch.zeros_like(probs).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    is_sampled = sampling.temperatures[:, None, None] > 0
    return torch.where(is_sampled, probs / probs.sum(-1, keepdim=True), greedy)


def processed_probs(
    logits: Float[Tensor, "r v"],
    temperatures: Float[Tensor, " r"],
    top_ks: Int[Tensor, " r"],
    top_ps: Float[Tensor, " r"],
    min_ps: Float[Tensor, " r"],
    *,
    any_filter: bool = True,
) -> Float[Tensor, "r v"]:
    """Probabilities after temperature, top-k, top-p of what top-k left, then min-p. Not renormalised at the end.

    fp32, or fp64 for an fp64 model. Of equal logits the lower id ranks first.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    scale = torch.where(temperatures > 0, temperatures, 1.0).to(wide.dtype)
    probs = (wide / scale[:, None]).softmax(-1)
    return filter_probs(probs, top_ks, top_ps, min_ps) if any_filter else probs


def filter_probs(
    probs: Float[Tensor, "r v"],
    top_ks: Int[Tensor, " r"],
    top_ps: Float[Tensor, " r"],
    min_ps: Float[Tensor, " r"],
) -> Float[Tensor, "r v"]:
    """Zero what the filters leave out; of equal probabilities the lower id ranks first."""
    ranked, ids = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    ranked = torch.where(ranks < top_ks[:, None], ranked, 0)
    before = ranked.cumsum(-1) - ranked  # mass of better tokens: the first one is always kept
    limit = top_ps.to(probs.dtype)[:, None] * ranked.sum(-1, keepdim=True)
    keep_all = top_ps[:, None] >= 1.0  # rounding must not drop the tail of an unfiltered row
    ranked = torch.where((before < limit) | keep_all, ranked, 0)
    ranked = torch.where(ranked >= min_ps.to(probs.dtype)[:, None] * ranked[:, :1], ranked, 0)
    return torch.zeros_like(probs).scatter(-1, ids, ranked)


def inverse_cdf_reference(weights: Float[Tensor, "r v"], coins: Float[Tensor, " r"]) -> Int[Tensor, " r"]:
    """A search in the running sum."""
    cdf = weights.cumsum(-1)
    total = cdf[:, -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))  # coin * total may round up to the total
    threshold = torch.minimum(coins[:, None] * total, below_total)
    return torch.searchsorted(cdf, threshold, right=True)[:, 0].clamp(max=weights.shape[1] - 1)


MASK32 = 0xFFFFFFFF


def position_coins_reference(
    seeds: Int[Tensor, "*shape"], positions: Int[Tensor, "*shape"], salt: int = 0
) -> Float[Tensor, "*shape"]:
    """The mixing rounds are the finaliser of MurmurHash3 (Appleby, public domain), in int64 arithmetic."""
    seeds = seeds ^ salt
    state = _mix((seeds & MASK32) ^ 0x9E3779B9)
    state = _mix(state ^ ((seeds >> 32) & MASK32))
    state = _mix((state + positions * 0x85EBCA77) & MASK32)
    return (state >> 8).to(torch.float32) / (1 << 24)


def _mix(x: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK32
    return x ^ (x >> 16)
