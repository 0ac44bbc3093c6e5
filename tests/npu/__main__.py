"""The command line in a process whose NPU is simulated: `python -m tests.npu doctor`, `... generate --device npu`."""

import sys

from spec_v2.cli import main
from tests.npu.choose import choose_npu, describe_npu

if __name__ == "__main__":
    choose_npu()
    print(f"npu: {describe_npu()}", file=sys.stderr)
    sys.exit(main())
