"""Runs the tests against mutants, each in a process of its own that sees the changed source; no file is ever changed.

A forked process starts with torch and pytest imported, which is most of what a small test run costs.
"""

import contextlib
import hashlib
import importlib.machinery
import json
import os
import random
import resource
import signal
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutation.mutants import Mutant, make_mutants
from tests.mutation.plan import Target

SURVIVED, KILLED, TIMED_OUT = "survived", "killed", "timed out"
ENOUGH_SECONDS = 20  # of processor time, for runs that take next to none without a mutant
SLOWER = 5  # times the processor time of the run without a mutant, before a mutant counts as endless
EXIT_PASSED, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 2  # pytest's; the last: a module could not be imported


@dataclass(frozen=True, slots=True)
class Job:
    target: Target
    mutant: Mutant


def list_jobs(root: Path, targets: Iterable[Target]) -> list[Job]:
    """All mutants of all targets. A Target's functions must exist: a renamed one would be left out in silence."""
    jobs = []
    for target in targets:
        mutants = make_mutants(root / target.path, target.path, target.only)
        seen = {mutant.key.split("::")[1].split(":")[0] for mutant in mutants}
        if missing := sorted(target.only - seen):
            raise ValueError(
                f"{target.path}: nothing to mutate in {missing[0]}; correct tests/mutation/plan.py"
            )
        jobs += [Job(target, mutant) for mutant in mutants]
    return jobs


def choose(jobs: Sequence[Job], sample: int | None, seed: int) -> list[Job]:
    """`sample` of the jobs, the same for the same seed, in their order."""
    if sample is None or sample >= len(jobs):
        return list(jobs)
    return [jobs[i] for i in sorted(random.Random(seed).sample(range(len(jobs)), sample))]


def read_explained(path: Path) -> dict[str, str]:
    """Why a mutant may survive, by its key. Raises ValueError for an entry without a reason."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", [])
    for entry in entries:
        if not entry.get("key") or not entry.get("reason"):
            raise ValueError(f"{path}: {entry} lacks key or reason")
    return {entry["key"]: entry["reason"] for entry in entries}


# -- one run in a process of its own -------------------------------------------------------------------------


def install(path: Path, source: str) -> None:
    """From now on this process finds `source` where it would read the module at `path`."""
    here = os.path.realpath(path)
    read = importlib.machinery.SourceFileLoader.get_data

    def get_data(self: Any, wanted: str) -> bytes:
        if os.path.realpath(wanted) == here:
            return source.encode()
        if wanted.endswith(".pyc") and path.stem == Path(wanted).name.partition(".")[0]:
            raise FileNotFoundError(wanted)  # compiled from the file as it is
        return read(self, wanted)

    importlib.machinery.SourceFileLoader.get_data = get_data  # type: ignore[method-assign]
    sys.dont_write_bytecode = True


def in_process(
    run: Callable[[], int], output: Path, cpu_seconds: float | None, wall_seconds: float
) -> tuple[int | None, float]:
    """(exit status, processor seconds) of `run` in a forked process; the status is None where it did not end in time.

    Processor time is what counts, so a busy machine makes nobody's mutant endless; the other limit is for deadlocks.
    """
    begun = resource.getrusage(resource.RUSAGE_CHILDREN)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            if cpu_seconds is not None:
                limit = max(1, int(cpu_seconds))
                resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
            status = run()
        except BaseException:  # noqa: BLE001 - a mutant may raise anything, and this child only reports
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(status))
    deadline = time.monotonic() + wall_seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):  # what it started ends with it
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        os.waitpid(pid, 0)
        return None, float("inf")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used.ru_utime + used.ru_stime - begun.ru_utime - begun.ru_stime
    if os.WIFSIGNALED(status):
        return (None if os.WTERMSIG(status) == signal.SIGXCPU else -os.WTERMSIG(status)), seconds
    return os.WEXITSTATUS(status), seconds


def run_tests(root: Path, target: Target, source: str | None) -> int:
    """pytest's exit status for a target's tests, with `source` in place of the file where it is given."""
    import pytest

    os.chdir(root)
    if source is not None:
        install(root / target.path, source)
    quiet = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # of plugins that are imported already
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *quiet, *target.args, *target.tests]))


# -- all of them ---------------------------------------------------------------------------------------------


class Record:
    """Results by mutant, kept in a file line by line, so that a run that was stopped goes on where it was."""

    def __init__(self, path: Path, root: Path) -> None:
        self._path, self._root = path, root
        self._known: dict[str, dict[str, Any]] = {}
        self._digests: dict[Target, str] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):  # the last line of a run that was killed
                    entry = json.loads(line)
                    self._known[entry["key"]] = entry

    def find(self, job: Job) -> str | None:
        """What became of the mutant, where neither its file nor its tests have changed since."""
        entry = self._known.get(job.mutant.key)
        return entry["result"] if entry and entry["digest"] == self._digest(job.target) else None

    def add(self, job: Job, result: str) -> None:
        entry = {"key": job.mutant.key, "result": result, "digest": self._digest(job.target)}
        self._known[job.mutant.key] = entry
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def _digest(self, target: Target) -> str:
        if target not in self._digests:
            files = [self._root / name.partition("::")[0] for name in (target.path, *target.tests)]
            found = hashlib.sha256(b"\0".join(path.read_bytes() for path in files))
            self._digests[target] = found.hexdigest()[:16]
        return self._digests[target]


class BaselineFailed(Exception):
    """The tests fail without any mutant, so they can say nothing about one."""


def run_all(
    root: Path, jobs: Sequence[Job], record: Record, output: Path, say: Callable[[str], None]
) -> dict[str, str]:
    """What became of each mutant, by its key."""
    results: dict[str, str] = {}
    limits: dict[Target, float] = {}
    for number, job in enumerate(jobs, 1):
        result = record.find(job)
        if result is None:
            if job.target not in limits:
                limits[job.target] = _limit_of(root, job.target, output)
            result = _judge(root, job, limits[job.target], output)
            record.add(job, result)
        results[job.mutant.key] = result
        if result != KILLED:
            say(f"{number}/{len(jobs)} {result}: line {job.mutant.line}: {job.mutant.key}")
        elif number % 20 == 0:
            say(f"{number}/{len(jobs)}")
    return results


def _limit_of(root: Path, target: Target, output: Path) -> float:
    status, seconds = in_process(lambda: run_tests(root, target, None), output, None, 3600)
    if status != EXIT_PASSED:
        tail = output.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise BaselineFailed(f"{target.path}: its tests fail without a mutant (status {status}):\n{tail}")
    return max(ENOUGH_SECONDS, SLOWER * seconds)


def _judge(root: Path, job: Job, limit: float, output: Path) -> str:
    run = lambda: run_tests(root, job.target, job.mutant.source)
    status, _ = in_process(run, output, limit, 20 * limit + 600)
    if status is None:
        return TIMED_OUT
    return SURVIVED if status == EXIT_PASSED else KILLED
