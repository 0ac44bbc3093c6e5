"""What the scanner says about Python code: every way in which people's code was seen to use V1."""

import pytest

from tests.legacy.scan_tools import S, at, code_of, scan_text, told, worst

EAGLE = code_of(S + "eagle_worker.EAGLEWorker")
MODULE = code_of(S + "eagle_worker")


# --- the three classes ---


@pytest.mark.parametrize(
    ("module", "name", "new"),
    [
        ("eagle_worker", "EAGLEWorker", "eagle_worker_v2.EAGLEWorkerV2"),
        (
            "multi_layer_eagle_worker",
            "MultiLayerEagleWorker",
            "multi_layer_eagle_worker_v2.MultiLayerEagleWorkerV2",
        ),
        ("standalone_worker", "StandaloneWorker", "standalone_worker_v2.StandaloneWorkerV2"),
    ],
)
def test_the_three_classes(module, name, new):
    (found,) = scan_text(f"from {S}{module} import {name}\n")
    assert (found.severity, found.code) == ("error", code_of(f"{S}{module}.{name}"))
    assert found.row.sglang_replacement == S + new
    (found,) = scan_text(f"import {S}{module}\n")
    assert (found.severity, found.code) == ("error", code_of(f"{S}{module}"))


def test_an_import_is_told_once_and_its_uses_are_not():
    found = scan_text(
        f"from {S}eagle_worker import EAGLEWorker  # keep me\nW = EAGLEWorker\nw = W(1)\nprint(EAGLEWorker)\n"
    )
    assert told(found) == [("error", "import", EAGLE)]
    assert (found[0].span.line, found[0].span.column, found[0].span.end_column) == (1, 49, 60)


def test_each_name_of_an_import_has_its_own_place():
    found = scan_text(f"""\
        from {S}eagle_worker import (  # c1
            EAGLEWorker,  # c2
            get_last_loc_large_page_size_top_k_1,
        )
        """)
    assert [(one.span.line, one.span.column) for one in found] == [(2, 5), (3, 5)]
    assert [one.fixable for one in found] == ["unsafe", "manual"]
    assert "nothing replaces it" in found[1].message


@pytest.mark.parametrize(
    "text",
    [
        f"def make():\n    if x:\n        from {S}eagle_worker import EAGLEWorker\n        return EAGLEWorker\n",
        f"from {S} import eagle_worker\n".replace(". import", " import"),
        f"import {S}eagle_worker as ew\n",
        f"from {S}eagle_worker import *\n",
        f"import sglang\nx = {S}eagle_worker.EAGLEWorker\n",
        f"import importlib\nimportlib.import_module('{S}eagle_worker')\n",
        f"from importlib import import_module as load\nload('{S}eagle_worker')\n",
        f"m = __import__('{S}eagle_worker', fromlist=['EAGLEWorker'])\n",
        f"import sys\nm = sys.modules.get('{S}eagle_worker')\n",
        f"import sys\nm = sys.modules['{S}eagle_worker']\n",
    ],
)
def test_imports_in_every_form(text):
    assert worst(scan_text(text)) == "error"


def test_a_longer_name_is_not_a_removed_one():
    assert not scan_text(f"""\
        import {S}eagle_worker_v2 as ew
        from {S}eagle_worker_v2 import EAGLEWorkerV2, EagleDraftWorker
        target = "{S}eagle_worker_v2.EagleDraftWorker.draft"
        @hook("{S}eagle_worker_v2.EagleDraftWorker._capture_cuda_graphs")
        def f(): ...
        """)


def test_relative_imports_are_resolved_by_the_folder():
    text = "from .eagle_worker import EAGLEWorker\nfrom ..speculative import standalone_worker\n"
    found = scan_text(text, "repo/python/sglang/srt/speculative/my_worker.py")
    assert told(found) == [
        ("error", "import", EAGLE),
        ("error", "import", code_of(S + "standalone_worker")),
    ]
    assert [one.fixable for one in found] == ["manual", "manual"]
    assert not scan_text(text, "repo/other/srt/speculative/my_worker.py")
    # a checkout whose own folder is called sglang is not the package
    assert not scan_text(text, "sglang/scripts/speculative/my_worker.py")


def test_package_root_says_where_the_package_is():
    text = "from .eagle_worker import EAGLEWorker\n"
    found = scan_text(text, "build/stage/sglang/srt/speculative/x.py", package_root="build/stage")
    assert told(found) == [("error", "import", EAGLE)]
    assert not scan_text(text, "elsewhere/sglang/srt/speculative/x.py", package_root="build/stage")


def test_a_fork_that_carries_the_module_itself():
    found = scan_text(
        "class EAGLEWorker:\n    def draft(self): ...\n    def f(self): self.draft()\n",
        "python/sglang/srt/speculative/eagle_worker.py",
    )
    assert told(found) == [("info", "remark", MODULE)]


# --- homonyms ---


@pytest.mark.parametrize(
    "text",
    [
        "from sgl_jax.srt.speculative.eagle_worker import EAGLEWorker\nw = EAGLEWorker(1)\nw.verify(b)\n",
        "from tensorrt_llm._torch.speculative.dflash import DFlashWorker\nclass W(DFlashWorker): ...\n",
        "class ReadFlashWorker: ...\nclass cmdFlashWorker: ...\nclass DDFlashWorker: ...\n",
        "from .eagle_worker import EagleScannerWorker\nEagleScannerWorker().draft()\n",
        "chunker = Chunker(supports_overlap=False)\nreg.register('x', supports_overlap=False)\n",
        "class EAGLEWorker: ...\nif type(w).__name__ == 'EAGLEWorker': ...\n",
        "path = 'vendor/speculative/eagle_worker.py'\n",
        "x = 'mysglang.srt.speculative.eagle_worker'\n",
        "batch.accept_length = 3\nprint(batch.accept_length)\n",
        "worker.draft(); worker.verify(); worker.model_runner\n",
        "policy.is_spec_v2_finished(1)\n",
    ],
)
def test_homonyms_are_left_alone(text):
    assert not scan_text(text)


# --- subclasses ---


def test_a_subclass_of_the_same_name():
    found = scan_text(f"""\
        from {S}eagle_worker import EAGLEWorker as Base
        class EAGLEWorker(Base):
            pass
        w = EAGLEWorker()
        """)
    assert told(found) == [("error", "import", EAGLE), ("error", "base", EAGLE)]
    assert [one.fixable for one in found] == ["manual", "manual"]


def test_overrides_and_dead_arguments():
    found = scan_text(f"""\
        from {S}standalone_worker import StandaloneWorker
        class W(StandaloneWorker):
            def __init__(self, server_args, gpu_id, tp_rank, dp_rank, target_worker):
                super().__init__(server_args=server_args, tp_rank=tp_rank, dp_rank=dp_rank, target_worker=target_worker)
            def forward_draft_extend(self, batch): ...
            def capture_for_decode(self, a, b): ...
            def my_own(self): ...
        """)
    assert [(one.shape, one.span.line) for one in found] == [
        ("import", 1), ("base", 2), ("argument", 4), ("argument", 4), ("override", 5), ("override", 6),
    ]  # fmt: skip
    assert {one.severity for one in found} == {"error"}
    assert {one.fixable for one in found} == {"manual"}
    assert "EagleDraftWorker" in found[4].message


def test_a_subclass_of_a_subclass():
    found = scan_text(f"""\
        from {S}eagle_worker import EAGLEWorker
        class A(EAGLEWorker): ...
        class B(A):
            def draft_forward(self, fb): ...
        """)
    assert ("error", "override", code_of(S + "eagle_worker.EAGLEWorker.draft_forward")) in told(found)


def test_an_unbound_call_past_the_parent():
    found = scan_text("""\
        from sglang.srt.managers.tp_worker import TpModelWorker
        class W(TpModelWorker):
            def __init__(self, a):
                TpModelWorker.__init__(self, server_args=a, moe_ep_rank=0)
        """)
    assert [(one.shape, one.span.line) for one in found] == [("argument", 4)]


# --- members ---


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
    assert told(found) == [("error", "argument", rules_of_parameter(WORKER))], call
    assert found[0].fixable == "manual"


def rules_of_parameter(path):
    from legacy_compat.registry import by_path

    return by_path(path).code


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


# --- places ---


def test_columns_count_characters():
    (found,) = scan_text(f"é = 'ü'; from {S}eagle_worker import EAGLEWorker\n")
    assert found.span.column == len(f"é = 'ü'; from {S}eagle_worker import ") + 1
    assert at([found], 1)
