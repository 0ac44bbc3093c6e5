"""Which files are mutated, and which tests are to notice. Quick and close ones first: the first failure ends a run."""

from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = "tests/kernels"
TREES, ENGINES = "tests/test_tree_kernels.py", "tests/test_identity.py"
KV = "tests/test_kv_state.py"


@dataclass(frozen=True, slots=True)
class Target:
    """`only`: qualified names of the functions to mutate, all where it is empty. `tests` are paths, `args` is for pytest."""

    path: str
    tests: tuple[str, ...]
    only: frozenset[str] = field(default=frozenset())
    args: tuple[str, ...] = ()


def _kernel(name: str, *tests: str) -> Target:
    return Target(f"spec_v2/kernels/{name}/reference.py", tests)


TARGETS = (
    _kernel("top_k", TREES, f"{KERNELS}/test_top_k.py"),
    _kernel("build_tree", TREES, f"{KERNELS}/test_tree.py"),
    _kernel("tree_structure", TREES, f"{KERNELS}/test_tree.py"),
    _kernel("verify_tree", TREES, f"{KERNELS}/test_tree.py"),
    _kernel("draft_frontier", f"{KERNELS}/test_frontier.py", "tests/test_self_draft.py"),
    _kernel("accept_chain", "tests/test_rejection.py", f"{KERNELS}/test_chain.py"),
    _kernel("sample_nodes", "tests/test_sample_nodes.py", f"{KERNELS}/test_sampling.py"),
    _kernel("commit_path", f"{KERNELS}/test_frontier.py", KV),
    _kernel("move_kv", f"{KERNELS}/test_rows.py", KV),
    _kernel("write_kv", f"{KERNELS}/test_rows.py", KV),
    _kernel("row_slots", f"{KERNELS}/test_rows.py", KV),
    _kernel("future_rows", "tests/test_future_map.py", KV),
    _kernel("ngram_tree", "tests/test_ngram_match.py", "tests/test_ngram_modes.py"),
    Target("spec_v2/speculative/draft_tree.py", ("tests/test_self_draft.py", KV)),
    Target("spec_v2/speculative/verify.py", (KV, "tests/test_chunked_prefill.py", "tests/test_logprobs.py")),
    Target("spec_v2/speculative/draft_extend.py", (KV, "tests/test_self_draft.py", "tests/test_batch_independence.py")),
    Target(
        "spec_v2/scheduler/scheduler.py",
        ("tests/test_isolation.py", "tests/test_overlap.py"),
        frozenset({"Scheduler._forward_isolation", "Scheduler.record_batch_in_overlap"}),
    ),
    Target("spec_v2/mem_cache/allocator.py", ("tests/test_balance.py", "tests/test_memory_units.py")),
    Target(
        "spec_v2/scheduler/batch_result_processor.py",
        ("tests/test_stops.py", "tests/test_metrics.py", "tests/test_logprobs.py", "tests/test_step_log.py"),
    ),
    Target("spec_v2/scheduler/future_map.py", ("tests/test_future_map.py", "tests/test_batch_independence.py")),
)  # fmt: skip
