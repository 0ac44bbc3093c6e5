#!/usr/bin/env python3
"""The scanner as a pre-commit hook that installs nothing: pre-commit runs this file where it has cloned the project.

A hook in pre-commit's language "python" would first install the project with all that it needs, PyTorch included.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # instead of this folder

from legacy_compat.cli import main  # found by the line above

if __name__ == "__main__":
    sys.exit(main(["scan", *sys.argv[1:]]))
