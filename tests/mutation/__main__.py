"""Small mistakes are put into the algorithmic core, one at a time; some test must fail for each.

    python -m tests.mutation                    every mutant (hours on two cores); a run that was stopped goes on
    python -m tests.mutation --sample 60        so many of them, the same for the same --seed
    python -m tests.mutation --only allocator   files or mutants whose key has this text
    python -m tests.mutation --list             what would be run

Fails where a mutant survives that explained.toml does not know, or explained.toml names one that is no more.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

from tests.mutation.driver import SURVIVED, BaselineFailed, Record, choose, list_jobs, read_explained, run_all
from tests.mutation.plan import ROOT, TARGETS

EXPLAINED = Path(__file__).with_name("explained.toml")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.split("\n")[0])
    parser.add_argument("--sample", type=int, metavar="N", help="so many mutants instead of all")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose key has this text")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--results", type=Path, default=ROOT / ".mutation" / "results.jsonl", metavar="FILE")
    options = parser.parse_args(arguments)

    every = list_jobs(ROOT, TARGETS)
    explained = read_explained(EXPLAINED)
    keys = {job.mutant.key for job in every}
    stale = [key for key in explained if key not in keys]
    jobs = choose([job for job in every if options.only in job.mutant.key], options.sample, options.seed)
    if options.list:
        print(*(job.mutant.key for job in jobs), sep="\n")
        return 0
    _import_ahead()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    output = options.results.with_name("last_run.txt")
    try:
        results = run_all(
            ROOT, jobs, Record(options.results, ROOT), output, lambda line: print(line, flush=True)
        )
    except BaselineFailed as error:
        print(error, file=sys.stderr)
        return 2
    survivors = [key for key, result in results.items() if result == SURVIVED]
    unexplained = [key for key in survivors if key not in explained]
    print(
        f"{len(results)} of {len(every)} mutants: {len(results) - len(survivors)} killed, "
        f"{len(survivors) - len(unexplained)} survived and are explained, {len(unexplained)} survived"
    )
    for key in unexplained:
        print(f"survived: {key}")
    for key in stale:
        print(f"explained.toml names a mutant that is no more: {key}")
    for key in explained:
        if results.get(key, SURVIVED) != SURVIVED:
            print(f"explained.toml explains a mutant that is killed now: {key}")
    return 1 if unexplained or stale else 0


def _import_ahead() -> None:
    """What every run imports, once; nothing of spec_v2, which is to be imported changed."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # as tests/conftest.py sets it, before anything imports Triton
    names = ("pytest", "torch", "transformers", "hypothesis", "beartype", "jaxtyping", "scipy.stats")
    for name in (*names, "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)


if __name__ == "__main__":
    sys.exit(main())
