"""Commit: what a step emitted becomes the requests' output, and finished requests give everything back."""

from spec_v2.scheduler.batch_planner import BatchPlanner
from spec_v2.scheduler.schedule_batch import GenerationBatchResult, Request, ScheduleBatch


class BatchResultProcessor:
    """Turns results into tokens, metrics and free memory."""

    def __init__(self, planner: BatchPlanner) -> None:
        self._planner = planner

    def process(self, batch: ScheduleBatch, result: GenerationBatchResult) -> list[Request]:
        """Commit a step. Returns the requests that finished. Raises what a launch of the step raised."""
        assert result.copy_done is not None
        assert result.host is not None
        result.copy_done.synchronize()
        host = result.host.get()
        accept_lens, draft_depths = host.accept_lens.tolist(), host.draft_depths.tolist()
        predict = host.predict.tolist()
        finished: list[Request] = []
        for i, req in enumerate(batch.reqs):
            if req.epoch != result.epochs[i]:  # it was retracted while this step was in flight
                continue
            if accept_lens[i] == 0:  # a prompt chunk that is not the last
                continue
            req.num_in_flight -= 1
            if req.finish_reason is not None:  # it finished while this step was in flight
                continue
            if not batch.forward_mode.is_extend():
                req.kv_committed_len += accept_lens[i]
                req.accept_lens.append(accept_lens[i])
                req.draft_depths.append(draft_depths[i])
            req.commit(predict[i][: accept_lens[i]])
            if req.finished:
                self._planner.finish(req)
                finished.append(req)
            elif batch.forward_mode.is_extend():
                self._planner.keep_prefix(req)
        return finished
