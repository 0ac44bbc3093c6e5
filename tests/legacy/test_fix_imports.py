"""What `fix` does to imports, and to the names that they bind, letter by letter."""

import textwrap

import pytest

from tests.legacy.scan_tools import S, fix_text, scan_text

V1, V2 = S + "eagle_worker", S + "eagle_worker_v2"


def check(before, after, **options):
    before, after = textwrap.dedent(before), textwrap.dedent(after)
    assert fix_text(before, dedent=False, **options) == after


def check_same(text, **options):
    check(text, text, **options)


def test_a_class_and_its_uses_are_renamed_together():
    before = f"from {V1} import EAGLEWorker  # keep me\nW = EAGLEWorker\n"
    check_same(before)
    check(before, f"from {V2} import EAGLEWorkerV2  # keep me\nW = EAGLEWorkerV2\n", unsafe=True)


def test_a_local_name_stays():
    check(
        f"from {V1} import EAGLEWorker as W\nW(1)\n",
        f"from {V2} import EAGLEWorkerV2 as W\nW(1)\n",
        unsafe=True,
    )


@pytest.mark.parametrize(
    "rest",
    [
        '__all__ = ["EAGLEWorker"]\n',
        "def f(w: 'EAGLEWorker'): ...\n",
        "EAGLEWorker = wrap(EAGLEWorker)\n",
        "def f(EAGLEWorkerV2): return EAGLEWorker\n",
    ],
)
def test_where_a_rename_would_not_reach_everything_the_old_name_stays(rest):
    check(
        f"from {V1} import EAGLEWorker\n{rest}",
        f"from {V2} import EAGLEWorkerV2 as EAGLEWorker\n{rest}",
        unsafe=True,
    )


def test_an_import_is_split_and_keeps_its_comments():
    check(
        f"""\
        from {V1} import (  # c1
            EAGLEWorker,  # c2
            get_last_loc_large_page_size_top_k_1,
        )  # c3
        """,
        f"""\
        from {V1} import (  # c1
            get_last_loc_large_page_size_top_k_1,
        )  # c3
        from {V2} import EAGLEWorkerV2  # c2
        """,
        unsafe=True,
    )
    left = scan_text(f"from {V1} import get_last_loc_large_page_size_top_k_1\n")
    assert [one.severity for one in left] == ["error"]


def test_the_last_name_of_a_list_goes():
    check(
        f"""\
        from {V1} import (
            get_last_loc_large_page_size_top_k_1,  # c1
            EAGLEWorker  # c2
        )
        """,
        f"""\
        from {V1} import (
            get_last_loc_large_page_size_top_k_1,  # c1
        )
        from {V2} import EAGLEWorkerV2  # c2
        """,
        unsafe=True,
    )
    check(
        f"from {V1} import get_last_loc_large_page_size_top_k_1, EAGLEWorker\n",
        f"from {V1} import get_last_loc_large_page_size_top_k_1\nfrom {V2} import EAGLEWorkerV2\n",
        unsafe=True,
    )


def test_names_that_go_to_one_module_keep_their_layout():
    check(
        f"""\
        def f():
            from {S}triton_ops.cache_locs import (
                assign_extend_cache_locs,
                generate_draft_decode_kv_indices,  # c
            )
        """,
        """\
        def f():
            from sglang.kernels.ops.speculative.cache_locs import (
                assign_extend_cache_locs,
                generate_draft_decode_kv_indices,  # c
            )
        """,
    )


def test_names_that_go_to_several_modules():
    check(
        f"import os\n# above\nfrom {S}eagle_info_v2 import assign_extend_cache_locs, fill_bonus_tokens  # why\n",
        """\
        import os
        # above
        from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs
        from sglang.kernels.ops.speculative.eagle import fill_bonus_tokens  # why
        """,
    )


def test_only_the_name_that_moved_leaves():
    check(
        f"from {S}spec_utils import fast_topk, maybe_detect_nan, select_top_k_tokens\n",
        f"from {S}spec_utils import fast_topk, select_top_k_tokens\n"
        "from sglang.srt.utils.async_probe import maybe_detect_nan\n",
    )


def test_a_module_that_moved_takes_names_along_that_the_table_does_not_know():
    check(
        f"from {S}reject_sampling import anything\nimport {S}reject_sampling as rs\nrs.other()\n",
        "from sglang.kernels.ops.speculative.reject_sampling import anything\n"
        "import sglang.kernels.ops.speculative.reject_sampling as rs\nrs.other()\n",
    )


def test_modules_and_what_is_asked_of_them():
    check(
        f"import {V1} as ew\nW = ew.EAGLEWorker\nt = ew.fast_topk\n",
        f"import {V2} as ew\nW = ew.EAGLEWorkerV2\nt = ew.fast_topk\n",
        unsafe=True,
    )
    check(
        f"import {V1}\nW = {V1}.EAGLEWorker\n",
        f"import {V2}\nW = {V2}.EAGLEWorkerV2\n",
        unsafe=True,
    )
    check(
        f"from {S[:-1]} import eagle_worker\nW = eagle_worker.EAGLEWorker\n",
        f"from {S[:-1]} import eagle_worker_v2\nW = eagle_worker_v2.EAGLEWorkerV2\n",
        unsafe=True,
    )


@pytest.mark.parametrize(
    "rest",
    [
        "ew.build_tree_kernel_efficient(x)\n",  # lives in another module today
        "ew.get_last_loc_large_page_size_top_k_1(x)\n",  # is gone
        "ew.anything(x)\n",
        "ew.select_top_k_tokens = f\n",  # to be looked at
        "patch_all(ew)\n",
    ],
)
def test_a_module_is_not_renamed_if_something_would_stay_behind(rest):
    check_same(f"import {V1} as ew\nW = ew.EAGLEWorker\n{rest}", unsafe=True)


@pytest.mark.parametrize(
    "rest",
    [
        "class W(EAGLEWorker): ...\n",
        "EAGLEWorker.draft = f\n",
        "setattr(EAGLEWorker, 'draft', f)\n",
        "mock.patch.object(EAGLEWorker, 'draft')\n",
    ],
)
def test_a_class_that_is_built_upon_is_left_to_people(rest):
    check_same(f"from {V1} import EAGLEWorker\n{rest}", unsafe=True)


def test_type_checking_and_guarded_imports_stay():
    check_same(
        f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {V1} import EAGLEWorker\n",
        unsafe=True,
    )
    check_same(
        f"try:\n    from {V2} import EAGLEWorkerV2 as W\nexcept ImportError:\n    from {V1} import EAGLEWorker as W\n",
        unsafe=True,
    )


def test_drop_legacy_collapses_a_guarded_import():
    check(
        f"""\
        import os
        # which worker
        try:  # new
            from {V2} import EAGLEWorkerV2 as W
        except ImportError:
            from {V1} import EAGLEWorker as W
        print(W)
        """,
        f"""\
        import os
        # which worker
        # new
        from {V2} import EAGLEWorkerV2 as W
        print(W)
        """,
        drop_legacy=True,
    )
    check(
        f"try:\n    from {V1} import EAGLEWorker as W\nexcept ImportError:\n    from {V2} import EAGLEWorkerV2 as W\n",
        f"from {V2} import EAGLEWorkerV2 as W\n",
        drop_legacy=True,
    )
    check_same(
        f"try:\n    from {V1} import EAGLEWorker as W\nexcept ImportError as e:\n    log(e)\n    from {V2} import EAGLEWorkerV2 as W\n",
        drop_legacy=True,
    )


def test_a_table_of_modules_and_names_is_left_to_people():
    check_same(
        f'for m, c in [("{V1}", "EAGLEWorker")]:\n    getattr(importlib.import_module(m), c)\n', unsafe=True
    )
    check_same(f'import importlib\nm = importlib.import_module("{V1}")\n', unsafe=True)
    check(f'm = load("{S}reject_sampling")\n', 'm = load("sglang.kernels.ops.speculative.reject_sampling")\n')


def test_a_flag_does_not_take_the_place_of_a_path():
    check_same('@patch("sglang.srt.environ.envs.SGLANG_ENABLE_SPEC_V2.get")\ndef t(m): ...\n', unsafe=True)


def test_names_that_are_still_there_stay_where_they_are():
    check_same(f"from {S}spec_utils import generate_draft_decode_kv_indices\n", unsafe=True)
