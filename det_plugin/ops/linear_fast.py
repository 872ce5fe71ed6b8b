"""Builds and switches on the compiled fast path of ``torch.ops.det_plugin.linear`` (``_linear_fast.cpp``).

It saves processor time outside CUDA graphs and changes no bits: it replays certified cuBLASLt algorithms that
:class:`det_plugin.ops.linear_cuda.LinearDispatcher` chose.  Without a C++ compiler the Python path stays on,
and the log says so once.
"""

from pathlib import Path

import torch

from det_plugin.ops import native

SOURCE = Path(__file__).parent / "_linear_fast.cpp"
_active = False


def active() -> bool:
    """Whether the compiled path runs in this process."""
    return _active


def build(key: str = "CUDA", folder: Path | None = None) -> Path:
    """The compiled library (:func:`det_plugin.ops.native.build`); tests build it for the ``"CPU"`` key."""
    return native.build(SOURCE, key, folder)


def activate() -> bool:
    """Build, load and switch on; False (said in the log) where that is not possible."""
    global _active
    if _active:
        return True
    from det_plugin.ops import _custom_ops

    _active = _custom_ops.compile_operators(
        SOURCE,
        ["linear"],
        [
            ("cublasLtMatmul", "libcublasLt.so"),
            ("aoti_torch_get_current_cuda_stream", "libtorch_cuda.so", "libtorch_python.so"),
            ("cudaStreamIsCapturing", "libcudart.so", "libtorch_cuda.so"),
        ],
        lambda addresses: torch.ops.det_plugin._linear_configure(addresses),  # noqa: PLW0108  (not there before loading)
        "linear: the compiled fast path is off, products outside CUDA graphs cost more processor time",
    )
    return _active


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
