"""What the scanner says about members, arguments and results."""

import pytest

from legacy_compat.registry import by_path
from tests.legacy.scan_tools import S, code_of, scan_text, told, worst

EAGLE = code_of(S + "eagle_worker.EAGLEWorker")


def test_class_attributes_that_are_replaced():
    found = scan_text(f"""\
        from {S}eagle_worker import EAGLEWorker
        EAGLEWorker.draft = wrap(EAGLEWorker.draft)
        setattr(EAGLEWorker, "verify_tree", f)
        """)
    assert [(one.shape, one.span.line) for one in found] == [
        ("import", 1),
        ("monkeypatch", 2),
        ("attribute", 2),
    ]
    assert found[1].row.sglang_replacement == S + "eagle_worker_v2.EagleDraftWorker.draft"
    assert found[0].fixable == "manual"  # with the new name alone, the patch would be of nothing


def test_module_attributes_that_are_replaced():
    found = scan_text(f"""\
        import {S}eagle_worker as ew
        ew.select_top_k_tokens = f
        ew.build_tree_kernel_efficient(x)
        """)
    assert [one.row.sglang_replacement for one in found] == [
        S + "eagle_worker_v2",
        S + "eagle_worker_v2.select_top_k_tokens",
        S + "eagle_worker_common.build_tree_kernel_efficient",
    ]


def test_objects_are_followed_through_annotations_constructors_and_self():
    found = scan_text(f"""\
        from typing import TYPE_CHECKING, Optional
        if TYPE_CHECKING:
            from {S}eagle_worker import EAGLEWorker
        def patch(w: "EAGLEWorker", v: "Optional[EAGLEWorker]" = None):
            w.draft = f
            v.draft_model_runner
        class Holder:
            def __init__(self, worker: "EAGLEWorker"):
                self.worker = worker
            def go(self):
                return self.worker.capture_for_decode(1, 2)
        """)
    assert [(one.shape, one.span.line, one.severity) for one in found] == [
        ("import", 3, "warning"),  # nothing fails when it runs
        ("monkeypatch", 5, "error"),
        ("attribute", 6, "error"),
        ("attribute", 11, "error"),
    ]
    assert found[0].fixable == "manual"


def test_members_that_v2_kept_are_not_told():
    assert told(
        scan_text(f"""\
        from {S}eagle_worker import EAGLEWorker
        w = EAGLEWorker(1)
        w.server_args, w.topk, w.speculative_num_steps, w.device
        w.clear_cache_pool()
        """)
    ) == [("error", "import", EAGLE)]


def test_results_of_another_shape():
    found = scan_text(f"""\
        from {S}eagle_worker_v2 import EAGLEWorkerV2
        def f(worker: EAGLEWorker, w: EAGLEWorkerV2, other):
            logits, out, cg = worker.verify(batch)
            p, s, t = w.draft_worker.draft_forward(fb)
            p, s, t, q = w.draft_worker.draft_forward(fb)
            a, b, c = other.verify(batch)
            whole = worker.verify(batch)
        from {S}eagle_worker import EAGLEWorker
        """)
    results = [one for one in found if one.shape == "result"]
    assert [(one.span.line, one.severity) for one in results] == [(3, "warning"), (4, "warning")]
    assert "3 values" in results[0].message
    assert "one object" in results[0].message
    assert "4 values" in results[1].message


def test_fields_of_results_only_on_request():
    text = "import sglang\nids = result.next_token_ids[:n]\n"
    assert not scan_text(text)
    (found,) = scan_text(text, strict_results=True)
    assert (found.severity, found.shape) == ("info", "result")


def test_schedule_batch_only_where_it_is_one():
    code = code_of("sglang.srt.managers.schedule_batch.ScheduleBatch.get_model_worker_batch")
    found = scan_text("""\
        from sglang.srt.managers.schedule_batch import ModelWorkerBatch, ScheduleBatch
        def f(batch: ScheduleBatch):
            return batch.get_model_worker_batch()
        """)
    assert ("error", "attribute", code) in told(found)
    assert len(found) == 2
    assert not scan_text("def f(batch):\n    return batch.get_model_worker_batch()\n")


# --- enable_overlap, create_worker, _overlap_forward_isolation, is_spec_v2 ---

WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker(enable_overlap)"


@pytest.mark.parametrize(
    "call",
    [
        "algorithm.create_worker(server_args, enable_overlap=True)",
        "SpeculativeAlgorithm.EAGLE.create_worker(server_args, enable_overlap=x)",
        "SpeculativeAlgorithm.EAGLE.create_worker(server_args, True)",
        "SpeculativeAlgorithm.from_string('EAGLE').create_worker(server_args, True)",
        "create_worker(algorithm, server_args, True)",
        "create_worker(algorithm, server_args, enable_overlap=True)",
        "spec_info.create_worker(algorithm, server_args, True)",
    ],
)
def test_create_worker_has_no_overlap_argument(call):
    text = f"from {S[:-1]} import spec_info\nfrom {S}spec_info import SpeculativeAlgorithm, create_worker\n{call}\n"
    found = scan_text(text)
    assert told(found) == [("error", "argument", by_path(WORKER).code)], call
    assert found[0].fixable == "manual"


def test_enable_overlap_where_it_is_still_right():
    assert not scan_text(f"""\
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from {S}spec_info import SpeculativeAlgorithm
        SpeculativeAlgorithm.EAGLE.create_worker(server_args)
        batch = ScheduleBatch.init_new(reqs, pool, alloc, cache, config, enable_overlap=True, spec_algorithm=algo)
        if batch.enable_overlap and self.enable_overlap: ...
        bench_one_batch(enable_overlap=False)
        class Scheduler:
            enable_overlap: bool = True
        """)


def test_get_draft_kv_pool_lost_enable_overlap():
    found = scan_text("""\
        from sglang.srt.mem_cache.kv_cache_builder import get_draft_kv_pool
        get_draft_kv_pool(draft_worker=w, spec_algorithm=a, server_args=s, enable_overlap=True)
        """)
    by_shape = {one.shape: one for one in found}
    assert by_shape["argument"].fixable == "safe"
    assert by_shape["import"].fixable == "manual"  # by 0.5.23 the function is gone too
    assert told(scan_text("""\
        from sglang.srt.mem_cache.kv_cache_builder import get_draft_kv_pool
        get_draft_kv_pool(draft_worker=w, enable_overlap=True)
        """, target="0.5.13")) == [("error", "argument", by_shape["argument"].code)]  # fmt: skip


def test_forward_isolation():
    found = scan_text("""\
        with sched._overlap_forward_isolation(batch):
            pass
        with sched._forward_isolation(batch, overlap=True):
            pass
        class Mixin:
            def _overlap_forward_isolation(self, batch): ...
            def go(self):
                with self._overlap_forward_isolation(1): ...
        """)
    assert [(one.span.line, one.severity, one.fixable) for one in found] == [
        (1, "error", "safe"),
        (6, "warning", "manual"),  # nobody calls it any more; the class's own call of it is its own affair
    ]


def test_is_spec_v2_in_its_three_meanings():
    text = """\
        if batch.is_spec_v2 and x: ...
        class Fake:
            is_spec_v2: bool = True
            def __init__(self):
                self.is_spec_v2 = True
        policy.is_spec_v2_finished(1)
        """
    found = scan_text(text)
    assert [(one.span.line, one.severity, one.fixable) for one in found] == [
        (1, "error", "unsafe"), (3, "info", "manual"), (5, "info", "manual"),
    ]  # fmt: skip
    assert "enable_overlap" in found[0].row.changes  # what it meant up to 0.5.12
    assert not scan_text(text, target="0.5.13")
    assert worst(scan_text(text, target="0.5.14")) == "error"
    assert worst(scan_text("import sglang\nif hasattr(batch, 'is_spec_v2'): ...\n")) == "error"


def test_plugins_that_leave_overlap_out():
    found = scan_text(f"""\
        from {S}spec_info import SpeculativeAlgorithm
        @SpeculativeAlgorithm.register("A", supports_overlap=False)
        class A: ...
        @SpeculativeAlgorithm.register("B")
        class B: ...
        @SpeculativeAlgorithm.register("C", supports_overlap=True)
        class C: ...
        @SpeculativeAlgorithm.register("D", **options)
        class D: ...
        """)
    assert [(one.span.line, one.severity) for one in found] == [(2, "warning"), (4, "warning")]


def test_stand_ins_that_still_have_it():
    found = scan_text("batch = MagicMock(is_spec_v2=True)\n")
    assert [(one.severity, one.shape) for one in found] == [("info", "definition")]


def test_nine_arguments_by_position():
    text = f"from {S}eagle_worker_v2 import EAGLEWorkerV2\nEAGLEWorkerV2(a, 0, 1, 2, 3, 4, 5, 6, t)\nEAGLEWorkerV2(a, 0, 1, t)\n"
    (found,) = scan_text(text)
    assert (found.shape, found.note, found.span.line) == ("argument", "passed by position", 2)


def test_a_method_does_not_see_its_class_s_names():
    found = scan_text(f"""\
        import {S}eagle_worker as ew
        class A:
            ew = None
            def f(self):
                return ew.EAGLEWorker
        """)
    assert [(one.shape, one.span.line) for one in found] == [("import", 1), ("attribute", 5)]


def test_modules_that_were_looked_up():
    found = scan_text(f"""\
        import sys
        a = sys.modules["{S}eagle_worker"]
        a.EAGLEWorker.draft = f
        b = sys.modules.get("{S}eagle_worker")
        b.EAGLEWorker.draft_forward
        """)
    assert [(one.shape, one.span.line) for one in found] == [
        ("string", 2), ("attribute", 3), ("monkeypatch", 3), ("string", 4), ("attribute", 5), ("attribute", 5),
    ]  # fmt: skip
