"""What every command line shares: an expected failure is one line on stderr and exit status 2, never a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from det_plugin.errors import ConfigError, DetPluginError

EXIT_NOT_TESTED, EXIT_INTERRUPTED = 2, 130


def guarded(action: Callable[[], int], prefix: str = "det-plugin: ") -> int:
    """Run a command and return its exit status.

    Status 2 also where the output has nowhere to go: the status of a comparison whose verdict nobody could read
    would be taken for the verdict.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        status = action()
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except DetPluginError as error:
        message, status = str(error), EXIT_NOT_TESTED
    except BrokenPipeError:
        message, status = "the reader of the output went away before the end", EXIT_NOT_TESTED
    except OSError as error:
        message, status = " ".join(str(error).split()), EXIT_NOT_TESTED
    except KeyboardInterrupt:
        message, status = "interrupted", EXIT_INTERRUPTED
    try:
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):  # what cannot be written would fail again at exit
        with suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with suppress(OSError, ValueError):
        print(prefix + message, file=sys.stderr, flush=True)
    return status


def check_writable(option: str, path: Path | None, *, regular: bool = False) -> None:
    """Refuse an output file that cannot be written, before the work whose result it is to hold.

    Args:
        option: how the user spells it.
        path: the file; None: there is none.
        regular: refuse a pipe or a device as well, where the file is replaced when complete.

    Raises:
        ConfigError: naming the option and the path.
    """
    if path is None:
        return
    if path == Path():
        raise ConfigError(f"{option}: got an empty name, accepts a file")
    try:
        if path.is_dir():
            raise ConfigError(f"{option}: cannot write {path} (is a directory)")
        if path.exists():
            if regular and not path.is_file():
                raise ConfigError(f"{option}: cannot write {path} (is no regular file)")
            if not os.access(path, os.W_OK):
                raise ConfigError(f"{option}: cannot write {path} (permission denied)")
            return
        parent = next(p for p in path.absolute().parents if p.exists())
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path} ({error})") from None
    if not parent.is_dir():
        raise ConfigError(f"{option}: cannot write {path} ({parent} is not a folder)")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}: cannot write {path} (no permission to write in {parent})")
