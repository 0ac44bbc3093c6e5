"""NGRAM's options: most frequent first, a shared corpus, and leaving drafts out while they do not pay."""

import pytest
import torch

from spec_v2 import SamplingParams
from spec_v2.kernels.ngram_tree import NOTHING, NgramShape, match_tree
from spec_v2.scheduler.schedule_batch import Request
from tests import tiny_models as tiny
from tests.harness import Recorder, check_identity
from tests.tiny_tokenizers import LETTERS, letter_tokenizer

SHAPE = (3, 4, 6)


def open_ngram(open_engine, target, schedule, **changes):
    return open_engine(target, "NGRAM", None, changes.pop("shape", SHAPE), schedule=schedule, **changes)


# -- PROB ----------------------------------------------------------------------------------------------------


def prob_by_hand(tokens, shape, num_nodes):
    """{path: longest match, occurrences} of the continuations looked at, and the paths in their order.

    Longest matches first; of equally long ones the more frequent continuation; then by depth, then newest.
    """
    last = len(tokens) - 1

    def match(end):
        d = 0
        while d < min(shape.max_trie_depth, end + 1) and tokens[end - d] == tokens[last - d]:
            d += 1
        return d

    found = sorted(((match(e), e) for e in range(last) if match(e)), reverse=True)[: shape.num_chains]
    chains = [(length, tuple(tokens[end + 1 : end + num_nodes])) for length, end in found]
    ranked = {}
    for place, (length, chain) in enumerate(chains):
        for depth in range(1, len(chain) + 1):
            path = chain[:depth]
            count = sum(other[:depth] == path for _, other in chains)
            ranked.setdefault(path, (-length, -count, depth, place))
    return sorted(ranked, key=ranked.get)[: num_nodes - 1]


@pytest.mark.parametrize("alphabet", [2, 3, 8])
@pytest.mark.parametrize("num_nodes", [2, 5, 12])
def test_prob_matches_counting_by_hand(alphabet, num_nodes):
    generator = torch.Generator().manual_seed(alphabet * num_nodes)
    shape = NgramShape(max_trie_depth=4, min_bfs_breadth=1, max_bfs_breadth=3, by_frequency=True)
    for _ in range(25):
        length = int(torch.randint(1, 40, (), generator=generator))
        tokens = torch.randint(alphabet, (length,), generator=generator)
        tree = match_tree(tokens[None], torch.tensor([length - 1]), shape, num_nodes)
        ids, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
        paths = [()]
        for node in range(1, num_nodes):
            if parents[node] >= 0:
                paths.append((*paths[parents[node]], ids[node]))
        wanted = prob_by_hand(tokens.tolist(), shape, num_nodes)
        assert paths[1:] == wanted, tokens.tolist()


def test_prob_puts_the_frequent_continuation_before_the_newest():
    history = [5, 1, 5, 1, 5, 1, 5, 2, 5]
    for by_frequency, first in ((True, 1), (False, 2)):
        shape = NgramShape(max_trie_depth=1, min_bfs_breadth=4, max_bfs_breadth=4, by_frequency=by_frequency)
        tree = match_tree(torch.tensor([history]), torch.tensor([len(history) - 1]), shape, 3)
        # a depth of 2 is the least that the engine takes; here only the last token is looked for
        assert tree.tokens[0, 1] == first


@pytest.mark.parametrize("match_type", ["BFS", "PROB"])
def test_both_modes_give_plain_tokens(open_engine, match_type, schedule, device):
    target = tiny.markov(device)
    engine = open_ngram(open_engine, target, schedule, speculative_ngram_match_type=match_type)
    prompts = [tiny.copying_prompt(target, seed, 14) for seed in range(3)]
    records = check_identity(engine, prompts, [SamplingParams(max_new_tokens=20)] * 3)
    assert max(r.accept_len for r in records) > 2


# -- corpus --------------------------------------------------------------------------------------------------


def text_of(tokens):
    return "".join(LETTERS[t] for t in tokens)


def write_corpus(folder, documents):
    path = folder / "corpus.txt"
    path.write_text("\n".join(text_of(d) for d in documents) + "\n")
    return str(path)


def open_corpus(open_engine, target, schedule, path, **changes):
    changes = {"speculative_ngram_external_corpus_path": path, "tokenizer": letter_tokenizer()} | changes
    return open_ngram(open_engine, target, schedule, **changes)


def test_a_corpus_is_copied_from(open_engine, tmp_path, schedule, device):
    target, prompt = tiny.markov(device), tiny.random_prompt(3, 4)
    answer = tiny.oracle_of(target).tokens(prompt, 24)
    path = write_corpus(tmp_path, [tiny.random_prompt(9, 12), (*prompt, *answer)])
    params = [SamplingParams(max_new_tokens=24)]
    means = []
    for engine in (
        open_ngram(open_engine, target, schedule),
        open_corpus(open_engine, target, schedule, path),
    ):
        records = check_identity(engine, [prompt], params)
        means.append(sum(r.accept_len for r in records) / len(records))
    assert means[1] > 3 > means[0]


def test_matches_never_cross_documents(open_engine, tmp_path, schedule, device):
    """The end of one document and the beginning of the next are no continuation of each other."""
    target = tiny.markov(device)
    path = write_corpus(tmp_path, [(1, 2, 3), (4, 5, 6), (7,)])
    engine = open_corpus(open_engine, target, schedule, path)
    assert engine.scheduler.worker.corpus.tolist() == [
        1,
        2,
        3,
        NOTHING,
        4,
        5,
        6,
        NOTHING,
        7,
        NOTHING,
        NOTHING,
    ]
    recorder = Recorder(engine)
    engine.generate([(2, 3), (3,), (1, 2), (6,), (7,)], SamplingParams(max_new_tokens=2))
    first = {r.request: r for r in recorder.records if r.seq_len <= 2}
    for record in first.values():
        drafted = {t for n, t in enumerate(record.tokens) if n and record.parents[n] >= 0}
        assert NOTHING not in drafted
    shape = NgramShape(max_trie_depth=4, min_bfs_breadth=4, max_bfs_breadth=4)
    for newest, follows in (([9, 3], []), ([1, 2], [3]), ([9, 4], [5, 6]), ([3, 4], [5, 6]), ([7], [])):
        history = torch.cat([engine.scheduler.worker.corpus.cpu(), torch.tensor(newest)])[None]
        tree = match_tree(history, torch.tensor([history.shape[1] - 1]), shape, 5)
        used = [int(t) for t, p in zip(tree.tokens[0, 1:], tree.parents[0, 1:], strict=True) if p >= 0]
        assert used == follows, newest
        assert int(tree.match_lens[0]) <= 2


def test_a_corpus_is_capped(open_engine, tmp_path, schedule, device):
    target = tiny.markov(device)
    path = write_corpus(tmp_path, [tiny.random_prompt(i, 10) for i in range(20)])
    engine = open_corpus(open_engine, target, schedule, path, speculative_ngram_external_corpus_max_tokens=37)
    assert len(engine.scheduler.worker.corpus) == 38  # and one end
    check_identity(engine, [(1, 2, 3)], [SamplingParams(max_new_tokens=12)])


@pytest.mark.parametrize("what", ["no file", "no tokenizer"])
def test_a_corpus_that_cannot_be_read_is_named(open_engine, tmp_path, what, schedule, device):
    path = str(tmp_path / "nowhere") if what == "no file" else write_corpus(tmp_path, [(1, 2)])
    changes = {"tokenizer": None} if what == "no tokenizer" else {}
    with pytest.raises(ValueError, match="speculative_ngram_external_corpus_path"):
        open_corpus(open_engine, tiny.markov(device), schedule, path, **changes)


# -- adaptivity ----------------------------------------------------------------------------------------------


def widths(records):
    return [len(r.tokens) for r in records]


def test_novel_text_runs_narrow_steps(open_engine, schedule, device):
    target = tiny.llama(device)  # its text repeats nothing for long
    engine = open_ngram(open_engine, target, schedule, speculative_adaptive=True)
    records = check_identity(engine, [tiny.random_prompt(1, 6)], [SamplingParams(max_new_tokens=60)])
    assert widths(records)[0] == SHAPE[2]
    assert widths(records).count(1) > len(records) / 2


def test_a_long_match_makes_steps_wide_again(open_engine, schedule, device):
    """The prompt holds what is said only later: first novel text, then a long copy."""
    target = tiny.markov(device)
    prompt = tiny.random_prompt(2, 4)
    said = tiny.oracle_of(target).tokens(prompt, 90)
    late = said[40:70]
    prompt_with_copy = (*late, *prompt)  # the window of 3 forgets it at once
    assert tiny.oracle_of(target).tokens(prompt_with_copy, 70) == said[:70]
    engine = open_ngram(open_engine, target, schedule, speculative_adaptive=True, shape=(3, 2, 8))
    records = check_identity(engine, [prompt_with_copy], [SamplingParams(max_new_tokens=70)])
    found = widths(records)
    assert set(found) == {1, 8}
    narrow = found.index(1)
    assert 8 in found[narrow:], "no step was wide again"
    again = records[narrow + found[narrow:].index(8)]
    assert any(r.accept_len > 3 for r in records if r.step >= again.step)


def test_one_promising_request_does_not_make_a_batch_wide(open_engine, schedule, device):
    """What the drafts of the others cost counts too."""
    engine = open_ngram(
        open_engine, tiny.llama(device), schedule, speculative_adaptive=True, shape=(3, 2, 12)
    )
    shapes = engine.scheduler.planner.shapes

    def request(draft_gain, match_len):
        return Request(
            request_id=1, prompt_ids=(1,), params=SamplingParams(), seed=0, max_new_tokens=9,
            stop_token_ids=frozenset(), draft_gain=draft_gain, match_len=match_len,
        )  # fmt: skip

    novel, promising, copying = request(0.0, 0), request(0.0, 8), request(8.0, 0)
    shapes.policy.token_cost = 0.03
    assert shapes.next([promising]).drafts
    assert not shapes.next([novel]).drafts
    assert not shapes.next([promising, *[novel] * 7]).drafts
    assert shapes.next([copying, copying, *[novel] * 3]).drafts
    shapes.policy.token_cost = 0.002
    assert shapes.next([promising, *[novel] * 7]).drafts


def test_adaptivity_is_on_by_default_and_can_be_turned_off():
    from spec_v2.server_args import ServerArgs
    from spec_v2.speculative_hook import resolve_speculative

    for given, wanted in ((None, True), (False, False), (True, True)):
        args = ServerArgs(speculative_algorithm="NGRAM", speculative_adaptive=given)
        assert resolve_speculative(args).speculative_adaptive is wanted
    with pytest.raises(ValueError, match="--speculative-adaptive"):
        resolve_speculative(ServerArgs(speculative_adaptive=True))
