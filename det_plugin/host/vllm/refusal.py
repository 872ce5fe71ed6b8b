"""Carries the reason of a refusal from an engine's worker to the process that the user started.

The host reports a worker that failed to start as "Engine core initialization failed. See root cause above."
The worker writes its reason into a file named by an inherited environment variable; the command line prints it
last.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from det_plugin.errors import DetPluginError

logger = logging.getLogger("vllm.det_plugin")

FILE_ENV = "DET_PLUGIN_REFUSAL_FILE"
"""Environment variable, set by the plugin itself, that names the file."""


def prepare() -> None:
    """Name the file, before the engine's processes start; once per process tree.

    It is made by a worker that refuses, so that a process that is killed leaves none.
    """
    if os.environ.get(FILE_ENV):
        return
    name = os.path.join(tempfile.gettempdir(), f"det-plugin-refusal-{secrets.token_hex(8)}.txt")
    os.environ[FILE_ENV] = name
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            Path(name).unlink(missing_ok=True)

    atexit.register(remove)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Log a refusal raised inside on one line, and write it down for the process that the user started."""
    try:
        yield
    except DetPluginError as error:
        logger.error("error: %s", error)
        if path := os.environ.get(FILE_ENV):
            with contextlib.suppress(OSError):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
                with open(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
                    file.write(str(error))
        raise


def telling(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method``, run under :func:`told`."""

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with told():
            return method(*args, **kwargs)

    return wrapper


def read() -> str:
    """The reason that a worker of this process wrote down; empty when there is none."""
    try:
        return Path(os.environ[FILE_ENV]).read_text(encoding="utf-8").strip()
    except (KeyError, OSError):
        return ""
