"""MG-03: command lines that people have in their scripts start, and give the tokens of plain decoding."""

import argparse
from dataclasses import fields

import pytest

from spec_v2 import Engine, SamplingParams
from spec_v2.server_args import ServerArgs, add_cli_args, from_cli_args
from tests import tiny_models as tiny

GOLDEN = {
    "plain": "--disable-overlap-schedule",
    "EAGLE by default": "--speculative-algorithm EAGLE",
    "EAGLE chain": "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4",
    "EAGLE tree, default page size": "--speculative-algorithm EAGLE --speculative-num-steps 5 "
    "--speculative-eagle-topk 4 --speculative-num-draft-tokens 8",
    "EAGLE tree, pages of 16": "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 4 "
    "--speculative-num-draft-tokens 16 --page-size 16 --max-running-requests 8",
    "NEXTN": "--speculative-algorithm NEXTN --speculative-num-steps 1 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 2",
    "STANDALONE": "--speculative-algorithm STANDALONE --speculative-num-steps 4 --speculative-eagle-topk 2 "
    "--speculative-num-draft-tokens 7",
    "NGRAM": "--speculative-algorithm NGRAM --speculative-num-draft-tokens 16",
    "NGRAM, no prefix cache": "--speculative-algorithm NGRAM --disable-radix-cache --chunked-prefill-size 4",
}


def fields_of(command):
    """What a command line sets, as keywords."""
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    args = from_cli_args(parser.parse_args(command.split()))
    return {f.name: getattr(args, f.name) for f in fields(ServerArgs) if getattr(args, f.name) != f.default}


@pytest.mark.parametrize("name", GOLDEN)
def test_mg03_an_old_command_line_starts_and_gives_the_plain_tokens(name, device):
    given = fields_of(GOLDEN[name])
    algorithm = given.get("speculative_algorithm")
    target = tiny.llama(device)
    draft = None
    if algorithm == "STANDALONE":
        draft = tiny.noisy_copy(target)
    elif algorithm in ("EAGLE", "NEXTN"):
        draft = tiny.hidden_head(target)
    prompts = [tiny.random_prompt(seed, 5 + seed) for seed in range(3)]
    with Engine(target, draft_model=draft, debug=True, context_length=96, **given) as engine:
        done = engine.generate(prompts, SamplingParams(max_new_tokens=20))
    for prompt, completion in zip(prompts, done, strict=True):
        assert list(completion.output_ids) == list(tiny.oracle_of(target).tokens(prompt, 20))
