"""Builds, switches on and feeds the compiled path of the norms and ``qk_norm_rope`` (``_rows_fast.cpp``).

It saves processor time outside CUDA graphs and changes no bits: it launches the kernels that Triton compiled for the
Python path.  Each form is proven when it is handed over: the bytes of one call by either path are compared.
Without a C++ compiler the Python path stays on, and the log says so once.
"""

import ctypes
import logging
import struct
from pathlib import Path
from typing import Any

import torch

from det_plugin.evidence.certificates import first_difference
from det_plugin.ops import native

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "_rows_fast.cpp"
OPERATORS = ("rms_norm", "fused_add_rms_norm", "qk_norm_rope")
ROWS, CONSTANT = 100, 101
"""Sources of a kernel's parameter, beside the numbers of its tensors."""

_SIZES = {"i1": 1, "i32": 4, "fp32": 4, "i64": 8}

_wanted = False
_active = False
_offered: set[tuple[Any, ...]] = set()


def build(key: str = "CUDA", folder: Path | None = None) -> Path:
    """The compiled library (:func:`det_plugin.ops.native.build`); tests build it for the ``"CPU"`` key."""
    return native.build(SOURCE, key, folder)


def enable() -> None:
    """Switch on with the first launch.  Touches no GPU."""
    global _wanted
    _wanted = True


def active() -> bool:
    """Whether the compiled path runs in this process; builds and loads it when first asked after :func:`enable`."""
    global _wanted
    if _wanted and not _active and not torch.cuda.is_current_stream_capturing():
        _wanted = False
        activate()
    return _active


def activate() -> bool:
    """Build, load and switch on; False (said in the log) where that is not possible."""
    global _active
    if _active:
        return True
    from det_plugin.ops import _custom_ops
    from det_plugin.ops.qk_norm_rope import CONTRACTIONS

    _active = _custom_ops.compile_operators(
        SOURCE,
        OPERATORS,
        [
            ("cuLaunchKernelEx", "libcuda.so"),
            ("aoti_torch_get_current_cuda_stream", "libtorch_cuda.so", "libtorch_python.so"),
        ],
        lambda addresses: torch.ops.det_plugin._rows_configure(addresses, list(CONTRACTIONS)),
        "norms: the compiled path is off, norms outside CUDA graphs cost more processor time",
    )
    return _active


def deactivate() -> None:
    """Send every call to the Python path from now on."""
    global _active, _wanted
    _wanted = False
    if _active:
        torch.ops.det_plugin._rows_configure([0, 0], [])
        forget()
        _active = False


def forget() -> None:
    """Drop every form (they are handed over anew)."""
    _offered.clear()
    torch.ops.det_plugin._rows_forget()


def offer(
    key: tuple[Any, ...],
    compiled: Any,
    names: list[str],
    arguments: tuple[Any, ...],
    rows_per_program: int,
    operator: Any,
    call: tuple[Any, ...],
    results: tuple[torch.Tensor, ...],
) -> None:
    """Hand a form over after its first launch by Python; proves it, and switches the path off where it differs.

    Args:
        key: as ``_rows_fast.cpp`` makes it: integers, floats and dtypes (None for an absent tensor).
        compiled: Triton's compiled kernel.
        names, arguments: of the kernel; the tensors come first, the one called ``rows`` counts rows.
        rows_per_program: rows that one program works on.
        operator, call, results: the operator, its arguments and what the Python path gave for them.
    """
    # while a graph is captured nothing can be compared; another call will come
    if key in _offered or torch.cuda.is_current_stream_capturing():
        return
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    if any(x.data_ptr() & 15 for x in tensors):
        return
    if tensors[0].is_cuda and tensors[0].device.index != torch.cuda.current_device():
        return  # the kernel was compiled for the current device
    _offered.add(key)
    numbers = [_number(part) for part in key]
    try:
        sources, values = parameters(compiled, names, arguments)
        overlap = int(bool(getattr(compiled.metadata, "launch_pdl", False)))
        threads = 32 * compiled.metadata.num_warps
        launch = [compiled.function, threads, compiled.metadata.shared, overlap, rows_per_program]
        torch.ops.det_plugin._rows_keep(numbers, launch, sources, values)
        before = torch.ops.det_plugin._rows_launches()
        got = operator(*call)
        taken = torch.ops.det_plugin._rows_launches() == before + 1
    except Exception as error:  # of Triton's internals, the driver, the launch: Python goes on as before
        torch.ops.det_plugin._rows_drop(numbers)
        logger.warning("norms: Python launches this form: %s: %r", key, error)
        return
    if not taken:  # nothing was proven
        torch.ops.det_plugin._rows_drop(numbers)
        logger.warning("norms: the compiled path does not take a call that was handed to it: %s", key)
        return
    for want, have in zip(results, got if isinstance(got, tuple) else (got,), strict=True):
        difference = first_difference(want, have)
        if difference is not None:
            deactivate()
            logger.error("norms: the compiled path differs at %s (0x%s, got 0x%s): switched off", *difference)
            return


def parameters(compiled: Any, names: list[str], arguments: tuple[Any, ...]) -> tuple[list[int], list[int]]:
    """Where each parameter of a compiled kernel comes from: sources and, for constants, values.

    Raises:
        ValueError: the kernel takes something else than expected.
    """
    metadata = compiled.metadata
    scratch = getattr(metadata, "global_scratch_size", 0) or getattr(metadata, "profile_scratch_size", 0)
    cooperative = getattr(metadata, "launch_cooperative_grid", False)
    if scratch or cooperative or getattr(metadata, "num_ctas", 1) != 1:
        raise ValueError("it needs scratch memory, clusters or a cooperative launch")
    signature = compiled.src.signature
    sources, values, sizes = [], [], []
    for number, (name, argument) in enumerate(zip(names, arguments, strict=False)):
        kind = signature[name]
        if kind == "constexpr":
            continue
        if kind.startswith("*"):
            sources.append(number)
            values.append(0)
        elif name == "rows" and kind == "i32":
            sources.append(ROWS)
            values.append(0)
        elif kind in ("i32", "i64", "fp32"):
            sources.append(CONSTANT)
            values.append(struct.unpack("<I", struct.pack("<f", argument))[0] if kind == "fp32" else int(argument))
        else:
            raise ValueError(f"its argument {name} is a {kind}")
        sizes.append(_SIZES.get(kind, 8))
    sources += [CONSTANT, CONSTANT]  # pointers to scratch memory, not used
    values += [0, 0]
    sizes += [8, 8]
    found = parameter_sizes(compiled.function)
    if found != sizes:
        raise ValueError(f"its parameters have {found} bytes, expected {sizes}")
    return sources, values


def parameter_sizes(function: int) -> list[int]:
    """Sizes in bytes of a CUDA function's parameters.

    Raises:
        OSError: the driver has no such query.
    """
    query = getattr(ctypes.CDLL("libcuda.so.1"), "cuFuncGetParamInfo", None)
    if query is None:
        raise OSError("the driver does not tell a kernel's parameters (CUDA 12.4)")
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while not query(ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)):
        sizes.append(size.value)
    return sizes


def _number(part: Any) -> int:
    """A part of a key as C++ has it."""
    if isinstance(part, torch.dtype):
        return torch.ops.det_plugin._rows_dtype(part)
    if isinstance(part, float):
        return struct.unpack("<q", struct.pack("<d", part))[0]
    return -1 if part is None else int(part)
