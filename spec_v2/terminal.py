"""Keeping stdout for the answer: what libraries print, our log lines and warnings go to stderr."""

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def stdout_is_for_the_answer() -> Iterator[None]:
    """Whatever a library prints while we work goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def messages_on_stderr(program: str) -> Iterator[None]:
    """Our log lines and warnings, one line each, without the place in the code that they come from."""

    def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
        sys.stderr.write(f"{program}: warning: {message}\n")

    logger, handler = logging.getLogger("spec_v2"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{program}: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show  # type: ignore[assignment]
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
