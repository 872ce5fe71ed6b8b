"""What every command line shares: an expected failure is one line on stderr and exit status 2, never a traceback."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from det_plugin.errors import ConfigError, DetPluginError

EXIT_NOT_TESTED, EXIT_INTERRUPTED = 2, 130


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM, and SIGHUP where it isn't ignored (``nohup``), unwind the stack, so that started servers are stopped.

    The first one counts: further ones would cut the unwinding short, and stay ignored until the process ends.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    left = False

    def leave(number: int, _: object) -> None:
        nonlocal left
        left = True
        for own in numbers:
            signal.signal(own, signal.SIG_IGN)
        raise SystemExit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is signal.SIG_DFL and not left:
                signal.signal(number, handler)


def guarded(action: Callable[[], int], prefix: str = "det-plugin: ") -> int:
    """Run a command and return its exit status.

    Status 2 also where the output has nowhere to go: the status of a comparison whose verdict nobody could read
    would be taken for the verdict.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        with terminable():
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
