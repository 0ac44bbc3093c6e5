"""Stop strings, looked for after every single token, so that none is missed in a long accepted run."""

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """`find` says whether the newest token completed a stop string. Text is decoded in a window of tokens."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)

    def find(self, output_ids: Sequence[int]) -> str | None:
        """The stop string that the text of `output_ids` contains near its end, or None."""
        if not self._stops:
            return None
        window = self._longest + 8
        while True:
            text = self.text(output_ids[-window:])
            # a token may be part of a character or no text at all, so the window grows until it must suffice
            if len(text) > self._longest + 4 or window >= len(output_ids):
                return next((stop for stop in self._stops if stop in text), None)
            window *= 2

    def cut(self, text: str) -> str:
        """`text` up to its first stop string."""
        return text[: min((text.find(s) for s in self._stops if s in text), default=len(text))]

    def text(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
