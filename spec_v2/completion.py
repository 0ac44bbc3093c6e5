"""What a request comes back as; it draws itself in a notebook."""

import html
from dataclasses import dataclass
from typing import Any

from spec_v2.observability.markup import ACCEPTED_STYLE
from spec_v2.observability.metrics import SpecMetrics
from spec_v2.scheduler.schedule_batch import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished request.

    `output_ids` ends with the stop token where `finish_reason` is "stop"; "length" means that
    `max_new_tokens` or the context was reached, "abort" that it was called off, "error" that it failed, and `error` says why;
    what it had said until then is here all the same. `text` is empty for an engine without a tokenizer.
    `pieces`: the text of each output token by itself. `matched_stop`: the token id or string that stopped it.
    `cached_tokens`: prompt tokens whose KV was found in the prefix cache. `logprobs`, `top_logprobs`: one entry
    per output token where asked for. `step_lens`: output tokens by step, the prefill's first.
    """

    text: str
    output_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    spec: SpecMetrics
    pieces: tuple[str, ...] = ()
    matched_stop: int | str | None = None
    cached_tokens: int = 0
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[dict[int, float], ...] = ()
    step_lens: tuple[int, ...] = ()
    error: str | None = None

    @property
    def completion_tokens(self) -> int:
        return len(self.output_ids)

    @property
    def _forced_note(self) -> str:
        return " by forced acceptance" if self.spec.forced_acceptance else ""

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        return (
            f"Completion({text!r}, {self.completion_tokens} tokens, finish_reason={self.finish_reason!r}, "
            f"accept_length={self.spec.accept_length:.2f}{self._forced_note}{f', error={self.error!r}' if self.error else ''})"
        )

    def _repr_html_(self) -> str:
        numbers = (
            ("prompt tokens", self.prompt_tokens),
            ("completion tokens", self.completion_tokens),
            ("finish reason", self.finish_reason),
            ("decode steps", self.spec.verify_ct),
            ("accept length", f"{self.spec.accept_length:.2f}{self._forced_note}"),
            ("accept rate", f"{self.spec.accept_rate:.2f}"),
            *([("error", self.error)] if self.error else []),
        )
        rows = "".join(
            f"<tr><th>{name}</th><td>{html.escape(str(value))}</td></tr>" for name, value in numbers
        )
        return (
            f'<p>{self._marked_text()}</p><table><caption>accepted drafts are <b style="{ACCEPTED_STYLE}">bold</b>, '
            f"tokens of the target's own are plain, &#183; ends a step</caption>{rows}</table>"
        )

    def _is_cut(self, step: int) -> bool:
        """Whether a stop or the end fell among the drafts of this step, so that its bonus token is not there."""
        is_last = step == len(self.step_lens) - 1
        decoded_once = len(self.step_lens) == len(self.spec.accept_lens) + 1  # one prefill: never retracted
        return is_last and decoded_once and step > 0 and self.step_lens[step] < self.spec.accept_lens[-1]

    def _marked_text(self) -> str:
        if not self.pieces:
            return html.escape(str(list(self.output_ids)))
        parts, start = [], 0
        for i, count in enumerate(self.step_lens):
            step = self.pieces[start : start + count]
            start += count
            own = 0 if self._is_cut(i) else 1
            drafts, bonus = step[: count - own], step[count - own :]
            if drafts:
                parts.append(f'<b style="{ACCEPTED_STYLE}">{html.escape("".join(drafts))}</b>')
            parts.append(html.escape("".join(bonus)))
            if drafts:
                parts.append("&#183;")
        return "".join(parts).replace("\n", "&#8629;<br>")


def completion_of(req: Request, tokenizer: Any) -> Completion:
    """The completion of a finished request. Special tokens are left out of `text`.

    Where the tokenizer fails on it, the reason is "error", the text is empty, and `output_ids` are all there.
    """
    text, pieces = "", tuple[str, ...]()
    if tokenizer is not None:
        try:
            text, pieces = _text_of(req, tokenizer)
        except Exception as error:  # noqa: BLE001 - the tokenizer's, whatever it is
            req.fail(req.error or undecodable(req, error))
    return Completion(
        text=text,
        output_ids=tuple(req.output_ids),
        finish_reason=req.finish_reason or "abort",
        prompt_tokens=len(req.prompt_ids),
        spec=SpecMetrics(tuple(req.accept_lens), tuple(req.draft_depths), req.is_forced, tuple(req.settings)),
        pieces=pieces,
        matched_stop=req.matched_stop,
        cached_tokens=req.cached_tokens,
        logprobs=tuple(req.logprobs),
        top_logprobs=tuple(req.top_logprobs),
        step_lens=tuple(req.step_lens),
        error=req.error,
    )


def _text_of(req: Request, tokenizer: Any) -> tuple[str, tuple[str, ...]]:
    text = tokenizer.decode(req.output_ids, skip_special_tokens=True)
    if req.stop_strings is not None and isinstance(req.matched_stop, str):
        text = req.stop_strings.cut(req.output_ids)
    return text, tuple(tokenizer.decode([t]) for t in req.output_ids)


def undecodable(req: Request, error: Exception) -> str:
    """What is to be said of a request whose text the tokenizer does not give."""
    return (
        f"the tokenizer failed to decode the {len(req.output_ids)} tokens of the output, {type(error).__name__}: {error}; "
        "output_ids has them"
    )
