"""Writing a file so that it is either the old one or the new one, and asking git whether it may be written."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces a file's content in one step, with its permissions kept. A link stays one; its target is written."""
    target = path.resolve()
    mode = target.stat().st_mode
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(mode)
        Path(name).replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def uncommitted(paths: Iterable[Path]) -> list[str]:
    """What git could not bring back once these files are rewritten.

    That is: changes to any tracked file of their repositories, since they would be mixed with ours, and such of these
    files as git doesn't track. Files outside any repository are not asked about; without git nothing is known.
    """
    by_folder: dict[Path, list[str]] = {}
    for path in paths:
        whole = path.resolve()
        if root := _repository(whole.parent):
            by_folder.setdefault(root, []).append(os.fspath(whole))
    found: set[str] = set()
    for root, names in by_folder.items():
        found |= {f"{name} (changed)" for name in _status(root, "--untracked-files=no")}
        untracked = _status(root, "--ignored=matching", "--untracked-files=all", "--", *names)
        tracked = {name.removesuffix(" (changed)") for name in found}
        found |= {f"{name} (not under git)" for name in untracked if name not in tracked}
    return sorted(found)


def _status(root: Path, *arguments: str) -> list[str]:
    """Paths that git's status names; none where git can't be asked."""
    command = ["git", "-C", os.fspath(root), "status", "--porcelain", "-z", *arguments]
    try:
        told = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    entries = [os.fsdecode(entry) for entry in told.split(b"\0") if entry]
    return [entry[3:] for entry in entries if entry[2:3] == " " and entry[:2].strip()]


def _repository(folder: Path) -> Path | None:
    return next((above for above in (folder, *folder.parents) if (above / ".git").exists()), None)
