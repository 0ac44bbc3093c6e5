"""`install()` changes what failing imports say, and nothing else."""

from pathlib import Path

import pytest

from tests.legacy.pythons import pythons, run

PROBE = Path(__file__).parent / "probes" / "shims.py"
ALL = pytest.mark.parametrize("python", [path for _, path in pythons()], ids=[v for v, _ in pythons()])

AFTER_V1 = {
    "speculative/eagle_worker_v2.py": "class EagleDraftWorker: pass\nclass EAGLEWorkerV2: pass\n",
    "speculative/eagle_info.py": "class EagleDraftInput:\n    pass\n",
    "speculative/spec_utils.py": (
        "def __getattr__(name):\n"
        "    if name == 'lazy':\n"
        "        return 7\n"
        "    if name == 'get_target_cache_loc':\n"
        "        return 'kept alive by the module itself'\n"
        "    raise AttributeError(f'{name} is not here')\n"
    ),
    "speculative/base_spec_worker.py": "class BaseSpecWorker: pass\n",
    "speculative/adaptive_spec_params.py": "import legacy_compat\nlegacy_compat.uninstall()\n",
    "managers/schedule_batch.py": "class ScheduleBatch: pass\n",
}
WITH_V1 = {"speculative/eagle_worker.py": "class EAGLEWorker:\n    def verify(self): pass\n"}


def make_tree(root, files, packages=True):
    for name, text in files.items():
        path = root / "sglang" / "srt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if packages:
        for folder in [root / "sglang", *(p for p in (root / "sglang").rglob("*") if p.is_dir())]:
            (folder / "__init__.py").touch()
    return root


@ALL
def test_where_sglang_is_not_installed(python):
    assert run(python, PROBE, "absent") == "ok\n"


@ALL
def test_with_an_sglang_after_v1(python, tmp_path):
    assert run(python, PROBE, "new", make_tree(tmp_path, AFTER_V1)) == "ok\n"


@ALL
def test_with_packages_that_have_no_init_file(python, tmp_path):
    assert run(python, PROBE, "namespace", make_tree(tmp_path, AFTER_V1, packages=False)) == "ok\n"


@ALL
@pytest.mark.parametrize("first", ["first-import", "first-patch"])
@pytest.mark.parametrize("packages", [True, False], ids=["packages", "namespaces"])
def test_what_happens_first(python, first, packages, tmp_path):
    assert run(python, PROBE, first, make_tree(tmp_path, AFTER_V1, packages)) == "ok\n"


@ALL
def test_with_an_sglang_that_has_v1(python, tmp_path):
    assert run(python, PROBE, "old", make_tree(tmp_path, WITH_V1)) == "ok\n"
