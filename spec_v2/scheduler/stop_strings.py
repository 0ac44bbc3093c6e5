"""Stop strings, looked for after every single token, so that none is missed in a long accepted run."""

from collections.abc import Sequence
from typing import Any

HALF_A_CHARACTER = "�"


class StopStrings:
    """`find` says whether the newest token completed a stop string. Text is decoded in a window of tokens.

    What an earlier token completed does not count: it was looked at then, or ignored before `min_new_tokens`.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)

    def find(self, output_ids: Sequence[int]) -> str | None:
        """The stop string that the newest of `output_ids` completes, or None."""
        if not self._stops:
            return None
        window = self._longest + 8
        while True:
            text, completed = self._completed(output_ids[-window:])
            # a token may be part of a character or no text at all, so the window grows until it must suffice
            if len(text) > self._longest + 4 or window >= len(output_ids):
                return next(iter(completed), None)
            window *= 2

    def cut(self, output_ids: Sequence[int]) -> str:
        """The text of `output_ids` up to what `find` finds; of several, up to the one that begins first."""
        text, completed = self._completed(output_ids)
        return text[: min(completed.values(), default=len(text))]

    def text(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _completed(self, ids: Sequence[int]) -> tuple[str, dict[str, int]]:
        """The text of `ids`, and where each stop string begins that reaches into what the last id added."""
        text, known = self.text(ids), len(self.text(ids[:-1]).rstrip(HALF_A_CHARACTER))
        places = {stop: text.find(stop, max(known - len(stop) + 1, 0)) for stop in self._stops}
        return text, {stop: place for stop, place in places.items() if place >= 0}
