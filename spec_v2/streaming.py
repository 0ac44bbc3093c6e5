"""Completions in pieces, as they grow. What was given out is never taken back."""

from dataclasses import dataclass, replace
from typing import Any

from spec_v2.completion import Completion, completion_of
from spec_v2.scheduler.schedule_batch import Request
from spec_v2.scheduler.stop_strings import HALF_A_CHARACTER


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """News of one request: `text` and `output_ids` since its last chunk. `index`: its place among the prompts.

    Text that may yet become part of a stop string, and half a character, wait for a later chunk. `completion`
    comes with the last chunk only; all `text` together is `completion.text`.
    """

    index: int
    request_id: int
    text: str
    output_ids: tuple[int, ...]
    completion: Completion | None = None

    @property
    def finished(self) -> bool:
        return self.completion is not None


class RequestStream:
    """Follows one request and says what is new."""

    def __init__(self, index: int, req: Request, tokenizer: Any) -> None:
        self.index = index
        self.req = req
        self.done = False
        self._tokenizer = tokenizer
        self._num_ids = 0
        self._text = ""

    def news(self) -> Chunk | None:
        """The next chunk, or None where there is nothing to say."""
        if self.done or (len(self.req.output_ids) == self._num_ids and not self.req.finished):
            return None
        new_ids = tuple(self.req.output_ids[self._num_ids :])
        completion = completion_of(self.req, self._tokenizer) if self.req.finished else None
        if completion is not None and completion.error is not None and not completion.text:
            completion = replace(
                completion, text=self._text
            )  # the tokenizer failed: what was given out stays
        text = completion.text if completion is not None else self._sure_text()
        new_text, self._text = text[len(self._text) :], text
        self._num_ids, self.done = len(self.req.output_ids), self.req.finished
        return Chunk(
            index=self.index,
            request_id=self.req.request_id,
            text=new_text,
            output_ids=new_ids,
            completion=completion,
        )

    def _sure_text(self) -> str:
        """The text so far without an end that may still change."""
        if self._tokenizer is None:
            return ""
        text = str(self._tokenizer.decode(self.req.output_ids, skip_special_tokens=True))
        # first of all, as what comes before half a character may begin a stop string
        text = text.rstrip(HALF_A_CHARACTER)
        undecided = max((_overlap(text, stop) for stop in self.req.params.stop), default=0)
        text = text[: len(text) - undecided]
        return text if len(text) >= len(self._text) else self._text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
