"""Which states a prefill goes on from and leaves behind, for models with recurrent layers. Host integers only."""

from collections.abc import Sequence

from spec_v2.mem_cache.prefix_cache import PrefixCache
from spec_v2.scheduler.schedule_batch import Request
from spec_v2.types import StatePlan


def plan_states(reqs: Sequence[Request], spans: Sequence[tuple[int, int]], prefix: PrefixCache) -> StatePlan:
    """`spans[i]`: the tokens `start .. end - 1` that request `i` runs. Requests then own the snapshots planned for them."""
    start_rows, saves = [], []
    for req, (start, end) in zip(reqs, spans, strict=True):
        start_rows.append(req.state_row)
        req.state_row = req.row  # which its next chunk goes on from
        saves.append([(req.row, end - start), *_new_snapshots(req, start, end, prefix)])
    width = max(len(s) for s in saves)
    filled = [[*s, *[(0, 0)] * (width - len(s))] for s in saves]
    return StatePlan(
        start_rows=tuple(start_rows),
        save_rows=tuple(tuple(row for row, _ in s) for s in filled),
        save_lens=tuple(tuple(length for _, length in s) for s in filled),
        is_last=tuple(end == len(req.fill_ids) for req, (_, end) in zip(reqs, spans, strict=True)),
    )


def _new_snapshots(req: Request, start: int, end: int, prefix: PrefixCache) -> list[tuple[int, int]]:
    """(row, tokens of the chunk before it), for the two places where another prompt is likely to go on.

    One is the last page boundary before the chunk's newest token: for the same text again, or a longer one. The other is
    where this text left those whose KV is known: where one did, more will.
    """
    page_size = prefix.pages.page_size
    places = {(end - 1) // page_size * page_size, req.fork_len}
    found = []
    for place in sorted(p for p in places if start < p < end):
        if row := prefix.new_snapshot():
            req.snapshots.append((place, row))
            found.append((row, place - start))
    return found
