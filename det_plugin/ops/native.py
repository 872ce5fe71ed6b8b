"""Builds the package's C++ sources where they run and loads them; finds functions in libraries that are loaded.

No CUDA header or library is needed to build: foreign functions are handed over as addresses.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

COMPILE_SECONDS = 180
LOCK_SECONDS = 60


def build(source: Path, key: str, folder: Path | None = None) -> Path:
    """Compile (once per source, torch version, machine and C library) and return the shared library.

    Of several processes at once, one compiles and the others wait for it.

    Args:
        source: the C++ file; reads the dispatch key that it registers for as ``DET_KEY``.
        key: ``"CUDA"`` or ``"CPU"``; tests build CUDA's sources for the CPU.
        folder: where libraries are kept; ``<user cache>/det_plugin/native`` when None.

    Raises:
        RuntimeError: there is no compiler, or it fails.
        OSError: the folder can't be written.
        subprocess.TimeoutExpired: the compiler takes longer than :data:`COMPILE_SECONDS`.
    """
    if folder is None:
        from platformdirs import user_cache_dir

        folder = Path(user_cache_dir("det_plugin")) / "native"
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    machine = f"{platform.machine()} {platform.libc_ver()}"
    text = source.read_bytes() + f"{torch.__version__} {key} {abi} {machine}".encode()
    target = folder / f"{source.stem.strip('_')}-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if _whole(target):
        return target
    compiler = _compiler()
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        if not _whole(target):
            _compile(compiler, source, key, target)
    return target


def _compiler() -> list[str]:
    """The compiler and its first arguments."""
    found = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    try:
        compiler = shlex.split(os.environ.get("CXX") or "") or ([found] if found else [])
    except ValueError as error:
        raise RuntimeError(f"CXX: got {os.environ['CXX']!r}: {error}") from None
    if not compiler:
        raise RuntimeError("no C++ compiler (g++, c++, clang++) on the PATH")
    return compiler


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _whole(library: Path) -> bool:
    """Whether a library is as it was written: a damaged one may load and crash."""
    try:
        return _digest_file(library).read_text() == hashlib.sha256(library.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return False


def load(source: Path, key: str) -> None:
    """Build where needed and load; a library in the cache that does not load is built anew, once.

    Raises:
        RuntimeError, OSError, subprocess.TimeoutExpired: see :func:`build`; or it does not load.
    """
    library = build(source, key)
    try:
        torch.ops.load_library(str(library))
    except OSError:
        library.unlink(missing_ok=True)
        torch.ops.load_library(str(build(source, key)))


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder against other processes; where it can't be locked in time they compile side by side, safely."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # a child that was forked meanwhile holds the same lock
        os.close(handle)


def _compile(compiler: list[str], source: Path, key: str, target: Path) -> None:
    """Write ``target`` in one step: no process ever sees half of it."""
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    root = Path(torch.__file__).parent
    handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".so.tmp")
    os.close(handle)
    command = [
        *compiler, "-O2", "-std=c++20", "-shared", "-fPIC", f"-DDET_KEY={key}", f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}", str(source), "-o", temporary,
        f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=COMPILE_SECONDS
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(compiler)} failed: {done.stderr.strip()[:500]}")
        os.chmod(temporary, 0o755)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        digest = hashlib.sha256(Path(temporary).read_bytes()).hexdigest()
        os.replace(temporary, target)
        _digest_file(target).write_text(digest)
    finally:
        Path(temporary).unlink(missing_ok=True)


def mapped_library(prefix: str) -> str:
    """Path of a shared library that this process has loaded.

    Raises:
        RuntimeError: it is not loaded.
    """
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            path = line.split()[-1]
            if Path(path).name.startswith(prefix):
                return path
    raise RuntimeError(f"{prefix} is not loaded")


def address(function: str, *prefixes: str) -> int:
    """Address of a function in the first loaded library that has it.

    Raises:
        RuntimeError: none has.
    """
    for prefix in prefixes:
        try:
            library = ctypes.CDLL(mapped_library(prefix))
            value = ctypes.cast(getattr(library, function), ctypes.c_void_p).value
        except (OSError, AttributeError, RuntimeError):
            continue
        if value:
            return value
    raise RuntimeError(f"{function} is in none of the loaded libraries {', '.join(prefixes)}")
