"""The rows that carry a request from one step to the next: what goes in comes out, and every line is needed."""

import ast
import inspect
import sys
import textwrap

import pytest
import torch

from spec_v2.kernels import future_rows
from spec_v2.scheduler.future_map import POISON, FutureMap
from spec_v2.types import NextDraft, TokenLogprobs, Verdict
from tests.harness import CHAIN, Recorder, make_engine
from tests.scheduling_helpers import ALGORITHMS, expected, greedy, scene, scene_engine, scene_prompts

KINDS = (*ALGORITHMS, "REJECTION", "PENALTIES")

COLUMNS = ("new_seq_lens", "bonus_tokens", "topk_p", "topk_index", "hidden_states", "draft_probs", "history")


def make_map(*, num_rows=6, topk=2, hidden_size=3, history_width=12, draft_probs_width=5, debug=False):
    return FutureMap(
        num_rows=num_rows,
        topk=topk,
        hidden_size=hidden_size,
        history_width=history_width,
        draft_probs_width=draft_probs_width,
        vocab_size=64,
        dtype=torch.float64,
        device=torch.device("cpu"),
        debug=debug,
    )


def make_step(*, predict, seq_lens, topk=2, hidden_size=3, seed=0):
    """(verdict, next draft) of a step that began at `seq_lens` and emitted the rows of `predict` before the -1s."""
    predict = torch.tensor(predict)
    b, w = predict.shape
    accept_lens = (predict >= 0).sum(1)
    generator = torch.Generator().manual_seed(seed)
    verdict = Verdict(
        predict=predict,
        accept_index=torch.where(predict >= 0, torch.arange(w), -1),
        accept_lens=accept_lens,
        new_seq_lens=torch.tensor(seq_lens) + accept_lens,
        draft_depths=torch.full((b,), w - 1),
        match_lens=torch.zeros(b, dtype=torch.long),
        has_numbers=torch.ones(b, dtype=torch.bool),
        logprobs=TokenLogprobs(
            chosen=torch.zeros(b, 0), top=torch.zeros(b, 0, 0), top_ids=torch.zeros(b, 0, 0, dtype=torch.long)
        ),
        hidden_states=torch.zeros(b, w, 0, dtype=torch.float64),
    )
    next_draft = NextDraft(
        topk_p=torch.rand(b, topk, generator=generator),
        topk_index=torch.randint(60, (b, topk), generator=generator),
        hidden_states=torch.rand(b, hidden_size, generator=generator, dtype=torch.float64),
        draft_probs=torch.rand(b, 5, generator=generator),
    )
    return verdict, next_draft


def put(future_map, rows, verdict, next_draft):
    future_map.publish(rows, verdict)
    future_map.stash(rows, verdict, next_draft)


# -- by itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("debug", [False, True])
def test_what_is_put_into_rows_comes_out_of_them(debug):
    future_map, rows = make_map(debug=debug), torch.tensor([4, 1, 3])
    verdict, next_draft = make_step(predict=[[7, 8, -1], [9, -1, -1], [5, 6, 4]], seq_lens=[3, 2, 5])
    put(future_map, rows, verdict, next_draft)
    order = [2, 0]  # a batch that was filtered and reordered: only the row numbers change
    inputs = future_map.resolve(rows[order], None)
    assert inputs.rows.tolist() == [3, 4]
    assert inputs.seq_lens.tolist() == [8, 5]
    assert inputs.bonus_tokens.tolist() == [4, 8]
    for name in ("topk_p", "topk_index", "hidden_states", "draft_probs"):
        assert torch.equal(getattr(inputs.next_draft, name), getattr(next_draft, name)[order]), name


def test_lengths_that_were_reapplied_are_used_as_they_are():
    future_map, rows = make_map(), torch.tensor([2])
    put(future_map, rows, *make_step(predict=[[7]], seq_lens=[3]))
    seq_lens = torch.tensor([4])
    assert future_map.resolve(rows, seq_lens).seq_lens is seq_lens


def test_publish_returns_the_lengths_and_writes_nothing_else():
    future_map, rows = make_map(), torch.tensor([2, 5])
    before = {name: getattr(future_map, name).clone() for name in COLUMNS}
    verdict, _ = make_step(predict=[[7, 8], [9, -1]], seq_lens=[3, 4])
    assert future_map.publish(rows, verdict).tolist() == [5, 5]
    assert future_map.new_seq_lens.tolist() == [POISON, POISON, 5, POISON, POISON, 5]
    for name in COLUMNS[1:]:
        assert torch.equal(getattr(future_map, name).nan_to_num(7), before[name].nan_to_num(7)), name


def test_debug_a_row_can_be_read_once():
    future_map, rows = make_map(debug=True), torch.tensor([2])
    put(future_map, rows, *make_step(predict=[[7]], seq_lens=[3]))
    future_map.resolve(rows, None)
    with pytest.raises(AssertionError, match="not published"):
        future_map.resolve(rows, None)


def test_debug_a_row_that_was_published_but_not_stashed_is_noticed():
    future_map, rows = make_map(debug=True), torch.tensor([2])
    future_map.publish(rows, make_step(predict=[[7]], seq_lens=[3])[0])
    with pytest.raises(AssertionError, match="not stashed"):
        future_map.resolve(rows, None)


def test_debug_reapplied_lengths_that_differ_from_the_rows_are_noticed():
    future_map, rows = make_map(debug=True), torch.tensor([2])
    put(future_map, rows, *make_step(predict=[[7]], seq_lens=[3]))
    with pytest.raises(AssertionError, match="re-applied"):
        future_map.resolve(rows, torch.tensor([5]))


def test_rows_of_others_are_not_touched():
    future_map = make_map(debug=True)
    put(future_map, torch.tensor([1, 2, 3]), *make_step(predict=[[7], [8], [9]], seq_lens=[1, 2, 3]))
    others = {name: getattr(future_map, name)[[1, 3]].clone() for name in COLUMNS}
    future_map.resolve(torch.tensor([2]), None)
    put(future_map, torch.tensor([2]), *make_step(predict=[[4]], seq_lens=[3], seed=1))
    for name, before in others.items():
        assert torch.equal(getattr(future_map, name)[[1, 3]], before), name


def test_history_holds_the_known_tokens_by_position():
    """A step's garbage past its accepted tokens lies beyond the known ones, and the next step overwrites it."""
    future_map, rows = make_map(), torch.tensor([3])
    future_map.history[3, :2] = torch.tensor([50, 51])  # the prompt
    known, seq_len = [50, 51], 2
    steps = ([[52, -1, -1]], [[53, 54, -1]], [[55, -1, -1]], [[56, 57, 58]])
    put(future_map, rows, *make_step(predict=steps[0], seq_lens=[seq_len - 1]))  # as after a prefill
    known += steps[0][0][:1]
    for predict in steps[1:]:
        put(future_map, rows, *make_step(predict=predict, seq_lens=[seq_len]))
        emitted = [token for token in predict[0] if token >= 0]
        known, seq_len = known + emitted, seq_len + len(emitted)
        assert future_map.history[3, : seq_len + 1].tolist() == known
        assert (future_map.history[3, seq_len + 1 :] == POISON).all()


def test_history_at_the_end_of_a_row_stays_inside_it():
    future_map = make_map(history_width=4)
    before = future_map.history.clone()
    put(future_map, torch.tensor([2]), *make_step(predict=[[7, -1, -1]], seq_lens=[2]))
    assert future_map.history[2, :3].tolist() == [POISON] * 3
    assert torch.equal(future_map.history[[0, 1, 3, 4, 5]], before[[0, 1, 3, 4, 5]])


# -- inside an engine ------------------------------------------------------------------------------------------


def everything(algorithm, device, schedule="overlap"):
    """Tokens, metrics, and each step's tree, of a run whose requests join and leave. EAGLE's head reads hidden states."""
    if algorithm in ("REJECTION", "PENALTIES"):
        return drawn_or_penalised(algorithm, device, schedule)
    drafter = "random" if algorithm == "EAGLE" else None
    with scene_engine(algorithm, device, drafter, schedule=schedule, max_running_requests=2) as engine:
        recorder = Recorder(engine)
        prompts = scene_prompts(algorithm, engine.model, 3)
        params = [greedy(n) for n in (6, 10, 4)]
        completions = engine.generate(prompts, params)
        assert [done.output_ids for done in completions] == expected(engine, prompts, params)
        trees = {(r.request, r.seq_len): (r.tokens, r.parents, r.scores) for r in recorder.records}
        return completions, trees


def drawn_or_penalised(kind, device, schedule):
    """Tokens and metrics where a row carries what only rejection sampling, or only penalties, read."""
    target, draft = scene("STANDALONE", device)
    options = {"speculative_use_rejection_sampling": True} if kind == "REJECTION" else {}
    with make_engine(target, "STANDALONE", draft, CHAIN, schedule=schedule, **options) as engine:
        params = [
            greedy(12, temperature=1.0, seed=seed)
            if kind == "REJECTION"
            else greedy(12, repetition_penalty=1.5, frequency_penalty=1.0)
            for seed in range(3)
        ]
        return engine.generate(scene_prompts("STANDALONE", engine.model, 3), params)


@pytest.fixture(scope="module")
def unbroken(device):
    return {algorithm: everything(algorithm, device) for algorithm in KINDS}


# where rows are written and read: methods of the map, and the references of the kernels that it calls
HOMES = {
    "publish": (FutureMap, "publish"),
    "publish_rows": (future_rows, "publish_rows_reference"),
    "stash": (FutureMap, "stash"),
    "stash_rows": (future_rows, "stash_rows_reference"),
    "gather_rows": (future_rows, "gather_rows_reference"),
}


def source_of(method):
    return ast.parse(textwrap.dedent(inspect.getsource(getattr(*HOMES[method]))))


def writes(node):
    """Whether a statement of a method changes a row: it assigns to a subscript, or calls or guards what does."""
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Subscript)
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return isinstance(node, (ast.Expr, ast.If)) and not is_docstring


class Breaker(ast.NodeTransformer):
    """Drops the n-th statement that writes a row, or lets the n-th gather read the padding row."""

    def __init__(self, kind, place=-1):
        self.kind, self.place, self.found = kind, place, []

    def visit(self, node):
        node = self.generic_visit(node)
        if self.kind == "drop" and isinstance(node, ast.stmt) and writes(node):
            return self._break(node, ast.Pass())
        if self.kind == "gather" and isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            column, index = ast.unparse(node.value), ast.unparse(node.slice)
            if column.split(".")[-1] in COLUMNS and index == "rows":
                return self._break(node, ast.parse(f"{column}[rows * 0]", mode="eval").body)
        return node

    def _break(self, node, broken):
        self.found.append(" ".join(ast.unparse(node).split()))
        return ast.copy_location(broken, node) if len(self.found) - 1 == self.place else node


def broken_lines():
    cases = []
    for kind, methods in (
        ("drop", ("publish", "publish_rows", "stash", "stash_rows")),
        ("gather", ("gather_rows",)),
    ):
        for method in methods:
            breaker = Breaker(kind)
            breaker.visit(source_of(method))
            cases += [pytest.param(kind, method, i, id=f"{kind}: {t}") for i, t in enumerate(breaker.found)]
    return cases


def break_line(monkeypatch, kind, method, place):
    """Put the method in place, compiled again with one of its lines broken."""
    tree = ast.fix_missing_locations(Breaker(kind, place).visit(source_of(method)))
    owner, name = HOMES[method]
    namespace = dict(vars(sys.modules[getattr(owner, name).__module__]))
    exec(compile(tree, f"<broken {method}>", "exec"), namespace)  # noqa: S102 - our own source, changed
    monkeypatch.setattr(owner, name, namespace[name])


def test_all_columns_are_among_the_lines_that_are_broken():
    broken = " ".join(case.id for case in broken_lines())
    for kind in ("drop", "gather"):
        for column in COLUMNS[: None if kind == "drop" else -1]:  # history is read whole, by the worker
            assert f"{column}[rows" in broken, (kind, column)


@pytest.mark.parametrize(("kind", "method", "place"), broken_lines())
def test_no_line_can_be_left_out(kind, method, place, unbroken, device, monkeypatch):
    """Some algorithm fails its checks, or drafts or accepts something else."""
    if device.type != "cpu":
        pytest.skip("an index that a broken line lets through ends the whole CUDA context")
    break_line(monkeypatch, kind, method, place)
    for algorithm in KINDS:
        try:
            if everything(algorithm, device) != unbroken[algorithm]:
                return
        except (AssertionError, RuntimeError, IndexError):
            return
    pytest.fail("nothing noticed")


def test_compiling_again_alone_breaks_nothing(unbroken, device, monkeypatch):
    """The control of the test above."""
    for method in HOMES:
        break_line(monkeypatch, "drop", method, -2)
    for algorithm in KINDS:
        assert everything(algorithm, device) == unbroken[algorithm]


class Ledger:
    """Notes which rows were written, and refuses a read of one that was not written since it was last read."""

    def __init__(self, future_map):
        self.map, self.published, self.stashed, self.reads = future_map, set(), set(), 0
        self.publish, self.stash, self.resolve = future_map.publish, future_map.stash, future_map.resolve
        future_map.publish, future_map.stash = self.on_publish, self.on_stash
        future_map.resolve = self.on_resolve

    def on_publish(self, rows, verdict):
        self.published |= set(rows.tolist())
        return self.publish(rows, verdict)

    def on_stash(self, rows, verdict, next_draft):
        assert set(rows.tolist()) <= self.published, "stashed before it was published"
        self.stashed |= set(rows.tolist())
        self.stash(rows, verdict, next_draft)

    def on_resolve(self, rows, seq_lens):
        read = set(rows.tolist())
        assert 0 not in read
        assert read <= self.published & self.stashed, f"rows {read} were not written"
        self.published -= read
        self.stashed -= read
        self.reads += 1
        return self.resolve(rows, seq_lens)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_only_rows_that_were_written_are_read_and_row_0_stays_empty(algorithm, schedule, device):
    with scene_engine(algorithm, device, schedule=schedule, debug=False, max_running_requests=2) as engine:
        ledger = Ledger(engine.scheduler.future_map)
        prompts = scene_prompts(algorithm, engine.model, 4)
        params = [greedy(n) for n in (6, 10, 1, 4)]
        assert [c.output_ids for c in engine.generate(prompts, params)] == expected(engine, prompts, params)
        assert ledger.reads >= 3
        for name in COLUMNS:
            padding = getattr(ledger.map, name)[0]
            empty = padding.isnan() if padding.is_floating_point() else padding == POISON
            assert empty.all(), name


def test_publish_comes_between_verify_and_draft_extend(device, schedule):
    with scene_engine("STANDALONE", device, schedule=schedule) as engine:
        seen = []
        engine._forward_stream.on_run = lambda label, step: seen.append((step, label))
        engine.generate([(1, 2, 3)], greedy(6))
        assert engine.scheduler.future_map.publish_ready.query()
        engine._forward_stream.on_run = None
    for step in {step for step, label in seen if label == "verify"}:
        labels = [label for s, label in seen if s == step and label != "row_table"]
        assert labels == ["resolve", "draft", "verify", "publish", "draft_extend", "stash", "pack"]
