"""Who goes on after a step has failed, who is tried alone, and who is to blame.

An exception in a launch belongs to a batch, not to a request. So everything that runs is put back and goes on from the
tokens that the host knows (`BatchPlanner.put_back_all`), and the requests of the failed step are suspects:

1. the first time they run again, all together: most errors (memory that was short for a moment) do not come again;
2. the second time they are put *on trial*: each runs alone until a decode step of its own has landed, then waits for the
   others' trials to end, and goes on with them;
3. the third time they run alone, each to its end: then it is the batch that fails, not one of them.

A request that fails alone, and not for the first time, is to blame: it ends with finish_reason "error", its text so far
and the reason. A request that has said `FORGIVEN_AFTER` tokens since its last failure is as innocent as a new one.

Logits that are NaN or infinite belong to a request (`Verdict.has_numbers`). In a decode step a draft may have brought them
in, as masked keys weigh 0 and 0 * NaN is NaN. So the request alone is put back, and its prefill, which has no drafts, says
one token more or shows that the text itself gives no numbers: then it ends.
"""

import logging
from collections.abc import Sequence

from spec_v2.scheduler.batch_planner import BatchPlanner
from spec_v2.scheduler.schedule_batch import Request

_LOG = logging.getLogger("spec_v2")
FORGIVEN_AFTER = 64  # tokens
FAILURES_BEFORE_TRIAL = 2


def accuse(suspects: Sequence[Request], error: Exception) -> Request | None:
    """Count the failure against each; who of them is to blame, if that is certain. Ends that request."""
    for req in suspects:
        if len(req.output_ids) - req.failed_at >= FORGIVEN_AFTER:
            req.num_failures = 0
        req.num_failures += 1
        req.failed_at = len(req.output_ids)
        req.on_trial = req.num_failures >= FAILURES_BEFORE_TRIAL
    said = f"{type(error).__name__}: {error}"
    _LOG.warning("a step of %d requests failed, %s", len(suspects), said, exc_info=error)
    if len(suspects) != 1 or not suspects[0].on_trial:
        return None
    (guilty,) = suspects
    guilty.fail(
        f"its step failed twice, and alone, after {len(guilty.output_ids)} tokens of output: {said}; "
        "the log of spec_v2 has the traceback, and Engine(..., debug=True) raises it"
    )
    return guilty


def acquit(planner: BatchPlanner, req: Request) -> None:
    """A decode step of a request on trial has landed. Where others wait for theirs, it waits until they have had it."""
    if req.num_failures > FAILURES_BEFORE_TRIAL:
        return
    req.on_trial = False
    if planner.waiting and planner.waiting[0].on_trial:
        planner.put_back(req)
        planner.try_first()
