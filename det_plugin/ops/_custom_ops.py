"""The operators as ``torch.ops.det_plugin.*``: opaque to torch.compile, safe under CUDA graph capture.

Each has a CUDA implementation (the kernels), a fake one (shapes), and, except ``linear``, a CPU one (the
references).  Operators of :data:`COMPILED` may get an implementation in C++ instead (:mod:`det_plugin.ops.linear_fast`,
:mod:`det_plugin.ops.rows_fast`), which calls ``<name>_python`` where it cannot serve a call.  Importing this module
registers them, once per process; it imports no host engine.
"""

import logging
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from det_plugin.ops import native

logger = logging.getLogger(__name__)

NAMESPACE = "det_plugin"

_SCHEMAS = {
    "linear": "(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    "rms_norm": "(Tensor x, Tensor? weight, float eps, float weight_offset=0.0) -> Tensor",
    "fused_add_rms_norm": (
        "(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset=0.0) -> (Tensor, Tensor)"
    ),
    "qk_norm_rope": (
        "(Tensor qkv, Tensor positions, Tensor q_weight, Tensor k_weight, Tensor cos_sin, int num_heads, "
        "int num_kv_heads, float eps, str contraction) -> (Tensor, Tensor)"
    ),
    "softmax": "(Tensor x) -> Tensor",
    "log_softmax": "(Tensor x) -> Tensor",
    "bmm": "(Tensor a, Tensor b) -> Tensor",
    "mean": "(Tensor x, int[] dim, bool keepdim=False) -> Tensor",
}
"""The dispatcher passes arguments by position and leaves out trailing defaults."""

COMPILED = ("linear", "rms_norm", "fused_add_rms_norm", "qk_norm_rope")
"""Operators whose CUDA implementation C++ may replace."""


def _linear_cuda(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    from det_plugin.ops.linear_cuda import dispatcher

    return dispatcher(x, weight, bias)


def _linear_fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _rms_norm_cuda(*arguments) -> torch.Tensor:
    from det_plugin.ops.rms_norm import rms_norm_kernel

    return rms_norm_kernel(*arguments)


def _rms_norm_cpu(x: torch.Tensor, weight: torch.Tensor | None, *rest) -> torch.Tensor:
    from det_plugin.ops.rms_norm import check_row_arguments, rms_norm_reference

    check_row_arguments(x, weight)
    return rms_norm_reference(x, weight, *rest)


def _rms_norm_fake(x: torch.Tensor, *_rest, **_named) -> torch.Tensor:
    return x.new_empty(x.shape)


def _fused_add_rms_norm_cuda(*arguments) -> tuple[torch.Tensor, torch.Tensor]:
    from det_plugin.ops.rms_norm import fused_add_rms_norm_kernel

    return fused_add_rms_norm_kernel(*arguments)


def _fused_add_rms_norm_cpu(*arguments) -> tuple[torch.Tensor, torch.Tensor]:
    from det_plugin.ops.rms_norm import fused_add_rms_norm_reference

    return fused_add_rms_norm_reference(*arguments)


def _fused_add_rms_norm_fake(x: torch.Tensor, *_rest, **_named) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _qk_norm_rope_cuda(*arguments) -> tuple[torch.Tensor, torch.Tensor]:
    from det_plugin.ops.qk_norm_rope import qk_norm_rope_kernel

    return qk_norm_rope_kernel(*arguments)


def _qk_norm_rope_cpu(*arguments) -> tuple[torch.Tensor, torch.Tensor]:
    from det_plugin.ops.qk_norm_rope import qk_norm_rope_reference

    return qk_norm_rope_reference(*arguments)


def _qk_norm_rope_fake(
    qkv: torch.Tensor, _positions, q_weight: torch.Tensor, _k_weight, _cos_sin, num_heads: int, num_kv_heads: int,
    *_rest,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    size = q_weight.shape[0]
    tokens = qkv.shape[0]
    return qkv.new_empty((tokens, num_heads * size)), qkv.new_empty((tokens, num_kv_heads * size))


def _softmax_cuda(x: torch.Tensor) -> torch.Tensor:
    from det_plugin.ops.softmax import softmax_kernel

    return softmax_kernel(x, False)


def _log_softmax_cuda(x: torch.Tensor) -> torch.Tensor:
    from det_plugin.ops.softmax import softmax_kernel

    return softmax_kernel(x, True)


def _softmax_cpu(x: torch.Tensor) -> torch.Tensor:
    from det_plugin.ops.softmax import softmax_reference

    return softmax_reference(x, False)


def _log_softmax_cpu(x: torch.Tensor) -> torch.Tensor:
    from det_plugin.ops.softmax import softmax_reference

    return softmax_reference(x, True)


def _softmax_fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


def _bmm_cuda(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    from det_plugin.ops.bmm import bmm_kernel

    return bmm_kernel(a, b)


def _bmm_cpu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    from det_plugin.ops.bmm import bmm_reference

    return bmm_reference(a, b)


def _bmm_fake(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty((a.shape[0], a.shape[1], b.shape[2]))


def _mean_cuda(x: torch.Tensor, dim: Sequence[int], keepdim: bool = False) -> torch.Tensor:
    from det_plugin.ops.mean import mean_kernel

    return mean_kernel(x, dim, keepdim)


def _mean_cpu(x: torch.Tensor, dim: Sequence[int], keepdim: bool = False) -> torch.Tensor:
    from det_plugin.ops.mean import mean_reference

    return mean_reference(x, dim, keepdim)


def _mean_fake(x: torch.Tensor, dim: Sequence[int], keepdim: bool = False) -> torch.Tensor:
    from det_plugin.ops.mean import mean_shape

    return x.new_empty(mean_shape(x, dim, keepdim))


_IMPLEMENTATIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "CUDA": {
        "linear": _linear_cuda,
        "rms_norm": _rms_norm_cuda,
        "fused_add_rms_norm": _fused_add_rms_norm_cuda,
        "qk_norm_rope": _qk_norm_rope_cuda,
        "softmax": _softmax_cuda,
        "log_softmax": _log_softmax_cuda,
        "bmm": _bmm_cuda,
        "mean": _mean_cuda,
    },
    "CPU": {
        "rms_norm": _rms_norm_cpu,
        "fused_add_rms_norm": _fused_add_rms_norm_cpu,
        "qk_norm_rope": _qk_norm_rope_cpu,
        "softmax": _softmax_cpu,
        "log_softmax": _log_softmax_cpu,
        "bmm": _bmm_cpu,
        "mean": _mean_cpu,
    },
    "Meta": {
        "linear": _linear_fake,
        "rms_norm": _rms_norm_fake,
        "fused_add_rms_norm": _fused_add_rms_norm_fake,
        "qk_norm_rope": _qk_norm_rope_fake,
        "softmax": _softmax_fake,
        "log_softmax": _softmax_fake,
        "bmm": _bmm_fake,
        "mean": _mean_fake,
    },
}


def _register() -> torch.library.Library | None:
    if hasattr(torch.ops.det_plugin, "linear"):  # imported twice under two names
        return None
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        library.define(name + schema)
        if name in COMPILED:
            library.define(f"{name}_python{schema}")
            library.impl(f"{name}_python", _IMPLEMENTATIONS["CUDA"][name], "CUDA")
    for key, functions in _IMPLEMENTATIONS.items():
        for name, function in functions.items():
            if key == "Meta":
                torch.library.register_fake(f"{NAMESPACE}::{name}", function, lib=library)
            elif key == "CPU" or name not in COMPILED:
                library.impl(name, function, key)
    return library


def _replaceable(name: str) -> torch.library.Library:
    implementation = torch.library.Library(NAMESPACE, "FRAGMENT")
    implementation.impl(name, _IMPLEMENTATIONS["CUDA"][name], "CUDA")
    return implementation


library = _register()
"""Keeps the registrations alive; ``library.impl("linear", function, "CPU")`` adds the CPU linear."""

_python: dict[str, torch.library.Library] = {} if library is None else {name: _replaceable(name) for name in COMPILED}


def release(*names: str) -> None:
    """Take back the Python implementations of operators on CUDA, so that compiled ones can be registered."""
    for name in names:
        implementation = _python.pop(name, None)
        if implementation is not None:
            implementation._destroy()


def compile_operators(
    source: Path,
    names: Sequence[str],
    functions: Sequence[tuple[str, ...]],
    configure: Callable[[list[int]], None],
    otherwise: str,
) -> bool:
    """Let a C++ source serve operators on CUDA in place of Python.

    Args:
        source: registers ``names`` for the dispatch key ``DET_KEY``.
        names: of :data:`COMPILED`.
        functions: what it calls: a name, then the libraries that may hold it (:func:`native.address`).
        configure: takes their addresses, once the source is loaded.
        otherwise: said in the log, with the reason, where that is not possible and Python goes on.
    """
    try:
        addresses = [native.address(*function) for function in functions]
        native.build(source, "CUDA")  # takes seconds: calls go on meanwhile
        release(*names)
        native.load(source, "CUDA")
        configure(addresses)
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        restore(*names)
        logger.warning("%s: %s", otherwise, error)
        return False
    return True


def restore(*names: str) -> None:
    """Undo :func:`release`, where the compiled implementations could not be loaded."""
    for name in names:
        if library is not None and name not in _python:
            _python[name] = _replaceable(name)
