"""Which files a scan looks at, and what each of them is."""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Language = Literal[
    "python", "notebook", "shell", "docker", "yaml", "toml", "json", "config", "markdown", "prose", "data", "patch"
]  # fmt: skip

# Folders that hold no source of the project. They are scanned when named on the command line.
SKIPPED_FOLDERS = frozenset(
    (
        ".git",
        ".hg",
        ".svn",
        ".bzr",
        ".jj",
        "__pycache__",
        ".venv",
        "venv",
        ".tox",
        ".nox",
        ".eggs",
        "node_modules",
        "site-packages",
        "__pypackages__",
        ".mypy_cache",
        ".ruff_cache",
        ".pytest_cache",
        ".ipynb_checkpoints",
        ".hypothesis",
        ".direnv",
        ".idea",
        ".terraform",
    )
)
SUFFIXES: dict[str, Language] = {
    **dict.fromkeys((".py", ".pyi", ".pyw", ".pyx"), "python"),
    ".ipynb": "notebook",
    **dict.fromkeys((".sh", ".bash", ".zsh", ".ksh", ".sbatch", ".slurm", ".bats", ".fish"), "shell"),
    **dict.fromkeys((".yaml", ".yml"), "yaml"),
    ".toml": "toml",
    **dict.fromkeys((".json", ".jsonc", ".json5"), "json"),
    **dict.fromkeys((".md", ".mdx", ".markdown", ".qmd", ".rmd"), "markdown"),
    **dict.fromkeys((".rst", ".txt", ".adoc", ".tex", ".org"), "prose"),
    **dict.fromkeys(
        (".jsonl", ".csv", ".tsv", ".log", ".out", ".html", ".svg", ".xml", ".lock", ".sarif"), "data"
    ),
    **dict.fromkeys((".patch", ".diff"), "patch"),
    ".dockerfile": "docker",
}
# Never text: not worth opening.
BINARY = frozenset(
    (
        ".png",
        ".jpg",
        ".jpeg",
        ".gif",
        ".webp",
        ".ico",
        ".pdf",
        ".zip",
        ".gz",
        ".bz2",
        ".xz",
        ".zst",
        ".tar",
        ".whl",
        ".so",
        ".dylib",
        ".dll",
        ".a",
        ".o",
        ".pyc",
        ".pyd",
        ".safetensors",
        ".bin",
        ".pt",
        ".pth",
        ".npy",
        ".npz",
        ".onnx",
        ".gguf",
        ".parquet",
        ".arrow",
        ".mp3",
        ".mp4",
        ".wav",
        ".woff",
        ".woff2",
        ".ttf",
        ".sqlite",
        ".db",
        ".pkl",
        ".cubin",
        ".hsaco",
    )
)


@dataclass(frozen=True, slots=True)
class File:
    """One file to look at. `path` is spelled as the user reached it."""

    path: Path
    size: int


@dataclass(slots=True)
class Walk:
    """All files below some paths, each once. Links to folders are not followed, so no loop can catch it."""

    paths: Iterable[Path]
    exclude: tuple[str, ...] = ()
    skipped: int = 0
    failed: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[File]:
        seen: set[tuple[int, int]] = set()
        for path in self.paths:
            if not _exists(path):
                self.failed.append(f"{path}: no such file or folder")
            elif path.is_dir():
                yield from self._folder(path, seen)
            else:
                yield from self._file(path, seen)

    def _folder(self, top: Path, seen: set[tuple[int, int]]) -> Iterator[File]:
        def complain(error: OSError) -> None:
            self.failed.append(f"{error.filename}: {error.strerror}")

        for folder, folders, names in os.walk(top, onerror=complain):
            here = Path(folder)
            folders[:] = sorted(name for name in folders if not self._skips(here, name))
            for name in sorted(names):
                if not self._excluded(here / name):
                    yield from self._file(here / name, seen)

    def _skips(self, here: Path, name: str) -> bool:
        if name in SKIPPED_FOLDERS or self._excluded(here / name):
            return True
        return (here / name / "pyvenv.cfg").exists()  # a virtual environment by any name

    def _excluded(self, path: Path) -> bool:
        spelled = path.as_posix()
        return any(
            fnmatch.fnmatch(spelled, pattern)
            or fnmatch.fnmatch(spelled, f"*/{pattern}")
            or fnmatch.fnmatch(path.name, pattern)
            for pattern in self.exclude
        )

    def _file(self, path: Path, seen: set[tuple[int, int]]) -> Iterator[File]:
        try:
            found = path.stat()
        except OSError:  # a dangling link, or gone since
            self.skipped += 1
            return
        key = (found.st_dev, found.st_ino)
        if not stat.S_ISREG(found.st_mode) or path.suffix.lower() in BINARY:
            self.skipped += 1  # a pipe or a device would block or never end
        elif key not in seen:
            seen.add(key)
            yield File(path, found.st_size)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a folder above it may not be read
        return False


def language_of(path: Path, text: str) -> Language:
    """By name, else by the first line; what nobody knows is a config file."""
    name = path.name.lower()
    if name in ("dockerfile", "containerfile") or name.startswith(("dockerfile.", "containerfile.")):
        return "docker"
    if name.startswith(("changelog", "changes.", "history.", "news.")):
        return "markdown" if name.endswith((".md", ".markdown")) else "prose"
    if name.startswith(("requirements", "constraints")) and name.endswith((".txt", ".in")):
        return "config"
    if known := SUFFIXES.get(path.suffix.lower()):
        return known
    first = text[:200].splitlines()[0] if text.strip() else ""
    if first.startswith("#!"):
        if "python" in first:
            return "python"
        if any(shell in first for shell in ("sh", "bats")):
            return "shell"
    if text.startswith(("diff --git ", "--- a/", "From ")) and "\n@@ " in text:
        return "patch"
    return "config"
