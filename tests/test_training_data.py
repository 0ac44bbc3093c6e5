"""Texts and batches: what the loss is asked of, and what it is not."""

import numpy as np
import pytest

from spec_v2.training.generate import ChatFrame
from spec_v2.training.heldout import FILE, heldout_prompts, normalised
from spec_v2.training.shards import (
    LENGTH_STEP,
    Texts,
    make_batch,
    most_frequent,
    plan_batches,
    read_shard,
    read_texts,
    write_shard,
)
from tests.tiny_tokenizers import letter_tokenizer
from tests.training_models import EOS, tiny_chat_tokenizer

VOCAB = 64
# (prompt, answer)
PAIRS = [([1, 2, 3], [4, 5, 6, 7, 8]), ([9, 10], [11, 12, 13]), ([14] * 60, [15, 16, 17, 18, 19, 20])]
TEXTS = Texts.from_lists([p for p, _ in PAIRS], [a for _, a in PAIRS])


def asked_of(batch, step, first_lead):
    """(text, start, the token that the chain is to say) of every chain of a step."""
    t = batch.tokens.shape[1]
    starts, labels = batch.chains[step]
    found = []
    for start, label in zip(starts.tolist(), labels.tolist(), strict=True):
        row = int(batch.label_rows[label])
        assert row // t == start // t
        assert row - start == first_lead + step
        found.append((start // t, start % t, int(batch.tokens.flatten()[row + 1])))
    return found


def test_chains_start_where_drafting_does():
    """The first answer token comes from the prefill, so the first draft is the second one."""
    batch = make_batch(TEXTS, np.array([0, 1]), num_steps=3)
    assert batch.tokens.shape == (2, LENGTH_STEP)
    assert asked_of(batch, 0, 1) == [(0, 2, 5), (0, 3, 6), (0, 4, 7), (0, 5, 8), (1, 1, 12), (1, 2, 13)]
    assert asked_of(batch, 1, 1) == [(0, 2, 6), (0, 3, 7), (0, 4, 8), (1, 1, 13)]
    assert asked_of(batch, 2, 1) == [(0, 2, 7), (0, 3, 8)]
    assert batch.num_tokens == 8 + 5


def test_a_small_lm_speaks_of_the_next_token():
    batch = make_batch(TEXTS, np.array([1]), num_steps=1, first_lead=0)
    assert asked_of(batch, 0, 0) == [(0, 2, 12), (0, 3, 13)]


def test_a_chain_ends_before_what_cannot_be_drafted():
    draftable = np.ones(VOCAB, np.bool_)
    draftable[6] = False
    batch = make_batch(TEXTS, np.array([0]), num_steps=3, draftable=draftable)
    assert asked_of(batch, 0, 1) == [(0, 2, 5), (0, 4, 7), (0, 5, 8)]
    assert asked_of(batch, 1, 1) == [(0, 4, 8)]
    assert asked_of(batch, 2, 1) == []


def test_an_answer_across_a_length_step():
    batch = make_batch(TEXTS, np.array([2, 1]), num_steps=2)
    assert batch.tokens.shape == (2, 2 * LENGTH_STEP)
    assert [token for _, _, token in asked_of(batch, 0, 1)] == [16, 17, 18, 19, 20, 12, 13]


def test_an_epoch_has_every_text_once_and_batches_of_a_size():
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 300, 500)
    texts = Texts(np.zeros(lengths.sum(), np.int64), lengths.astype(np.int32), np.ones(500, np.int32))
    plan = plan_batches(texts, 4096, np.random.default_rng(1))
    assert sorted(np.concatenate(plan).tolist()) == list(range(500))
    sizes = [len(b) * -(-lengths[b].max() // LENGTH_STEP) * LENGTH_STEP for b in plan]
    assert max(sizes) <= 4096
    assert sum(lengths) / sum(sizes) > 0.7  # little of it is padding
    again = plan_batches(texts, 4096, np.random.default_rng(1))
    assert all((a == b).all() for a, b in zip(plan, again, strict=True))
    other = plan_batches(texts, 4096, np.random.default_rng(2))
    assert [len(b) for b in other] != [len(b) for b in plan]


def test_a_text_longer_than_a_batch_comes_alone():
    texts = Texts(np.zeros(330, np.int64), np.array([300, 30], np.int32), np.ones(2, np.int32))
    assert sorted(len(b) for b in plan_batches(texts, 128, np.random.default_rng(0))) == [1, 1]


def test_frequent_tokens_are_counted_in_answers_only():
    texts = Texts.from_lists([[1, 1, 1, 1], [2, 2]], [[5, 5, 4], [5, 4, 3]])
    assert most_frequent(texts, VOCAB, 2).tolist() == [4, 5]
    assert most_frequent(texts, VOCAB, 3).tolist() == [3, 4, 5]
    assert most_frequent(texts, VOCAB, 2, always=[60]).tolist() == [5, 60]
    assert most_frequent(texts, VOCAB, 5).tolist() == [0, 1, 3, 4, 5]  # ties to the lowest ids


def test_shards_come_back(tmp_path):
    write_shard(tmp_path / "shard-00001.safetensors", TEXTS, VOCAB, {"seed": 3})
    write_shard(tmp_path / "shard-00000.safetensors", Texts.from_lists([[7]], [[8, 9]]), 1 << 17, {})
    texts, metadata = read_shard(tmp_path / "shard-00001.safetensors")
    assert texts.tokens.dtype == np.uint16
    assert texts.tokens.tolist() == TEXTS.tokens.tolist()
    assert metadata == {"seed": 3}
    both = read_texts(tmp_path)
    assert both.lengths.tolist() == [3, 8, 5, 66]
    assert both.tokens[:4].tolist() == [7, 8, 9, 1]
    assert both.num_answer_tokens == 2 + 5 + 3 + 6


def test_what_is_no_shard_is_told(tmp_path):
    with pytest.raises(ValueError, match="train generate"):
        read_texts(tmp_path)
    (tmp_path / "shard-00000.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"shard-00000.*delete it and generate it again"):
        read_texts(tmp_path)
    write_shard(
        tmp_path / "shard-00000.safetensors",
        Texts(TEXTS.tokens, TEXTS.lengths[:2], TEXTS.prompt_lens[:2]),
        VOCAB,
        {},
    )
    with pytest.raises(ValueError, match="do not fit"):
        read_texts(tmp_path)


def test_the_frame_is_the_chat_template(tmp_path):
    tokenizer = tiny_chat_tokenizer()
    frame = ChatFrame.of(tokenizer)
    prompt = tuple(tokenizer("xyz")["input_ids"])
    wanted = tokenizer.apply_chat_template(
        [{"role": "user", "content": "xyz"}], tokenize=False, add_generation_prompt=True
    )
    assert list(frame.around(prompt)) == tokenizer(wanted)["input_ids"]
    assert frame.stops == (EOS,)
    with pytest.raises(ValueError, match="no chat template"):
        ChatFrame.of(letter_tokenizer())


def test_held_out_prompts_are_64_and_fixed(monkeypatch, tmp_path):
    prompts = heldout_prompts()
    assert len({normalised(prompt) for prompt in prompts}) == 64
    assert normalised("  What's the Silk-Road?") == normalised("what s the silk road")
    changed = tmp_path / "heldout.jsonl"
    changed.write_text(FILE.read_text().replace("moon", "sun"))
    monkeypatch.setattr("spec_v2.training.heldout.FILE", changed)
    with pytest.raises(ValueError, match="restore the file"):
        heldout_prompts.__wrapped__()
