"""Commit: what a step emitted becomes the requests' output, and finished requests give everything back."""

import logging
from collections.abc import Callable, Sequence

from spec_v2.adaptive_policy import StepObservation
from spec_v2.observability.step_log import StepLog
from spec_v2.scheduler.batch_planner import BatchPlanner
from spec_v2.scheduler.recovery import acquit
from spec_v2.scheduler.schedule_batch import GenerationBatchResult, Request, ScheduleBatch
from spec_v2.types import TokenLogprobs, TreeShape

_LOG = logging.getLogger("spec_v2")
STEPS_BEFORE_WARNING = 100


class BatchResultProcessor:
    """Turns results into tokens, metrics and free memory."""

    def __init__(self, planner: BatchPlanner, clock: Callable[[], float]) -> None:
        self._planner = planner
        self._clock = clock
        self._landed_at = float("-inf")  # the newest step
        self.step_log: StepLog | None = None  # filled while somebody wants to look at the steps
        self._drafting_steps = self._num_correct_drafts = 0
        self._has_draft_model = planner.server_args.algorithm.needs_draft_model()
        self._is_forced = planner.server_args.speculative_simulated_accept_length is not None

    def process(self, batch: ScheduleBatch, result: GenerationBatchResult) -> list[Request]:
        """Commit a step. Returns the requests that finished. Raises what a launch of the step raised."""
        assert result.copy_done is not None
        assert result.host is not None
        result.copy_done.synchronize()
        host = result.host.get()
        landed_at = self._clock()
        # under overlap a step waits for the one before it
        seconds = landed_at - max(result.launched_at, self._landed_at)
        self._landed_at = landed_at
        accept_lens, draft_depths = host.accept_lens.tolist(), host.draft_depths.tolist()
        predict, match_lens = host.predict.tolist(), host.match_lens.tolist()
        has_numbers = host.has_numbers.tolist()
        finished: list[Request] = []
        live: list[int] = []
        for i, req in enumerate(batch.reqs):
            if req.epoch != result.epochs[i]:  # it was retracted while this step was in flight
                continue
            if accept_lens[i] == 0:  # a prompt chunk that is not the last
                continue
            req.num_in_flight -= 1
            if req.finish_reason is not None:  # it finished while this step was in flight
                continue
            if not has_numbers[i]:
                if batch.forward_mode.is_extend():
                    self._end_without_numbers(req)
                    finished.append(req)
                else:  # a draft may have done it: a prefill has none
                    self._planner.put_back(req)
                continue
            if batch.shape is not None:
                live.append(i)
                self._note_decode(req, batch.shape, accept_lens[i], draft_depths[i], match_lens[i])
            before = len(req.output_ids)
            _commit(req, predict[i][: accept_lens[i]])
            req.step_lens.append(len(req.output_ids) - before)
            if self.step_log is not None and result.noted is not None:
                self.step_log.note(result.step, req.request_id, result.noted.get(), i, req.step_lens[-1])
            if req.params.logprobs:
                self._keep_logprobs(req, host.logprobs, i, len(req.output_ids) - before)
            if req.finished:
                self._planner.finish(req)
                finished.append(req)
            elif batch.forward_mode.is_extend():
                self._planner.keep_prefix(req)
            elif req.on_trial:
                acquit(self._planner, req)
        if live and batch.shape is not None and self._planner.shapes.policy is not None:
            step = StepObservation(
                shape=batch.shape,
                batch_size=len(batch),
                max_seq_len=batch.max_seq_len,
                num_correct_drafts=[accept_lens[i] - 1 for i in live],
                draft_depths=[draft_depths[i] for i in live],
                seconds=None if batch.catches_up else seconds,
            )
            self._planner.shapes.policy.observe(step)
        return finished

    def _end_without_numbers(self, req: Request) -> None:
        args = self._planner.server_args
        req.fail(
            f"model_path={args.model_path}: its logits were NaN or infinite after {len(req.output_ids)} tokens of output; "
            f"look for a damaged checkpoint, or take a dtype of more range than dtype={args.dtype} (--dtype bfloat16 or "
            "--dtype float32)"
        )
        self._planner.finish(req)

    def _note_decode(
        self, req: Request, shape: TreeShape, accept_len: int, draft_depth: int, match_len: int
    ) -> None:
        req.kv_committed_len += accept_len
        req.accept_lens.append(accept_len)
        req.draft_depths.append(draft_depth)
        req.settings.append(shape.setting)
        req.is_forced = self._is_forced
        req.note_step(accept_len - 1, match_len, drafted=shape.drafts)
        self._watch(accept_len - 1, draft_depth)

    def _watch(self, num_correct_drafts: int, draft_depth: int) -> None:
        """Say it once where a draft model seems not to belong to its target. Texts are right all the same."""
        if self._is_forced or draft_depth == 0 or not self._has_draft_model:
            return
        args = self._planner.server_args
        self._drafting_steps += 1
        self._num_correct_drafts += num_correct_drafts
        if self._drafting_steps == STEPS_BEFORE_WARNING and self._num_correct_drafts == 0:
            _LOG.warning(
                "speculative_draft_model_path=%s: none of its drafts was accepted in the first %d steps; check that it was "
                "trained for model_path=%s, with the same tokenizer and from the same layers",
                args.speculative_draft_model_path, STEPS_BEFORE_WARNING, args.model_path,
            )  # fmt: skip

    def _keep_logprobs(self, req: Request, logprobs: TokenLogprobs, i: int, count: int) -> None:
        """Those of the tokens that were committed, and no more."""
        req.logprobs += logprobs.chosen[i, :count].tolist()
        num_top = req.params.top_logprobs
        ids, values = logprobs.top_ids[i, :count, :num_top], logprobs.top[i, :count, :num_top]
        for row_ids, row_values in zip(ids.tolist(), values.tolist(), strict=True):
            req.top_logprobs.append(dict(zip(row_ids, row_values, strict=True)))


def _commit(req: Request, tokens: Sequence[int]) -> None:
    """Append tokens and look for stops. An error there is the request's own: a tokenizer that fails on its text."""
    try:
        req.commit(tokens)
    except Exception as error:  # noqa: BLE001 - the tokenizer's, whatever it is
        _LOG.warning("request %d ended: looking for its stop strings failed", req.request_id, exc_info=error)
        req.fail(
            f"stop={req.params.stop!r}: the tokenizer failed on token {len(req.output_ids)} of the output, "
            f"{type(error).__name__}: {error}; use stop_token_ids, or mend the tokenizer"
        )
