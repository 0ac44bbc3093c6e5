"""KV lengths that an operator takes from the host, where it cannot read them on the device (Ascend's fused attention).

A launch gets tensors and must not read them, so such lengths travel beside it: the stream puts a step's lengths here
as a launch of that step begins, attention takes them from here, and whoever records the launch notes what was taken.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class KvSpan(NamedTuple):
    """Keys of one attention call: `seq_lens + ahead`, at least 1, at most what a row has room for."""

    ahead: int
    most: int


class HostLens:
    """`seq_lens`: of the batch's rows before the step, in tokens, padding rows included. `page_size`: in tokens."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.seq_lens: tuple[int, ...] = ()
        self._noted: list[KvSpan] | None = None

    def of(self, span: KvSpan) -> list[int]:
        """Keys to be read for each row, in tokens."""
        return [min(max(n + span.ahead, 1), span.most) for n in self.seq_lens]

    def take(self, span: KvSpan) -> list[int]:
        """The same for an attention call, which is noted where somebody wants to know."""
        if self._noted is not None:
            self._noted.append(span)
        return self.of(span)

    @contextmanager
    def noting(self) -> Iterator[list[KvSpan]]:
        """The attention calls inside, in order: a replay has to give each its lengths again."""
        spans: list[KvSpan] = []
        self._noted = spans
        try:
            yield spans
        finally:
            self._noted = None
