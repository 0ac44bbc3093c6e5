"""A progress bar on stderr, for people; nothing at all for programs."""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def progress_bar(total: int, unit: str, show: bool | None) -> Iterator[Any]:
    """A tqdm bar with `n` and `update`. `show` None: only on a terminal or in a notebook."""
    if show is None:
        show = sys.stderr.isatty() or "ipykernel" in sys.modules
    if not show:
        yield _NoBar()
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm.auto warns where ipywidgets is missing
        from tqdm.auto import tqdm
    with tqdm(total=total, unit=unit, leave=False) as bar:
        yield bar


class _NoBar:
    n = 0

    def update(self, count: int) -> None:
        """Nothing to show."""
