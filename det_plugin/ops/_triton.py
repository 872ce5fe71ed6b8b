"""Triton where it is installed, and the fixed reduction tree that the row operators share.

Machines without Triton can import every operator module and use the torch references; launching a kernel
there raises ImportError.
"""

import os
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    HAVE_TRITON = True
except ImportError:  # CPU-only installations
    HAVE_TRITON = False

    def _absent(function=None, **_options):
        return function if function is not None else _absent

    triton: Any = SimpleNamespace(jit=_absent)  # type: ignore[no-redef]
    tl: Any = SimpleNamespace(constexpr=object)  # type: ignore[no-redef]

INTERPRET = os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "yes", "on", "y"}
"""Kernels run on CPU tensors, one program after another (tests)."""


def constant(value: float) -> Any:
    """A module-level number that kernels may read."""
    return tl.constexpr(value) if HAVE_TRITON else value


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least ``n`` (1 for 0)."""
    return 1 if n <= 1 else 1 << (n - 1).bit_length()


def require_kernel_device(x: torch.Tensor) -> None:
    """Refuse to launch where no kernel can run.

    Raises:
        ImportError: Triton is not installed.
        ValueError: ``x`` is not on a CUDA device (and the interpreter is off).
    """
    if not HAVE_TRITON:
        raise ImportError("triton is not installed: install det-plugin[cuda]")
    if not x.is_cuda and not INTERPRET:
        raise ValueError(f"x: got device {x.device}, expected a CUDA device")


_launched: dict[tuple, Any] = {}


def launch(kernel: Any, key: tuple, grid: tuple[int, int, int], arguments: tuple, constants: tuple, **options) -> Any:
    """Launch a kernel by its compiled form, if a call with the same ``key`` went before: Triton's own look-up, which
    inspects every argument, costs tens of microseconds.

    Args:
        kernel: a ``triton.jit`` function.
        key: all that its compiled form depends on beside the current device and ``constants``: tensors' dtypes and
            which of them begin at multiples of 16 bytes (:func:`forms`), values of integers (strides) except
            ``do_not_specialize`` ones below 2**31, and options that do not follow from the constants.
        grid: programs in x, y, z.
        arguments, constants: in the order of its signature; constants come last.
        options: ``num_warps`` and the like, for the first launch.

    Returns:
        Its launcher for this grid, which takes ``(*arguments, *constants, stream=)``; None under the interpreter.
    """
    key = _launch_key(kernel, key, constants)
    found = _launched.get(key)
    if found is None:
        found = kernel[grid](*arguments, *constants, **options)
        if found is None:  # the interpreter
            return None
        _launched[key] = found
        return found[grid]
    runner = found[grid]
    runner(*arguments, *constants)
    return runner


def _launch_key(kernel: Any, key: tuple, constants: tuple) -> tuple:
    return (None if INTERPRET else torch.cuda.current_device(), kernel.fn, constants, *key)


def compiled_form(kernel: Any, key: tuple, constants: tuple) -> Any:
    """The compiled kernel that :func:`launch` launches with these; None before the first, and under the interpreter."""
    return _launched.get(_launch_key(kernel, key, constants))


def forms(*tensors: torch.Tensor) -> tuple[tuple[torch.dtype, bool], ...]:
    """Each tensor's dtype, and whether it begins at a multiple of 16 bytes: Triton compiles other loads if not."""
    return tuple((t.dtype, t.data_ptr() & 15 == 0) for t in tensors)


@cache
def can_overlap(device: int | None) -> bool:
    """Whether a kernel may be launched before the one ahead of it has ended (compute capability 9.0 and above)."""
    return not INTERPRET and torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """First statement of a kernel that is launched with ``launch_pdl=OVERLAP``.

    Waits until the kernels ahead have ended and their results are visible, then lets the next kernel be launched: what
    overlaps is launching, never work.  A kernel that is launched as a dependent and never waits (the host's LoRA
    shrink kernel) must not come next.  Source: CUDA programming guide, programmatic dependent launch.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def tree_sum_reference(v: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension (a power of two) by pairs: lane 2i is added to lane 2i + 1, and again."""
    while v.shape[-1] > 1:
        v = v[..., ::2] + v[..., 1::2]
    return v[..., 0]


@triton.jit
def tree_sum(v, LOG2_SIZE: tl.constexpr):
    """Row sums of ``v`` [rows, 2**LOG2_SIZE] by pairs.

    Every step adds exactly two numbers, so the result depends neither on the layout the compiler picks nor
    on the number of warps.  Neighbours come first because a thread holds neighbours: the first steps need no
    exchange.  Compile the caller with ``enable_fp_fusion=False``, or a product before the first
    addition may be fused into it.
    """
    rows: tl.constexpr = v.shape[0]
    for step in tl.static_range(LOG2_SIZE):
        v = tl.sum(tl.reshape(v, (rows, 1 << (LOG2_SIZE - 1 - step), 2)), axis=2)
    return tl.reshape(v, (rows,))
