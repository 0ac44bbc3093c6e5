"""Hold our calls against a torch_npu wheel, without loading it: `python -m tests.npu.check_wheel torch_npu-....whl`.

A simulation agrees with whoever wrote it. This reads what Ascend has written: the documented signatures of the two
operators, the graph's methods, and which arguments an update may change.
"""

import ast
import re
import sys
import zipfile
from collections.abc import Iterator
from inspect import getsource

from spec_v2.kernels.paged_attention.npu import paged_attention_npu
from spec_v2.model_executor.npu_graph_runner import LENGTHS
from tests.npu.simulated_operators import ATTENTION, SCATTER


def problems(wheel: zipfile.ZipFile) -> Iterator[str]:
    """What we call and the wheel does not have."""

    def read(name: str) -> str:
        return wheel.read(name).decode("utf-8")

    docs = read("torch_npu/_op_plugin_docs.py")
    for ours in (ATTENTION, SCATTER):
        name = ours.partition("(")[0]
        theirs = re.search(rf"torch_npu\.{name}\((.*?)\) ->", docs)
        if theirs is None:
            yield f"{name} is not documented"
            continue
        known = {part.split("=")[0].split()[-1] for part in theirs[1].split(",")}
        mine = {
            part.split("=")[0].split()[-1] for part in ours.partition("(")[2].partition(") ->")[0].split(",")
        }
        yield from (f"{name} has no {argument}" for argument in sorted(mine - known))
    called = ast.walk(ast.parse(getsource(paged_attention_npu)))
    keywords = {k.arg for node in called if isinstance(node, ast.Call) for k in node.keywords}
    yield from (f"the simulated operator has no {k}" for k in keywords if k and k not in ATTENTION)

    graphs = ast.parse(read("torch_npu/npu/graphs.py"))
    classes = {node.name: node for node in graphs.body if isinstance(node, ast.ClassDef)}
    wanted = {
        ("NPUGraph", "update"): {"cpu_update_input"},
        ("NPUGraph", "replay"): set(),
        ("graph", "__init__"): {"pool", "stream", "auto_dispatch_capture", "capture_error_mode"},
    }
    for (kind, method), arguments in wanted.items():
        found = [f for f in classes[kind].body if isinstance(f, ast.FunctionDef) and f.name == method]
        names = {a.arg for f in found for a in f.args.args}
        if not found or arguments - names:
            yield f"{kind}.{method} does not take {sorted(arguments - names)}"

    handlers = read("torch_npu/npu/_npugraph_handlers/ifa_handler.py")
    if f'"{LENGTHS}"' not in handlers or "npu_fused_infer_attention_score.default" not in handlers:
        yield f"an update does not reach {LENGTHS} of npu_fused_infer_attention_score"


if __name__ == "__main__":
    with zipfile.ZipFile(sys.argv[1]) as opened:
        found = list(problems(opened))
    print("\n".join(found) or "all that is called is there")
    sys.exit(bool(found))
