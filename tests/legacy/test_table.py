"""The table: it fits its schema, its codes and paths are unique, and what it says of spec_v2 is there."""

import ast
import dataclasses
import importlib
import inspect
import json
import re
import subprocess
import sys
import textwrap
from collections import Counter

import pytest

from legacy_compat import registry
from legacy_compat.registry import FOLDER, by_code, by_path, load, nearest, version_key
from legacy_compat.registry.schema import check

S = "sglang.srt.speculative."
TABLE = load()
SCHEMA = json.loads((FOLDER / "schema.json").read_text(encoding="utf-8"))
RAW = json.loads((FOLDER / "removals.json").read_text(encoding="utf-8"))


# --- what it says of spec_v2 ---


def names_of(cls):
    """Attributes of a class and of its instances: what it defines, annotates, or assigns to self."""
    found = set(dir(cls))
    for base in cls.__mro__[:-1]:
        found |= set(vars(base).get("__annotations__", {}))
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        assigned = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        found |= {
            node.attr
            for node in assigned
            if isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        }
    return found


def resolves(dotted):
    """Whether a dotted path is a module, or leads from one to a name, a member or an instance's attribute."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:end]))
            break
        except ModuleNotFoundError:
            continue
    else:
        return False
    for place, part in enumerate(parts[end:], start=end):
        if isinstance(thing, type) and part in names_of(thing):
            if place + 1 == len(parts):
                return True
        elif not hasattr(thing, part):
            return False
        thing = getattr(thing, part)
    return True


@pytest.mark.parametrize("dotted", sorted({row.spec_v2_replacement for row in TABLE} - {None}))
def test_a_spec_v2_replacement_imports(dotted):
    assert resolves(dotted)


@pytest.mark.parametrize(
    "dotted",
    [
        "spec_v2.speculative.eagle_worker",
        "spec_v2.speculative.eagle_worker_v2.EAGLEWorker",
        "spec_v2.types.Verdict.accepted_lens",
        "spec_v2.speculative.base_spec_worker.BaseSpecWorker.draft_worker",
        "spec_v2.types.Verdict.accept_lens.numel",
        "spec_v3.engine",
    ],
)
def test_the_check_notices_what_does_not(dotted):
    assert not resolves(dotted)


@pytest.mark.parametrize(
    ("codes", "module"),
    [
        (("SV102", "SV112"), "multi_layer_eagle_worker_v2"),
        (("SV839", "SV838"), "frozen_kv_mtp_worker_v2"),
    ],
)
def test_a_worker_that_exists_is_named_and_one_that_does_not_is_not(codes, module):
    """The day the module comes, the row has to name it: one line of removals.json."""
    there = importlib.util.find_spec(f"spec_v2.speculative.{module}") is not None
    for code in codes:
        named = by_code(code).spec_v2_replacement
        assert (named is not None and module in named) == there, by_code(code)


# --- the data itself ---


def test_codes_are_unique_and_in_order():
    codes = [row.code for row in TABLE]
    assert codes == sorted(set(codes))


def test_a_path_belongs_to_one_row():
    assert [path for path, n in Counter(path for row in TABLE for path in row.paths).items() if n > 1] == []


def faults(row):
    """What is wrong with a row, in words."""
    dated = row.last_version not in ("unreleased", "unknown")
    if dated and version_key(row.last_version) >= version_key(row.removed_in):
        yield "it was removed before its last version"
    if row.category in ("moved", "renamed") and not row.sglang_replacement:
        yield f"{row.category} to nowhere"
    deletable = row.kind in ("env", "flag", "parameter")
    if row.category == "removed" and row.safety != "manual" and not (row.sglang_replacement or deletable):
        yield "there is nothing that a machine could write instead"
    if len(row.changes) > 170:
        yield "changes takes more than two lines of a message"
    if not row.changes.endswith((".", ".)")) or "\n" in row.changes:
        yield "changes is one line of whole sentences"
    for path in row.paths if row.kind != "behaviour" else ():
        as_its_kind = (
            re.fullmatch(r"[\w.-]+(\(\w+\))?", path)
            and ("(" in path) == (row.kind == "parameter")
            and path.startswith("--") == (row.kind == "flag")
            and path.isupper() == (row.kind == "env")
            and (row.kind in ("env", "flag") or path.startswith("sglang."))
        )
        if not as_its_kind:
            yield f"{path} is not the path of a {row.kind}"


def test_every_row_agrees_with_itself():
    assert [(row.code, fault) for row in TABLE for fault in faults(row)] == []


@pytest.mark.parametrize(
    "change",
    [
        {"last_version": "0.5.14"},
        {"category": "moved", "sglang_replacement": None},
        {"category": "removed", "safety": "safe", "sglang_replacement": None},
        {"changes": "word " * 40 + "."},
        {"changes": "No full stop"},
        {"old_path": "sglang.f(x)"},
        {"aliases": ("torch.nn.Linear",)},
        {"kind": "flag"},
        {"kind": "env"},
    ],
)
def test_a_row_that_does_not_is_noticed(change):
    assert list(faults(dataclasses.replace(by_code("SV101"), **change)))


def test_a_member_of_a_class_shares_its_version_or_a_later_one():
    """A member cannot outlive its class under the old path."""
    for row in TABLE:
        if row.kind in ("method", "attribute"):
            owner = by_path(row.old_path.rpartition(".")[0])
            if owner and owner.kind == "class":
                assert version_key(row.removed_in) <= version_key(owner.removed_in), row.code


# --- the cases that people meet first ---


@pytest.mark.parametrize(
    ("old", "sglang", "spec_v2"),
    [
        ("eagle_worker.EAGLEWorker", "eagle_worker_v2.EAGLEWorkerV2", "eagle_worker_v2.EAGLEWorkerV2"),
        (
            "standalone_worker.StandaloneWorker",
            "standalone_worker_v2.StandaloneWorkerV2",
            "standalone_worker_v2.StandaloneWorkerV2",
        ),
        (
            "multi_layer_eagle_worker.MultiLayerEagleWorker",
            "multi_layer_eagle_worker_v2.MultiLayerEagleWorkerV2",
            None,  # checked above, by whether spec_v2 has it
        ),
    ],
)
def test_the_three_worker_classes(old, sglang, spec_v2):
    row = by_path(S + old)
    assert (row.kind, row.safety, row.last_version, row.removed_in) == (
        "class",
        "unsafe",
        "0.5.12.post1",
        "0.5.13",
    )
    assert row.sglang_replacement == S + sglang
    if spec_v2:
        assert row.spec_v2_replacement == "spec_v2.speculative." + spec_v2


@pytest.mark.parametrize(
    ("target", "now"),
    [
        ("eagle_worker.EAGLEWorker.draft", "eagle_worker_v2.EagleDraftWorker.draft"),
        ("eagle_worker.EAGLEWorker.draft_forward", "eagle_worker_v2.EagleDraftWorker.draft_forward"),
        ("eagle_worker.EAGLEWorker.verify", "eagle_worker_v2.EAGLEWorkerV2.verify"),
        ("standalone_worker.StandaloneWorker.draft", "eagle_worker_v2.EagleDraftWorker.draft"),
        ("eagle_worker.select_top_k_tokens", "eagle_worker_v2.select_top_k_tokens"),
        ("eagle_worker.build_tree_kernel_efficient", "eagle_worker_common.build_tree_kernel_efficient"),
    ],
)
def test_patch_targets_lead_to_the_class_that_has_the_method(target, now):
    assert by_path(S + target).sglang_replacement == S + now


@pytest.mark.parametrize(
    "path",
    [
        "eagle_worker_v2",
        "eagle_worker_v2.EagleDraftWorker.draft",
        "eagle_utils.organize_draft_results",
        "eagle_utils.build_tree_kernel_efficient",
        "spec_utils.select_top_k_tokens",
        "spec_utils.load_token_map",
        "spec_utils.generate_token_bitmask",
        "ngram_worker.NGRAMWorker",
        "eagle_workers",
    ],
)
def test_what_is_still_there_is_not_in_the_table(path):
    assert by_path(S + path) is None


def test_enable_overlap_is_removed_where_it_was_and_nowhere_else():
    gone = [row.old_path for row in TABLE if row.kind == "parameter" and row.name == "enable_overlap"]
    assert [path.rpartition(".")[2] for path in gone] == [
        "create_worker(enable_overlap)",
        "get_draft_kv_pool(enable_overlap)",
    ]
    assert by_path("sglang.srt.managers.schedule_batch.ScheduleBatch.enable_overlap") is None
    assert by_path("sglang.srt.managers.scheduler.Scheduler.enable_overlap") is None
    (still_right,) = [row for row in TABLE if "still right" in row.old_path]
    assert "init_new" in still_right.changes


def test_is_spec_v2_has_three_meanings():
    attribute = by_path("sglang.srt.managers.schedule_batch.ScheduleBatch.is_spec_v2")
    assert not attribute.concerns("0.5.13")
    assert attribute.concerns("0.5.14")
    assert "is_none()" in attribute.changes
    assert "enable_overlap" in attribute.changes
    meanings = [row for row in TABLE if row.kind == "behaviour" and row.old_path.startswith("is_spec_v2 in")]
    assert [row.removed_in for row in meanings] == ["0.5.13", "0.5.14"]


def test_overlap_forward_isolation_was_never_released():
    row = by_path("sglang.srt.managers.scheduler.Scheduler._overlap_forward_isolation")
    assert (row.last_version, row.safety, row.distinctive) == ("unreleased", "safe", True)
    assert "_forward_isolation(batch, overlap=True)" in row.changes


def test_pr_fix_toggle_itself_is_not_removed():
    assert not [path for row in TABLE for path in row.paths if "pr_fix_toggle" in path and path[0] != "p"]


# --- look-ups ---


def test_lookups():
    assert by_code("sv101") is by_path(S + "eagle_worker.EAGLEWorker")
    assert by_path(S + "standalone_worker.EAGLEWorker") is by_code("SV101")
    assert nearest(S + "eagle_worker.EAGLEWorker.no_such_thing") is by_code("SV101")
    assert nearest(S + "eagle_worker.NoSuchThing") is by_path(S + "eagle_worker")
    assert nearest(S + "eagle_worker_v2.EAGLEWorkerV2.verify") is None
    assert by_path(f"{S}eagle_worker.EAGLEWorker(tp_rank)").name == "tp_rank"
    assert by_path("SGLANG_ENABLE_SPEC_V2").name == "SGLANG_ENABLE_SPEC_V2"
    with pytest.raises(KeyError):
        by_code("SV999")


def test_versions_are_ordered():
    order = ["0.5.9", "0.5.12", "0.5.12.post1", "0.5.13", "0.6.0"]
    assert sorted(["0.6.0", *order[:-1]], key=version_key) == order
    with pytest.raises(ValueError, match="'main'"):
        version_key("main")


# --- the loader refuses, and says what ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"code": "SV0"}, r"removals.json\[SV0\].code is 'SV0'; it must match"),
        ({"kind": "klass"}, r"\[SV101\].kind is 'klass'; use one of module, class"),
        ({"removed_in": 13}, r"\[SV101\].removed_in is 13; expected string"),
        ({"last_version": "0.5"}, r"\[SV101\].last_version is '0.5'; it must match"),
        ({"spec_v2_replacement": "sglang.x"}, r"\[SV101\].spec_v2_replacement is 'sglang.x'"),
        ({"changes": ""}, r"\[SV101\].changes is ''"),
        ({"aliases": "x"}, r"\[SV101\].aliases is 'x'; expected array"),
        ({"aliases": [1]}, r"\[SV101\].aliases\[0\] is 1; expected string"),
        ({"colour": "red"}, r"\[SV101\] has colour; known fields are code"),
        ({"distinctive": 1}, r"\[SV101\].distinctive is 1; expected boolean"),
    ],
)
def test_a_bad_field_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        check([{**RAW[0], **change}], SCHEMA, "removals.json")


def test_a_missing_field_is_named():
    row = {name: value for name, value in RAW[0].items() if name != "safety"}
    with pytest.raises(ValueError, match=r"\[SV101\] lacks safety"):
        check([row], SCHEMA, "removals.json")


def test_the_schema_and_the_dataclass_have_the_same_fields():
    fields = {name for name, value in inspect.get_annotations(registry.Removal).items()}
    assert fields == set(SCHEMA["items"]["properties"])


def test_importing_is_light():
    code = (
        "import legacy_compat, legacy_compat.registry as r; r.load(); import sys;"
        "print(*{'torch', 'sglang', 'spec_v2', 'libcst', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_python_asking_for_its_own_names_reads_no_table():
    code = (
        "import legacy_compat, inspect; inspect.unwrap(legacy_compat); hasattr(legacy_compat, '__wrapped__');"
        "dir(legacy_compat); print(legacy_compat.registry.load.cache_info().currsize)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


def test_the_file_is_written_in_one_way():
    """Fields in the schema's order, two spaces: a change of one row is a change of its lines alone."""
    order = list(SCHEMA["items"]["properties"])
    rows = [{name: row[name] for name in order if name in row} for row in RAW]
    text = json.dumps(rows, indent=2, ensure_ascii=False) + "\n"
    assert (FOLDER / "removals.json").read_text(encoding="utf-8") == text
