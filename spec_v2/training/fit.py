"""The training loop of one draft model. It can be cut at any time and goes on from its last save."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_v2.observability.progress import progress_bar
from spec_v2.training.capture import Target, with_fused_norms
from spec_v2.training.checkpoint import write_checkpoint
from spec_v2.training.kinds import Kind, draftable_table, trainable
from spec_v2.training.objective import compiled_or_not, expected_accept_length, run_batch
from spec_v2.training.optimizer import MasterAdamW, lr_at
from spec_v2.training.settings import Settings
from spec_v2.training.shards import Batch, Texts, make_batch, most_frequent, plan_batches

STATE = "state"
PROGRESS = f"{STATE}/progress.json"


@dataclass(slots=True)
class Progress:
    """How far a run is. `seconds` of training over all its parts; `batch`: the next one of `epoch`."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    epoch: int = 0
    batch: int = 0
    next_measure: int = 0


class Run:
    """One draft model in training: everything that a step reads and a save writes."""

    def __init__(
        self,
        kind: Kind,
        model: Any,
        texts: Texts,
        heldout: Texts | None,
        settings: Settings,
        folder: Path,
        start_from: Path | None = None,
    ) -> None:
        """`start_from`: a folder with weights to begin from, in place of fresh ones."""
        self.kind, self.texts, self.settings, self.folder = kind, texts, settings, folder
        self.device = model.device
        self.num_steps = settings.num_steps or kind.num_steps
        self.target = Target(with_fused_norms(model), kind.aux_layers(model), kind.kv_layers(model))
        vocab_size = int(model.config.vocab_size)
        self.head, self.vocabulary = self._begin(model, start_from)
        self.draftable = draftable_table(self.vocabulary, vocab_size)
        parameters = trainable(self.head, model)
        for parameter in parameters.values():
            parameter.requires_grad_()
        self.optimizer = MasterAdamW(
            parameters, weight_decay=settings.weight_decay, clip=settings.clip, ema=settings.ema
        )
        self.loss_function = compiled_or_not(
            settings.compile and self.device.type == "cuda",
            self.device,
            vocab_size if self.vocabulary is None else len(self.vocabulary),
        )
        self.heldout = list(self._batches_of(heldout)) if heldout is not None else []
        self.progress = Progress(next_measure=settings.measure_from)
        self.curve = folder / "curve.jsonl"

    def _begin(self, model: Any, start_from: Path | None) -> tuple[Any, Tensor | None]:
        """The draft model, and the ids that it drafts from; None for all."""
        kind, settings, vocab_size = self.kind, self.settings, int(model.config.vocab_size)
        if start_from is not None:
            head = with_fused_norms(kind.load(start_from, model, self.num_steps))
            return head, getattr(head, "target_ids", None)
        vocabulary = None
        if kind.reduces_vocabulary and settings.draft_vocab_size < vocab_size:
            eos = model.config.eos_token_id
            always = [eos] if isinstance(eos, int) else list(eos or ())
            vocabulary = most_frequent(self.texts, vocab_size, settings.draft_vocab_size, always)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(settings.seed)
            head = with_fused_norms(kind.build(model, vocabulary, self.num_steps))
        return head, vocabulary.to(self.device) if vocabulary is not None else None

    # -- the loop --------------------------------------------------------------------------------------------

    def train(self, *, progress: bool | None = None) -> None:
        """Train to the end of the settings' time or steps. Saves at intervals, at the end, and when interrupted."""
        done, limit = self.progress, self.settings.time_limit
        total = round(limit) if limit is not None else self.settings.max_steps or 0
        unit = "s" if limit is not None else "step"
        clock, last_save = time.monotonic() - done.seconds, time.monotonic()
        batches, last_step = self._upload_ahead(), done.step + (self.settings.stop_after or sys.maxsize)
        try:
            with progress_bar(total, unit, progress) as bar:
                while self._share_done() < 1 and done.step < last_step:
                    self._step(next(batches))
                    done.seconds = time.monotonic() - clock
                    if done.tokens >= done.next_measure and self.heldout:
                        self._measure()
                    if time.monotonic() - last_save > self.settings.save_every:
                        self.save()
                        last_save = time.monotonic()
                    bar.update(int(done.seconds if limit is not None else done.step) - bar.n)
            if self.heldout:
                self._measure()
        finally:
            self.save()

    def _step(self, batch: Batch) -> None:
        settings, done = self.settings, self.progress
        logs = done.step % settings.log_every == 0
        losses = run_batch(
            self.kind,
            self.head,
            self.target,
            batch,
            self.vocabulary,
            step_decay=settings.step_decay,
            loss_function=self.loss_function,
            backward=True,
            with_agreement=logs,
        )
        lr = lr_at(self._share_done(), done.step, settings.lr or self.kind.lr, settings.warmup_steps)
        norm = self.optimizer.step(lr)
        done.step += 1
        done.tokens += batch.num_tokens
        if logs:  # the only place that waits for the device
            self._log(
                lr=lr,
                grad_norm=round(float(norm), 4),
                loss=_rounded(losses.loss),
                agreement=_rounded(losses.agreement),
                expected_accept_length=round(expected_accept_length(losses.agreement), 4),
            )

    def _share_done(self) -> float:
        """Of the run, 0 to 1, by time or by steps, whichever is further."""
        limit, steps = self.settings.time_limit, self.settings.max_steps
        by_time = self.progress.seconds / limit if limit is not None else 0.0
        return max(by_time, self.progress.step / steps if steps is not None else 0.0)

    @torch.no_grad()
    def _measure(self) -> None:
        """The held-out texts, teacher-forced: cheap enough to be asked often. `evaluate` asks the engine."""
        self.optimizer.use(averages=True)
        weights = np.array([len(batch.label_rows) for batch in self.heldout], np.float64)
        parts = [
            run_batch(
                self.kind, self.head, self.target, batch.to(self.device), self.vocabulary, with_agreement=True
            )
            for batch in self.heldout
        ]
        loss, agreement = (
            sum(getattr(p, name) * w for p, w in zip(parts, weights / weights.sum(), strict=True))
            for name in ("loss", "agreement")
        )
        self.optimizer.use(averages=False)
        accept_length = round(expected_accept_length(agreement), 4)
        self._log(
            heldout={"loss": _rounded(loss), "agreement": _rounded(agreement), "accept_length": accept_length}
        )
        self.progress.next_measure = 2 * max(self.progress.tokens, 1)

    def _log(self, **values: Any) -> None:
        done = self.progress
        speed = done.tokens / done.seconds if done.seconds else 0.0
        line = {
            "step": done.step,
            "tokens": done.tokens,
            "seconds": round(done.seconds, 2),
            "epoch": done.epoch,
        }
        with self.curve.open("a") as file:
            file.write(json.dumps(line | {"tokens_per_s": round(speed)} | values) + "\n")

    # -- batches ---------------------------------------------------------------------------------------------

    def _upload_ahead(self) -> Iterator[Batch]:
        """Batches on the device; the next one is on its way while one is used."""
        coming = self._endless()
        ready = next(coming)
        for following in coming:
            epoch, number, batch = ready
            self.progress.epoch, self.progress.batch = epoch, number + 1
            yield batch
            ready = following

    def _endless(self) -> Iterator[tuple[int, int, Batch]]:
        """(epoch, number in it, batch), from where the run stands; each epoch has an order of its own."""
        epoch, begin = self.progress.epoch, self.progress.batch
        while True:
            generator = np.random.default_rng((self.settings.seed, epoch))
            plan = plan_batches(self.texts, self.settings.tokens_per_batch, generator)
            for number in range(begin, len(plan)):
                yield epoch, number, self._batch(self.texts, plan[number]).to(self.device)
            epoch, begin = epoch + 1, 0

    def _batches_of(self, texts: Texts) -> Iterator[Batch]:
        for numbers in plan_batches(texts, self.settings.tokens_per_batch, np.random.default_rng(0)):
            yield self._batch(texts, numbers)

    def _batch(self, texts: Texts, numbers: Any) -> Batch:
        return make_batch(texts, numbers, self.num_steps, self.kind.first_lead, self.draftable)

    # -- files -----------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the draft model as it would be shipped, and the state that training goes on from."""
        self.optimizer.use(averages=True)
        write_checkpoint(self.folder, self.kind, self.head)
        self.optimizer.use(averages=False)
        self.optimizer.save(self.folder / STATE)
        state = {"progress": asdict(self.progress), "settings": asdict(self.settings), "kind": self.kind.name}
        unfinished = (self.folder / PROGRESS).with_suffix(".unfinished")
        unfinished.write_text(json.dumps(state))
        unfinished.replace(self.folder / PROGRESS)

    def resume(self) -> None:
        """Go on from the last save of `folder`, from whose weights this run was begun."""
        self.progress = Progress(**json.loads((self.folder / PROGRESS).read_text())["progress"])
        self.optimizer.load(self.folder / STATE, self.progress.step)

    def close(self) -> None:
        """Give the target back."""
        self.target.close()


def _rounded(values: Tensor) -> list[float]:
    return [round(float(v), 4) for v in values]
