"""The mutation driver: which mutants it makes, and that it tells killed from survived, on a tree of its own."""

import ast
import textwrap

import pytest

from tests.mutation import __main__ as command
from tests.mutation import driver
from tests.mutation.driver import KILLED, SURVIVED, TIMED_OUT, Record, choose, list_jobs, run_all
from tests.mutation.mutants import make_mutants
from tests.mutation.plan import ROOT, TARGETS, Target

CORE = '''
"""A docstring with 1."""
import logging

LIMIT = 4
_LOG = logging.getLogger(__name__)


class Counter:
    def clamp(self, n: int, low: int = 0) -> int:
        """Not 1."""
        assert n < 100
        if n > 3:
            _LOG.info("more than %d", 3)
            raise ValueError(f"{n + 1}")
        return max(n, low)


def total(items):
    found = 0
    for item in items:
        found += item
    return found
'''


@pytest.fixture
def tree(tmp_path):
    """A module, and tests of it."""
    (tmp_path / "core.py").write_text(CORE)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")

    def write(test):
        text = "import pytest, sys\nsys.path.insert(0, '.')\nfrom core import *\n" + textwrap.dedent(test)
        (tmp_path / "test_core.py").write_text(text)
        return Target("core.py", ("test_core.py",), args=("-c", "pytest.ini", "-p", "no:jaxtyping"))

    write.root = tmp_path
    return write


def keys_of(path, **options):
    return [mutant.key for mutant in make_mutants(path, "core.py", **options)]


def test_mutants_are_small_and_leave_texts_alone(tree):
    keys = keys_of(tree.root / "core.py")
    assert "core.py::Counter.clamp: n > 3 -> n >= 3" in keys
    assert "core.py::Counter.clamp: n > 3 -> n > 4" in keys
    assert "core.py::Counter.clamp: n > 3 -> not n > 3" in keys
    assert "core.py::Counter.clamp: max(n, low) -> max(low, n)" in keys
    assert "core.py::total: found += item -> pass" in keys
    assert "core.py::total: found += item -> found -= item" in keys
    assert any("raise ValueError" in key and key.endswith("-> pass") for key in keys)
    assert len(keys) == len(set(keys))
    for never in ("LIMIT", "100", "n + 1", "_LOG", "docstring"):
        assert not any(never in key and "raise" not in key for key in keys), never


def test_each_mutant_is_another_program(tree):
    original = ast.unparse(ast.parse(CORE))
    sources = [mutant.source for mutant in make_mutants(tree.root / "core.py", "core.py")]
    assert original not in sources
    assert len(sources) == len(set(sources))


def test_only_the_functions_asked_for(tree):
    keys = keys_of(tree.root / "core.py", only=frozenset({"total"}))
    assert keys
    assert all("::total:" in key for key in keys)
    with pytest.raises(ValueError, match="nothing to mutate in gone"):
        list_jobs(tree.root, [Target("core.py", (), frozenset({"gone"}))])


def test_a_key_outlives_edits_elsewhere(tree):
    before = keys_of(tree.root / "core.py")
    (tree.root / "core.py").write_text("import os\n\n\ndef other():\n    pass\n" + CORE)
    assert keys_of(tree.root / "core.py") == before


def results_of(tree, target, record="results.jsonl", keep=lambda key: True):
    jobs = [job for job in list_jobs(tree.root, [target]) if keep(job.mutant.key)]
    place = Record(tree.root / record, tree.root)
    return run_all(tree.root, jobs, place, tree.root / "out.txt", lambda _: None)


def test_killed_and_survived_are_told_apart(tree):
    target = tree("def test_total():\n    assert total([1, 2]) == 3\n")
    results = results_of(tree, target, keep=lambda key: "item -> pass" in key or "max" in key)
    assert results == {
        "core.py::total: found += item -> pass": KILLED,
        "core.py::Counter.clamp: max(n, low) -> max(low, n)": SURVIVED,
    }
    assert (tree.root / "core.py").read_text() == CORE  # no file is changed


def test_what_never_ends_is_stopped(tree, monkeypatch):
    monkeypatch.setattr(driver, "ENOUGH_SECONDS", 1)
    monkeypatch.setattr(driver, "SLOWER", 0)
    target = tree("def test_total():\n    while total([1]) != 1: pass\n")
    results = results_of(tree, target, keep=lambda key: key.endswith("item -> pass"))
    assert list(results.values()) == [TIMED_OUT]


def test_a_stopped_run_goes_on_until_something_changes(tree, monkeypatch):
    target = tree("def test_total():\n    assert total([1, 2]) == 3\n")
    first = results_of(tree, target, keep=lambda key: key.endswith("item -> pass"))
    runs = []
    judge = driver._judge
    monkeypatch.setattr(driver, "_judge", lambda *args: runs.append(args) or judge(*args))
    with (tree.root / "results.jsonl").open("a") as file:
        file.write('{"key": "cut o')
    assert results_of(tree, target, keep=lambda key: key.endswith("item -> pass")) == first
    assert runs == []
    target = tree("def test_nothing():\n    pass\n")
    assert set(results_of(tree, target, keep=lambda key: key.endswith("item -> pass")).values()) == {SURVIVED}
    assert len(runs) == 1


def test_tests_that_fail_by_themselves_say_nothing(tree):
    with pytest.raises(driver.BaselineFailed, match=r"core\.py: its tests fail without a mutant"):
        results_of(tree, tree("def test_total():\n    assert total([1]) == 2\n"))


def test_a_sample_is_the_same_for_the_same_seed(tree):
    jobs = list_jobs(tree.root, [tree("")])
    assert choose(jobs, 5, 1) == choose(jobs, 5, 1) != choose(jobs, 5, 2)
    assert choose(jobs, None, 0) == choose(jobs, 10_000, 0) == jobs


def test_an_explanation_needs_a_reason(tmp_path):
    (tmp_path / "explained.toml").write_text('[[mutant]]\nkey = "a"\n')
    with pytest.raises(ValueError, match="lacks key or reason"):
        driver.read_explained(tmp_path / "explained.toml")


def test_the_plan_names_files_that_exist_and_explains_mutants_that_exist():
    for target in TARGETS:
        assert all((ROOT / path).is_file() for path in (target.path, *target.tests))
    keys = {job.mutant.key for job in list_jobs(ROOT, TARGETS)}
    assert set(driver.read_explained(command.EXPLAINED)) <= keys
