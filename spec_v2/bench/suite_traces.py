"""Traces of a few decode steps under both schedules, for ui.perfetto.dev: what the host did while the device worked.

Launches are kept apart, so that each part of a step has a span of its own. That costs host time: a trace shows the
order of things, the suite's rows say how long they take.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from spec_v2.bench.contenders import EngineContender
from spec_v2.bench.cost_model import decode_steps
from spec_v2.bench.workshop import Workshop
from spec_v2.completion import Completion

STEPS = 8  # in a file
STEPS_BEFORE = 6  # of the traced run, which are left out: the pipeline has filled up by then


def record_traces(workshop: Workshop, model_name: str, entry: str, folder: Path) -> list[str]:
    """Trace `entry` and the same without overlap, one prompt each. Returns the names of the files.

    Raises Missing where a contender cannot take part.
    """
    names = []
    for name, schedule in ((entry, "overlap"), (f"{entry} sync", "sync")):
        with ExitStack() as closing:
            contender = workshop.open(name, model_name, 1, {}, closing)
            assert isinstance(contender, EngineContender)
            prompts = workshop.model(model_name).prompts(1)
            file = (
                folder
                / f"{model_name}-{'-'.join(entry.lower().replace('=', '').split())}-{schedule}.trace.json.gz"
            )
            names.append(write_trace(contender, prompts, file).name)
    return names


def write_trace(contender: EngineContender, prompts: Sequence[tuple[int, ...]], path: Path) -> Path:
    """Run twice, the first time to compile and record; write `STEPS` decode steps of the second."""
    trace = contender.engine.trace
    trace.separate_launches = True
    width = contender.engine.server_args.accept_width
    num_tokens = width * (STEPS_BEFORE + STEPS + 1) + 1  # so many steps at least, however much is accepted
    for _ in range(2):
        sample = contender.run(prompts, num_tokens)
    steps = decode_steps(trace.spans(), _num_steps(sample.completions))[STEPS_BEFORE : STEPS_BEFORE + STEPS]
    return trace.to_perfetto(path, steps=range(steps[0], steps[-1] + 1), notes=_notes(contender))


def _num_steps(completions: Sequence[Completion]) -> int:
    return max(done.spec.verify_ct for done in completions)


def _notes(contender: EngineContender) -> dict[str, Any]:
    args = contender.engine.server_args
    forced = args.speculative_simulated_accept_length
    return {
        "contender": contender.name,
        "device": str(contender.engine.device),
        "schedule": contender.schedule,
        "forced_accept_length": forced,
        "launches": "kept apart; device spans are timed by events of the device",
    }
