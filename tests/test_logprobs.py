"""logprobs are of the target's own logits, whatever the temperature, penalties and drafts; one per output token."""

import pytest
import torch

from spec_v2 import SamplingParams
from spec_v2.speculative.verify import token_logprobs
from tests.cells import SETUPS, open_setup, setup_prompts
from tests.surface import assert_at_rest, check_surface

N = 14
PARAMS = [
    SamplingParams(max_new_tokens=N, logprobs=True, top_logprobs=3),
    SamplingParams(max_new_tokens=N, temperature=0.7, seed=1, logprobs=True, top_logprobs=1),
    SamplingParams(max_new_tokens=N),
    SamplingParams(max_new_tokens=N, temperature=1.5, top_k=9, top_p=0.9, seed=2, logprobs=True),
    SamplingParams(
        max_new_tokens=N,
        repetition_penalty=1.5,
        logit_bias={4: 3.0},
        logprobs=True,
        top_logprobs=20,
        stop_token_ids=tuple(range(1, 64, 7)),
    ),
]


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("setup", SETUPS)
def test_om02_equal_log_softmax_of_the_raw_logits(open_engine, setup, chunk, schedule, device):
    """check_surface compares each with a full forward of a copy of the model."""
    engine = open_setup(open_engine, setup, schedule, device, chunked_prefill_size=chunk)
    done = check_surface(engine, setup_prompts(setup, engine.model, len(PARAMS)), PARAMS)
    for params, one in zip(PARAMS, done, strict=True):
        count = one.completion_tokens if params.logprobs else 0
        assert len(one.logprobs) == len(one.top_logprobs) == count
        assert all(len(top) == params.top_logprobs for top in one.top_logprobs)
        assert all(value < 0 for value in one.logprobs)
    if setup != "plain":
        assert max(n for d in done for n in d.spec.accept_lens) > 1
    assert_at_rest(engine)


def test_om02_rejection_sampling_too(open_engine, schedule, device):
    engine = open_setup(
        open_engine, "standalone-chain", schedule, device, speculative_use_rejection_sampling=True
    )
    prompt = setup_prompts("standalone-chain", engine.model, 1)[0]
    params = SamplingParams(max_new_tokens=N, temperature=1.0, seed=4, logprobs=True, top_logprobs=2)
    (done,) = engine.generate(prompt, params)
    ids = [*prompt, *done.output_ids]
    from tests.surface import full_oracle

    for i, (token, value) in enumerate(zip(done.output_ids, done.logprobs, strict=True)):
        row = full_oracle(engine.model).logits(ids[: len(prompt) + i]).log_softmax(-1)
        assert abs(float(row[token]) - value) < 1e-4


@pytest.mark.parametrize("setup", ["plain", "standalone-tree", "eagle-chain"])
def test_one_request_may_ask_while_others_do_not(open_engine, setup, schedule, device):
    """Who asks joins and leaves; the others' tokens and lists are as without."""
    engine = open_setup(open_engine, setup, schedule, device, max_running_requests=2)
    prompts = setup_prompts(setup, engine.model, 4)
    many = [SamplingParams(max_new_tokens=5 + 3 * i, logprobs=i == 1) for i in range(4)]
    check_surface(engine, prompts, many)


def test_top_ids_of_ties_are_the_lowest():
    logits = torch.zeros(1, 2, 5)
    path, predict = torch.tensor([[0, 1]]), torch.tensor([[3, -1]])
    found = token_logprobs(logits, path, predict, 2)
    assert found.top_ids[0, 0].tolist() == [0, 1]
    assert found.chosen[0, 0] == pytest.approx(torch.tensor(0.2).log().item())
    assert token_logprobs(logits, path, predict, -1).chosen.shape == (1, 0)
