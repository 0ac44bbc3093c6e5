"""The interpreters of this machine that the package supports, found by asking them."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def candidates():
    yield sys.executable
    for minor in range(11, 20):
        if found := shutil.which(f"python3.{minor}"):
            yield found
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(pyenv.glob("versions/3.*/bin/python")))


@functools.cache
def pythons():
    """(version, interpreter) for each minor version from 3.11 on, this one first."""
    found = {}
    for path in candidates():
        code = "import sys; print('3.%d' % sys.version_info.minor)"
        asked = subprocess.run([path, "-I", "-c", code], capture_output=True, text=True, check=False)
        version = asked.stdout.strip()  # empty if it is a launcher that launches nothing
        if version and int(version.split(".")[1]) >= 11:
            found.setdefault(version, path)
    return list(found.items())


def run(python, script, *arguments, **environment):
    """Run a script on an interpreter that sees this checkout. Returns what it printed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    done = subprocess.run(
        [python, "-W", "error", str(script), *map(str, arguments)],
        env={**env, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
