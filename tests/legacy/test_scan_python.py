"""What the scanner says about imports and subclasses, in every form that people's code was seen to have."""

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


# --- places ---


def test_columns_count_characters():
    (found,) = scan_text(f"é = 'ü'; from {S}eagle_worker import EAGLEWorker\n")
    assert found.span.column == len(f"é = 'ü'; from {S}eagle_worker import ") + 1
    assert at([found], 1)
