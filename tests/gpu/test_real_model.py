"""A real model on a GPU says what plain decoding says: the first difference is a tie of two logits, or there is none.

SmolLM2-135M in bfloat16 and float32, recorded steps, every algorithm. Which places are ties is judged by transformers'
own forward of the text that both have in common.
"""

import copy
from functools import cache

import pytest
import torch

from spec_v2 import Engine, SamplingParams
from spec_v2.bench.oracle import register_oracle
from spec_v2.bench.prompts import prompt_ids
from spec_v2.bench.suite_models import random_head
from spec_v2.demo_report import Run, first_difference, tie_note
from spec_v2.model_executor.fuse import speed_up
from spec_v2.models.eagle import EagleHead
from spec_v2.models.loader import first_layers, load_model

pytestmark = [pytest.mark.gpu, pytest.mark.model]
MODEL = "smollm2-135m"
DEVICE = torch.device("cuda")
TOKENS = 64
MOST_DIFFERENCES = 0.03  # of the compared tokens
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 9}
CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
LONG_CHAIN = {"speculative_num_steps": 12, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 13}
CASES = {
    "plain": {},
    "NGRAM": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 12},
    "STANDALONE": {"speculative_algorithm": "STANDALONE"} | CHAIN,
    "ORACLE": {"speculative_algorithm": "ORACLE"} | LONG_CHAIN,
    "EAGLE chain": {"speculative_algorithm": "EAGLE"} | CHAIN,
    "EAGLE tree": {"speculative_algorithm": "EAGLE"} | TREE,
    "EAGLE3 tree": {"speculative_algorithm": "EAGLE3"} | TREE,
}
# tokens per decode step that a case has to reach, so that it says something
# (an oracle replays plain decoding: behind a tie that falls otherwise it has nothing more to say)
LEAST_ACCEPTED = {"NGRAM": 1.5, "STANDALONE": 1.5, "ORACLE": 3.0}


@cache
def loaded(dtype):
    """(what our engines run, the same as transformers runs it, its tokenizer)"""
    ours, theirs = (load_model(MODEL, dtype=dtype, device=DEVICE) for _ in range(2))
    speed_up(ours.model)
    return ours.model, theirs.model, ours.tokenizer


@cache
def drafter(algorithm, dtype):
    target = loaded(dtype)[0]
    if algorithm == "STANDALONE":
        draft = load_model(str(first_layers(MODEL, 28)), dtype=dtype, device=DEVICE).model
    elif algorithm == "EAGLE":
        draft = head_of_the_last_layer(loaded(dtype)[1], target)
    elif algorithm == "EAGLE3":
        draft = random_head(target, 8192, seed=1)
    else:
        return None
    speed_up(draft, shared_with=target)
    return draft


def head_of_the_last_layer(source, target):
    """An EAGLE head that puts a token's embedding through the target's last layer: a guess that is right at times."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = 1
    head = EagleHead(config, target, norm_input=True, norm_output=True)
    head.decoder.layers[0].load_state_dict(source.model.layers[-1].state_dict())
    head.decoder.norm.load_state_dict(source.model.norm.state_dict())
    head.fc.weight.data.zero_()
    head.fc.bias.data.zero_()
    head.fc.weight.data[:, : config.hidden_size] = torch.eye(config.hidden_size)
    return head


@cache
def prompts(dtype):
    """Four texts to be copied, where drafts from the prompt fit, and four questions."""
    tokenizer = loaded(dtype)[2]
    return [*prompt_ids(tokenizer, "copy", 4), *prompt_ids(tokenizer, "free", 4)]


def generate(name, dtype, batch, schedule):
    """One run per prompt."""
    settings = CASES[name]
    algorithm = settings.get("speculative_algorithm")
    if algorithm == "ORACLE":
        register_oracle()
    with Engine(
        loaded(dtype)[0], draft_model=drafter(algorithm, dtype), context_length=512, max_running_requests=batch,
        max_total_tokens=8192, disable_radix_cache=True, disable_overlap_schedule=schedule == "sync", **settings,
    ) as engine:  # fmt: skip
        torch.cuda.synchronize()  # weights were made on another stream than the one that reads them
        if algorithm == "ORACLE":
            for run in plain_runs(dtype):
                engine.scheduler.worker.remember(run.prompt_ids, run.output_ids)
        params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
        done = engine.generate(prompts(dtype), params, progress=False)
        assert engine._forward_stream.graphs.num_captures > 0, "no step was recorded"
        names = [str(i) for i in range(len(done))]
        return [
            Run(i, ids, name, schedule, c, 1.0) for i, ids, c in zip(names, prompts(dtype), done, strict=True)
        ]


@cache
def plain_runs(dtype):
    """Plain decoding, one request at a time."""
    return generate("plain", dtype, 1, "sync")


@pytest.mark.parametrize(
    ("dtype", "batch"),
    [(torch.bfloat16, 1), (torch.bfloat16, 8), (torch.float32, 8)],
    ids=["bf16-b1", "bf16-b8", "fp32-b8"],
)
@pytest.mark.parametrize("name", CASES)
def test_texts_part_at_ties_only(name, dtype, batch, schedule):
    judge = loaded(dtype)[1]
    compared = differences = 0
    wrong = []
    runs = generate(name, dtype, batch, schedule)
    for run, plain in zip(runs, plain_runs(dtype), strict=True):
        note, is_wrong = tie_note(run, plain, judge)
        wrong += [f"prompt {run.prompt}: {note}"] if is_wrong else []
        place = first_difference(run.output_ids, plain.output_ids)
        compared += TOKENS if place is None else place + 1
        differences += place is not None
    print(f"{name}, {dtype}, batch {batch}, {schedule}: {differences} ties in {compared} tokens")
    assert wrong == []
    assert differences <= MOST_DIFFERENCES * compared
    steps = [n for run in runs for n in run.completion.spec.accept_lens]
    assert sum(steps) / len(steps) >= LEAST_ACCEPTED.get(name, 1.0)
