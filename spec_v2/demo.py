"""`python -m spec_v2.demo`: plain decoding against NGRAM and EAGLE3, on a real model, under both schedules.

It measures speed and acceptance in bfloat16, explains every place where a text differs, and then shows in
float32 that nothing differs. All numbers are of this run. Exit code 1: an output is wrong.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from spec_v2.demo_report import Run, block, compare_exactly, reference_of, summary, tie_note
from spec_v2.facts import machine, versions
from spec_v2.sampling_params import SamplingParams

SCHEDULES = ("sync", "overlap")

PROMPTS = {
    "repeat": "Repeat this text exactly:\nThe quick brown fox jumps over the lazy dog. Pack my box with five "
    "dozen liquor jugs. How vexingly quick daft zebras jump.",
    "table": "Copy this table and add a row for June:\n\n| month | sales |\n| --- | --- |\n| January | 120 |\n"
    "| February | 98 |\n| March | 143 |\n| April | 110 |\n| May | 131 |",
    "explain": "Why is the sky blue?",
    "story": "Write a short story about a lighthouse keeper.",
}
EXACT_PROMPTS = ("repeat", "explain")


@dataclass(frozen=True, slots=True)
class Models:
    """A target, and what drafts for it beside NGRAM: the EAGLE-3 head at `head_path`, which comes with this package for
    the default model; for others `draft`, the target's own first `draft_layers` layers."""

    target: Any
    tokenizer: Any
    layers: int
    head_path: str | None = None
    draft: Any = None
    draft_layers: int = 0

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """An engine's settings, by what is compared."""
        if self.head_path is not None:
            drafter = {"EAGLE3": {"speculative_draft_model_path": self.head_path}}
        else:
            drafter = {"STANDALONE": {"draft_model": self.draft}}
        named = {name: {"speculative_algorithm": name} | given for name, given in drafter.items()}
        return {"plain": {}, "NGRAM": {"speculative_algorithm": "NGRAM"}} | named


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Returns 0, or 1 where an output is wrong, 2 for a model that cannot be used, 130 on Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m spec_v2.demo", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="fewer tokens")
    parser.add_argument("--model", default="smollm2-135m", help="another model (default: smollm2-135m)")
    options = parser.parse_args(argv)
    try:
        return demo(options.model, num_tokens=24 if options.quick else 48)
    except ValueError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130


def demo(model: str, num_tokens: int) -> int:
    """Print the whole demo; see `main`."""
    with _progress(f"loading {model} in bfloat16; the first time it is converted, about 20 s"):
        models = load_models(model, "bfloat16")
    print(_head(model, models, num_tokens), flush=True)
    runs = list(measure(models, tuple(PROMPTS), num_tokens))
    verdicts = [tie_note(run, reference_of(run, runs), models.target) for run in runs]
    print("\n1. Speed and acceptance, in bfloat16\n")
    for prompt, text in PROMPTS.items():
        mine = [(run, note) for run, (note, _) in zip(runs, verdicts, strict=True) if run.prompt == prompt]
        print(block(prompt, text, mine))
    print(summary(runs))
    print(_explanation(models, runs), flush=True)
    with _progress(f"loading {model} in float32"):
        models = load_models(model, "float32")
    exact = list(measure(models, EXACT_PROMPTS, min(num_tokens, 32)))
    print("\n2. The same text, in float32: every token id is compared with plain decoding's\n")
    num_wrong = sum(is_wrong for _, is_wrong in verdicts)
    for prompt in EXACT_PROMPTS:
        line, wrong = compare_exactly([r for r in exact if r.prompt == prompt])
        print(f"  {prompt:<9}{line}")
        num_wrong += wrong
    if num_wrong:
        print(f"\nFAILED: {num_wrong} outputs differ from plain decoding, and no tie explains it.")
        return 1
    print("\nOK: in float32 all outputs are equal; in bfloat16 they are equal or part where two tokens tie.")
    return 0


# -- measuring -----------------------------------------------------------------------------------------------


def load_models(model: str, dtype: str) -> Models:
    """The target; the head that comes with it, or else a draft model made of all but its last two layers."""
    import torch

    from spec_v2.models.loader import first_layers, load_model
    from spec_v2.models.shipped import shipped_draft
    from spec_v2.server_args import ServerArgs

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = load_model(model, dtype=getattr(torch, dtype), device=device)
    if loaded.tokenizer is None:
        raise ValueError(f"--model {model}: the demo needs a model with a tokenizer")
    layers = loaded.config.get_text_config().num_hidden_layers
    head_path = shipped_draft(ServerArgs(model_path=model, speculative_algorithm="EAGLE3"))
    if head_path is not None:
        return Models(loaded.model, loaded.tokenizer, layers, head_path)
    draft_layers = max(1, layers - 2)
    draft = load_model(str(first_layers(model, draft_layers)), dtype=getattr(torch, dtype), device=device)
    return Models(loaded.model, loaded.tokenizer, layers, None, draft.model, draft_layers)


def measure(models: Models, prompts: Sequence[str], num_tokens: int) -> Iterator[Run]:
    """Every prompt under every algorithm and schedule, one at a time, greedy."""
    from spec_v2.engine import Engine

    prompt_ids = {prompt: token_ids(models.tokenizer, PROMPTS[prompt]) for prompt in prompts}
    for algorithm, settings in models.settings.items():
        for schedule in SCHEDULES:
            with (
                _progress(f"{algorithm}, {schedule} schedule"),
                Engine(
                    models.target,
                    tokenizer=models.tokenizer,
                    max_running_requests=1,
                    disable_radix_cache=True,  # every run computes its prompt
                    disable_overlap_schedule=schedule == "sync",
                    **settings,
                ) as engine,
            ):
                warm_up = SamplingParams(max_new_tokens=4)
                engine.generate([prompt_ids[prompts[0]]], warm_up, progress=False)
                for prompt, ids in prompt_ids.items():
                    start = time.perf_counter()
                    params = SamplingParams(max_new_tokens=num_tokens)
                    (completion,) = engine.generate([ids], params, progress=False)
                    yield Run(prompt, ids, algorithm, schedule, completion, time.perf_counter() - start)


def token_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The prompt as the model wants it: in its chat template, where it has one."""
    if not tokenizer.chat_template:
        return tuple(tokenizer(text)["input_ids"])
    chat = [{"role": "user", "content": text}]
    wrapped = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(wrapped, add_special_tokens=False)["input_ids"])


# -- printing ------------------------------------------------------------------------------------------------


def _head(model: str, models: Models, num_tokens: int) -> str:
    import torch

    threads = torch.get_num_threads()
    load = f", load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    found = ", ".join(f"{name} {number}" for name, number in versions().items() if number)
    return "\n".join(
        (
            "spec_v2: plain decoding against speculative decoding, on a real model",
            "",
            f"  machine   {machine()}{load}",
            f"  date      {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            f"  versions  {found}",
            f"  model     {model}: {models.layers} layers, on {models.target.device}",
            f"  settings  greedy, {num_tokens} new tokens at most, one prompt at a time, {threads} threads",
        )
    )


def _explanation(models: Models, runs: Sequence[Run]) -> str:
    lines = [
        "",
        "  tokens/s       new tokens by wall time, the prompt's forward included",
        "  accept length  tokens per decode step: the accepted drafts, and one of the target's own",
        "  accept rate    accepted drafts out of those on the longest path that a step offered",
        "",
        "  NGRAM copies what followed the newest tokens earlier in the text. Without repetition it finds little.",
        *_about_the_drafter(models),
    ]
    if models.target.device.type == "cpu":
        lines.append(
            "  Overlap is not a speed-up on a CPU: there the host and the device share the same cores."
        )
    if any(run.output_ids != reference_of(run, runs).output_ids for run in runs):
        lines += [
            "  Two tokens tie where their logits differ by no more than bfloat16's rounding. Each shape of a forward",
            "  rounds in its own way, so a text may go on differently from there; neither is the wrong one.",
        ]
    return "\n".join(lines)


def _about_the_drafter(models: Models) -> tuple[str, str]:
    if models.head_path is not None:
        return (
            "  EAGLE3 drafts with one layer, trained on what the target says; it grows a tree of guesses from the target's",
            "  hidden states. The head comes with this package, and its card says how it was made.",
        )
    return (
        f"  STANDALONE drafts here with the target's first {models.draft_layers} of {models.layers} layers, a stand-in:",
        "  it shows acceptance, and costs nearly as much as the target. A draft for speed is a small, trained model.",
    )


@contextmanager
def _progress(what: str) -> Iterator[None]:
    """A line on stderr: what is being done, and how long it took."""
    print(f"... {what}", end="", flush=True, file=sys.stderr)
    start = time.perf_counter()
    try:
        yield
    finally:
        print(f" [{time.perf_counter() - start:.1f} s]", flush=True, file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
