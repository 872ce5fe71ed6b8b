"""cuBLASLt through ctypes: matrix products whose algorithm is chosen once and kept.

PyTorch asks cuBLASLt's heuristic on every call when split-K is off, which costs far more processor time than
the launch.  Here the heuristic is asked once per problem, its answer (an opaque 64-byte structure) is kept,
and a call afterwards is one foreign function.  Only algorithms that need no workspace, do not split K and use
no reduction scheme are taken.

Needs the ``libcublasLt`` that PyTorch ships and loads; nothing here imports torch or touches a GPU before
:class:`CublasLt` is created.  Constants are those of ``cublasLt.h`` (CUDA 12 and 13 agree on them).
"""

from __future__ import annotations

import ctypes
import functools
import struct
from ctypes import byref, c_int, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass

_COMPUTE_32F = 68
_R_32F, _R_16F, _R_16BF = 0, 2, 14
_TYPES = {"float16": _R_16F, "bfloat16": _R_16BF}
_OP_T = 1
_DESC_TRANSA, _DESC_EPILOGUE, _DESC_BIAS_POINTER = 3, 7, 8
_EPILOGUE_BIAS = 4
_PREF_MAX_WORKSPACE, _PREF_REDUCTION_MASK = 1, 3
_PREF_ALIGNMENTS = (5, 6, 7, 8)
_CONFIG = (
    (0, c_int32),  # algorithm
    (1, c_uint32),  # tile
    (6, c_uint32),  # stages
    (8, c_uint16),  # cluster shape
    (4, c_uint32),  # swizzle
    (5, c_uint32),  # custom option
    (7, c_uint16),  # inner shape
)
_CONFIG_SPLIT_K, _CONFIG_REDUCTION = 2, 3
MAX_BIASES = 4096
ALIGNMENT = 16
"""Bytes to which every operand's first element and row stride must be aligned."""


class _Algo(ctypes.Structure):
    _fields_ = [("data", c_uint64 * 8)]


class _HeuristicResult(ctypes.Structure):
    _fields_ = [
        ("algo", _Algo),
        ("workspace_size", c_size_t),
        ("state", c_int),
        ("waves", ctypes.c_float),
        ("reserved", c_int * 4),
    ]


@dataclass(frozen=True)
class Algorithm:
    """One configured algorithm: ``name`` spells its attributes, ``data`` is what the library reads."""

    name: str
    data: bytes


@functools.cache
def load_library() -> ctypes.PyDLL:
    """The ``libcublasLt`` already in the process, else the one the loader finds.

    Calls keep the interpreter lock: they only enqueue work.

    Raises:
        OSError: there is none.
    """
    names = ["libcublasLt.so.13", "libcublasLt.so.12"]
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            mapped = {line.split()[-1] for line in maps if "libcublasLt.so" in line}
        names = sorted(mapped) + names
    except OSError:
        pass
    errors = []
    for name in names:
        try:
            library = ctypes.PyDLL(name)
        except OSError as error:
            errors.append(str(error))
            continue
        library.cublasLtGetVersion.restype = c_size_t
        library.cublasLtMatmul.argtypes = [c_void_p] * 14 + [c_size_t, c_void_p]
        library.cublasLtMatrixLayoutCreate.argtypes = [c_void_p, c_int, c_uint64, c_uint64, c_int64]
        return library
    raise OSError("libcublasLt not found: " + "; ".join(errors))


def _check(status: int, call: str) -> None:
    if status:
        raise RuntimeError(f"{call} failed with cublasStatus_t {status}")


class CublasLt:
    """A cuBLASLt handle of the current device."""

    def __init__(self) -> None:
        self.library = load_library()
        self.version = int(self.library.cublasLtGetVersion())
        handle = c_void_p()
        _check(self.library.cublasLtCreate(byref(handle)), "cublasLtCreate")
        assert handle.value is not None
        self.handle: int = handle.value
        preference = c_void_p()
        _check(self.library.cublasLtMatmulPreferenceCreate(byref(preference)), "cublasLtMatmulPreferenceCreate")
        self.preference = preference
        for attribute, value in [
            (_PREF_MAX_WORKSPACE, c_uint64(0)),
            (_PREF_REDUCTION_MASK, c_uint32(0)),
            *((a, c_uint32(ALIGNMENT)) for a in _PREF_ALIGNMENTS),
        ]:
            _check(
                self.library.cublasLtMatmulPreferenceSetAttribute(
                    preference, attribute, byref(value), c_size_t(ctypes.sizeof(value))
                ),
                f"cublasLtMatmulPreferenceSetAttribute({attribute})",
            )


class LinearProblem:
    """y = x Wᵀ (+ b) for one (N, K, dtype, bias), over any number of rows.

    Args:
        lt: the device's handle.
        n, k: the weight's shape.
        dtype: ``"bfloat16"`` or ``"float16"``, of every operand; the sum is kept in fp32.
        has_bias: whether a bias is added before the one rounding.
    """

    def __init__(self, lt: CublasLt, n: int, k: int, dtype: str, has_bias: bool) -> None:
        self.lt, self.n, self.k, self.has_bias = lt, n, k, has_bias
        self.type = _TYPES[dtype]
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._alpha, self._beta = ctypes.addressof(self._one), ctypes.addressof(self._zero)
        self._descriptors: dict[int, int] = {}
        self._scratch = 0
        self._layouts: dict[tuple[int, int, int], int] = {}
        self._matmul = lt.library.cublasLtMatmul

    def _descriptor(self, bias: int) -> int:
        """Operation descriptor for a bias at this address (0: none); kept per address."""
        found = self._descriptors.get(bias)
        if found is not None:
            return found
        library = self.lt.library
        if len(self._descriptors) >= MAX_BIASES:  # a bias made for each call: one descriptor, set each time
            _check(
                library.cublasLtMatmulDescSetAttribute(
                    c_void_p(self._scratch), _DESC_BIAS_POINTER, byref(c_void_p(bias)), c_size_t(8)
                ),
                "cublasLtMatmulDescSetAttribute",
            )
            return self._scratch
        descriptor = c_void_p()
        _check(
            library.cublasLtMatmulDescCreate(byref(descriptor), _COMPUTE_32F, _R_32F),
            "cublasLtMatmulDescCreate",
        )
        attributes: list[tuple[int, ctypes._SimpleCData]] = [(_DESC_TRANSA, c_int32(_OP_T))]
        if self.has_bias:
            attributes += [(_DESC_EPILOGUE, c_uint32(_EPILOGUE_BIAS)), (_DESC_BIAS_POINTER, c_void_p(bias))]
        for attribute, value in attributes:
            _check(
                library.cublasLtMatmulDescSetAttribute(
                    descriptor, attribute, byref(value), c_size_t(ctypes.sizeof(value))
                ),
                f"cublasLtMatmulDescSetAttribute({attribute})",
            )
        assert descriptor.value is not None
        self._scratch = self._descriptors[bias] = descriptor.value
        if len(self._descriptors) == MAX_BIASES:
            del self._descriptors[bias]  # becomes the scratch descriptor
            self._descriptors[-1] = self._scratch
        return self._scratch

    def _layout(self, rows: int, columns: int, leading: int) -> int:
        key = (rows, columns, leading)
        found = self._layouts.get(key)
        if found is None:
            layout = c_void_p()
            _check(
                self.lt.library.cublasLtMatrixLayoutCreate(ctypes.addressof(layout), self.type, rows, columns, leading),
                "cublasLtMatrixLayoutCreate",
            )
            assert layout.value is not None
            found = self._layouts[key] = layout.value
        return found

    def algorithms(self, m: int, count: int = 8) -> list[Algorithm]:
        """What the heuristic offers for ``m`` rows of contiguous operands, best first.

        Empty when it offers nothing without split-K and workspace.
        """
        results = (_HeuristicResult * count)()
        returned = c_int(0)
        library = self.lt.library
        status = library.cublasLtMatmulAlgoGetHeuristic(
            c_void_p(self.lt.handle),
            c_void_p(self._descriptor(ALIGNMENT if self.has_bias else 0)),
            c_void_p(self._layout(self.k, self.n, self.k)),
            c_void_p(self._layout(self.k, m, self.k)),
            c_void_p(self._layout(self.n, m, self.n)),
            c_void_p(self._layout(self.n, m, self.n)),
            self.lt.preference,
            count,
            results,
            byref(returned),
        )
        if status:
            return []
        found = []
        for result in results[: returned.value]:
            if result.state or result.workspace_size:
                continue
            if self._get(result.algo, _CONFIG_SPLIT_K, c_int32) > 1:
                continue
            if self._get(result.algo, _CONFIG_REDUCTION, c_uint32) != 0:
                continue
            name = ".".join(str(self._get(result.algo, attribute, kind)) for attribute, kind in _CONFIG)
            found.append(Algorithm(f"cublaslt-{name}", bytes(result.algo)))
        return found

    def values(self, algorithm: Algorithm, m: int, bias: int) -> list[int] | None:
        """What a call of ``m`` contiguous rows passes to the library, as numbers: handle, operation, layouts
        of w, x and y, and the algorithm's eight words.  None when the bias has no descriptor of its own."""
        operation = self._descriptor(bias)
        if bias not in self._descriptors:
            return None
        layouts = [self._layout(self.k, self.n, self.k), self._layout(self.k, m, self.k)]
        words = struct.unpack("<8q", algorithm.data)
        return [self.lt.handle, operation, *layouts, self._layout(self.n, m, self.n), *words]

    def _get(self, algo: _Algo, attribute: int, kind: type[ctypes._SimpleCData]) -> int:
        value, written = kind(), c_size_t(0)
        status = self.lt.library.cublasLtMatmulAlgoConfigGetAttribute(
            byref(algo), attribute, byref(value), c_size_t(ctypes.sizeof(value)), byref(written)
        )
        if status:  # the attribute does not exist for this algorithm
            return 0
        return int(value.value)

    def bind(self, algorithm: Algorithm, m: int):
        """A launcher ``launch(x, w, bias, y, x_stride, w_stride, stream)`` for ``m`` rows.

        ``x``, ``w``, ``bias`` (0 when absent), ``y`` are addresses; strides are in elements; ``y`` is
        contiguous.  The launcher raises RuntimeError when the library refuses.
        """
        buffer = ctypes.create_string_buffer(algorithm.data, 64)
        algo = ctypes.addressof(buffer)
        y_layout = self._layout(self.n, m, self.n)
        layouts: dict[tuple[int, int], tuple[int, int]] = {}
        matmul, handle, alpha, beta = self._matmul, self.lt.handle, self._alpha, self._beta
        n, k, descriptors, make = self.n, self.k, self._descriptors, self._descriptor

        def launch(x: int, w: int, bias: int, y: int, x_stride: int, w_stride: int, stream: int, _keep=buffer) -> None:
            pair = layouts.get((x_stride, w_stride))
            if pair is None:
                pair = layouts[x_stride, w_stride] = (
                    self._layout(k, n, w_stride),
                    self._layout(k, m, x_stride),
                )
            descriptor = descriptors.get(bias) or make(bias)
            status = matmul(
                handle, descriptor, alpha, w, pair[0], x, pair[1], beta, y, y_layout, y, y_layout, algo,
                None, 0, stream,
            )  # fmt: skip
            if status:
                raise RuntimeError(f"cublasLtMatmul ({algorithm.name}, rows {m}) failed with status {status}")

        return launch
