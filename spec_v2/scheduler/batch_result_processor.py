"""Commit: what a step emitted becomes the requests' output, and finished requests give everything back."""

from spec_v2.mem_cache.kv_cache_builder import KvCache
from spec_v2.scheduler.schedule_batch import GenerationBatchResult, Request, ScheduleBatch


class BatchResultProcessor:
    """Turns results into tokens, metrics and free memory."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache

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
            req.num_in_flight -= 1
            if req.finish_reason is not None:  # it finished while this step was in flight: the step is dropped
                continue
            if not batch.forward_mode.is_extend():
                req.kv_committed_len += accept_lens[i]
                req.accept_lens.append(accept_lens[i])
                req.draft_depths.append(draft_depths[i])
            req.commit(predict[i][: accept_lens[i]])
            if req.finished:
                self.release(req)
                finished.append(req)
        return finished

    def release(self, req: Request) -> None:
        """Free all that the request owns. A step in flight may still write it: the next owner is queued behind."""
        self._cache.pages.free(req.pages)
        self._cache.rows.free(req.row)
        req.pages, req.row, req.kv_allocated_len = [], 0, 0
