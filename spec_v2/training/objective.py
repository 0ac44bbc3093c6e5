"""The loss: soft cross-entropy against the target's own distribution, at the positions that drafting ever sees."""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spec_v2.training.capture import Target
from spec_v2.training.kinds import Kind
from spec_v2.training.shards import Batch

_LOG = logging.getLogger("spec_v2")
LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class StepLosses:
    """By draft step: `loss`, its mean in nats, and `agreement`, the share of chains whose most likely draft is the
    target's most likely token; empty where it was not asked for."""

    loss: Float[Tensor, " steps"]
    agreement: Float[Tensor, " agreed"]


def soft_cross_entropy(logits: Float[Tensor, "m v"], probs: Float[Tensor, "m v"]) -> Float[Tensor, ""]:
    """Mean over rows of the cross-entropy of a draft's `logits` against the target's `probs`."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return (wide.logsumexp(-1) - (probs * wide).sum(-1)).mean()


def run_batch(
    kind: Kind,
    head: Any,
    target: Target,
    batch: Batch,
    vocabulary: Int[Tensor, " v"] | None,
    *,
    step_decay: float = 1.0,
    loss_function: LossFunction = soft_cross_entropy,
    backward: bool = False,
    with_agreement: bool = False,
) -> StepLosses:
    """Run target and draft model over a batch; with `backward`, leave the gradients of the weighted mean of the steps'
    losses in the parameters. Logits are computed where a draft is asked for and nowhere else, one step at a time.
    """
    captured = target(batch.tokens)
    probs = target.probs(captured.hidden.flatten(0, 1)[batch.label_rows], vocabulary)
    with torch.set_grad_enabled(backward):
        states = kind.states(head, batch, captured, len(batch.chains))
    weights = [step_decay**step for step in range(len(states))]
    losses, agreement, gradients = [], [], []
    for step, (state, (starts, labels)) in enumerate(zip(states, batch.chains, strict=True)):
        leaf = state.detach().requires_grad_(
            backward
        )  # a step's logits are freed before the next step's are made
        wanted = probs.index_select(0, labels)
        with torch.set_grad_enabled(backward):
            logits = kind.readout(head, leaf.flatten(0, 1).index_select(0, starts), step)
            loss = loss_function(logits, wanted) if len(starts) else logits.sum()
        if backward:
            (loss * (weights[step] / sum(weights))).backward()
            gradients.append(leaf.grad)
        losses.append(loss.detach())
        if with_agreement:
            agreement.append((logits.argmax(-1) == wanted.argmax(-1)).float().mean())
    if backward:
        torch.autograd.backward(states, gradients)
    per_step = torch.stack(losses)
    agreed = torch.stack(agreement) if agreement else per_step.new_empty(0)
    return StepLosses(per_step, agreed.nan_to_num())


def compiled_or_not(wanted: bool, device: torch.device, vocab_size: int) -> LossFunction:
    """The loss, compiled to two passes over the logits where torch can compile here; else as it is written."""
    if not wanted:
        return soft_cross_entropy
    compiled: LossFunction = torch.compile(soft_cross_entropy)
    try:
        logits = torch.zeros(64, vocab_size, dtype=torch.bfloat16, device=device, requires_grad=True)
        probs = torch.ones_like(logits, requires_grad=False).softmax(-1)
        for tensor in (logits, probs):
            torch._dynamo.mark_dynamic(tensor, 0)  # batches differ in their number of rows
        compiled(logits, probs).backward()
    except Exception as error:  # noqa: BLE001 - no compiler, no driver: whatever it is, the loss is right without
        _LOG.warning("torch.compile does not work here (%s); training goes on without it", _first_line(error))
        with contextlib.suppress(Exception):
            torch.compiler.reset()
        return soft_cross_entropy
    return compiled


def expected_accept_length(agreement: Float[Tensor, " steps"]) -> float:
    """Tokens per step of a chain, bonus included, if each draft is right as often as `agreement` says."""
    return 1.0 + float(agreement.double().cumprod(0).sum())


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
