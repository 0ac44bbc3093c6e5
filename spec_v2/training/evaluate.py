"""How well a draft model drafts: held-out prompts through the engine, as users run it."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_v2.engine import Engine
from spec_v2.observability.metrics import total
from spec_v2.sampling_params import SamplingParams
from spec_v2.training.generate import ChatFrame
from spec_v2.training.heldout import heldout_prompts
from spec_v2.training.kinds import Kind

Shape = tuple[int, int, int]


def evaluate(
    kind: Kind,
    folder: Path,
    model: Any,
    tokenizer: Any,
    *,
    shapes: Sequence[Shape] | None = None,
    temperatures: Sequence[float] = (0.0, 1.0),
    num_prompts: int | None = None,
    max_new_tokens: int = 256,
    batch_size: int = 64,
) -> dict[str, Any]:
    """Accept lengths (bonus included) and per-position acceptance of the draft model in `folder`.

    `shapes`: (num_steps, topk, num_draft_tokens); the kind's own if None. All settings see the same prompts and, when
    sampling, the same seeds.
    """
    frame = ChatFrame.of(tokenizer)
    texts = heldout_prompts()[:num_prompts]
    prompts = [frame.around(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    rows = [
        row
        for shape in shapes or kind.shapes
        for row in _rows(kind, folder, model, prompts, frame, shape, temperatures, max_new_tokens, batch_size)
    ]
    return {
        "prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device.type),
        "rows": rows,
    }


def _rows(
    kind: Kind,
    folder: Path,
    model: Any,
    prompts: Sequence[Sequence[int]],
    frame: ChatFrame,
    shape: Shape,
    temperatures: Sequence[float],
    max_new_tokens: int,
    batch_size: int,
) -> list[dict[str, Any]]:
    """One engine of one shape, every temperature."""
    steps, topk, tokens = shape
    room = max(len(prompt) for prompt in prompts) + max_new_tokens
    rows = []
    with Engine(
        model,
        speculative_algorithm=kind.algorithm,
        enable_multi_layer_eagle=kind.multi_layer,
        speculative_draft_model_path=str(folder),
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=tokens,
        max_running_requests=batch_size,
        context_length=min(room, int(model.config.max_position_embeddings)),
        disable_radix_cache=True,
    ) as engine:
        for temperature in temperatures:
            params = [
                SamplingParams(
                    max_new_tokens=max_new_tokens, temperature=temperature, stop_token_ids=frame.stops, seed=i
                )
                for i in range(len(prompts))
            ]
            start = time.perf_counter()
            completions = engine.generate(prompts, params, progress=False)
            metrics = total(c.spec for c in completions)
            rows.append(
                {
                    "shape": f"{steps}, {topk}, {tokens}",
                    "temperature": temperature,
                    "accept_length": round(metrics.mean_acceptance_length, 4),
                    "acceptance_rate_per_position": [
                        round(r, 4) for r in metrics.acceptance_rate_per_position
                    ],
                    "decode_steps": metrics.verify_ct,
                    "tokens": sum(len(c.output_ids) for c in completions),
                    "seconds": round(time.perf_counter() - start, 2),
                }
            )
    return rows
