"""Builds and switches on the compiled fast path of ``torch.ops.det_plugin.linear`` (``_linear_fast.cpp``).

It saves processor time outside CUDA graphs and changes no bits: it replays certified cuBLASLt algorithms that
:class:`det_plugin.ops.linear_cuda.LinearDispatcher` chose.  Without a C++ compiler the Python path stays on,
and the log says so once.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "_linear_fast.cpp"
_active = False


def active() -> bool:
    """Whether the compiled path runs in this process."""
    return _active


def build(key: str = "CUDA", folder: Path | None = None) -> Path:
    """Compile (once per source and torch version) and return the shared library.

    Args:
        key: dispatch key that it registers for; tests use ``"CPU"``.
        folder: where libraries are kept; ``<user cache>/det_plugin/native`` when None.

    Raises:
        RuntimeError: there is no compiler, or it fails.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if not compiler:
        raise RuntimeError("no C++ compiler (g++, c++, clang++) on the PATH")
    if folder is None:
        from platformdirs import user_cache_dir

        folder = Path(user_cache_dir("det_plugin")) / "native"
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    text = SOURCE.read_bytes() + f"{torch.__version__} {key} {abi}".encode()
    target = folder / f"linear_fast-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    root = Path(torch.__file__).parent
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".so.tmp")
    os.close(handle)
    command = [
        compiler, "-O2", "-std=c++20", "-shared", "-fPIC", f"-DDET_KEY={key}", f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}", str(SOURCE), "-o", temporary,
        f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode:
            raise RuntimeError(f"{compiler} failed: {done.stderr.strip()[:500]}")
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


def _mapped_library(prefix: str) -> str:
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


def _address(function: str, *prefixes: str) -> int:
    """Address of a function in the first loaded library that has it.

    Raises:
        RuntimeError: none has.
    """
    for prefix in prefixes:
        try:
            library = ctypes.CDLL(_mapped_library(prefix))
            value = ctypes.cast(getattr(library, function), ctypes.c_void_p).value
        except (OSError, AttributeError, RuntimeError):
            continue
        if value:
            return value
    raise RuntimeError(f"{function} is in none of the loaded libraries {', '.join(prefixes)}")


def activate() -> bool:
    """Build, load and switch on; False (said in the log) where that is not possible."""
    global _active
    if _active:
        return True
    from det_plugin.ops import _custom_ops

    try:
        addresses = [
            _address("cublasLtMatmul", "libcublasLt.so"),
            _address("aoti_torch_get_current_cuda_stream", "libtorch_cuda.so", "libtorch_python.so"),
            _address("cudaStreamIsCapturing", "libcudart.so", "libtorch_cuda.so"),
        ]
        library = build()
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        logger.warning(
            "linear: the compiled fast path is off, products outside CUDA graphs cost more processor time: %s",
            error,
        )
        return False
    _custom_ops.release_linear()
    torch.ops.load_library(str(library))
    torch.ops.det_plugin._linear_configure(addresses)
    _active = True
    return True


def deactivate() -> None:
    """Send every call to the Python path from now on."""
    global _active
    if _active:
        torch.ops.det_plugin._linear_configure([0, 0, 0])
        _active = False


def keep(
    n: int, k: int, m: int, dtype: torch.dtype, device: int, capturing: bool, bias: int, values: list[int]
) -> None:
    """Hand one decision to the compiled path.

    Args:
        n, k, m, dtype, device: the problem.
        capturing: whether the decision is for calls during CUDA graph capture.
        bias: the bias's address, 0 when there is none.
        values: :meth:`det_plugin.ops._cublaslt.LinearProblem.values`.
    """
    torch.ops.det_plugin._linear_keep([n, k, m, device, int(capturing), bias], dtype, values)


def forget() -> None:
    """Drop every decision (they are made anew on the next calls)."""
    if _active:
        torch.ops.det_plugin._linear_forget()
