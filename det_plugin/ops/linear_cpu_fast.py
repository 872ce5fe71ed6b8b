"""Builds and switches on the compiled path of the CPU products (``_linear_cpu.cpp``).

It saves processor time between products and changes no bits: it makes the call that
:class:`det_plugin.ops.linear_cpu.InvariantLinear` would make.  Without a C++ compiler the Python path stays on,
and the log says so once.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from det_plugin.evidence.certificates import first_difference
from det_plugin.ops import native

if TYPE_CHECKING:
    from det_plugin.ops.linear_cpu import InvariantLinear

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "_linear_cpu.cpp"

fast: Callable[[torch.Tensor, torch.Tensor | None, int], torch.Tensor | None] | None = None
"""``fast(x, bias, index)`` gives the product, or None where Python has to make it; None until :func:`activate`."""

_tried = False


def active() -> bool:
    """Whether the compiled path runs in this process."""
    return fast is not None


def activate() -> bool:
    """Build, load and switch on; False (said in the log, once) where that is not possible."""
    global fast, _tried
    if _tried:
        return active()
    _tried = True
    from det_plugin.ops import linear_cpu

    try:
        native.build(SOURCE, "CPU")
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning("linear: the compiled path is off, products cost more processor time: %s", error)
        return False
    linear_cpu.release_operator()
    try:
        native.load(SOURCE, "CPU")
        operator = torch.ops.det_plugin._cpu_linear_fast.default
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        linear_cpu.register_operator()
        logger.warning("linear: the compiled path is off, products cost more processor time: %s", error)
        return False
    fast = operator._op  # without the Python frame of OpOverload.__call__
    return True


def keep(linear: InvariantLinear) -> int | None:
    """Hand one weight to the compiled path and prove its bytes there.

    Returns:
        The index that :data:`fast` takes; None where the weight stays with Python: its kernel is not the host's
        packed product at the weight's own shape, nothing could be built, or the bytes differ (an error in the log).
    """
    handler = getattr(linear.run, "onednn_handler", None)
    if handler is None or not activate():
        return None
    whole = sorted(linear.whole_rows)
    twice = linear.padded_rows(1) == 2
    try:
        index = torch.ops.det_plugin._cpu_linear_keep(handler, linear.n, linear.k, linear.dtype, whole, twice)
    except RuntimeError as error:
        logger.warning("linear N=%d K=%d: not on the compiled path: %s", linear.n, linear.k, error)
        return None
    return index if _proven(linear, index) else None


def _proven(linear: InvariantLinear, index: int) -> bool:
    """Compare the compiled path's bytes with the Python path's, with and without a bias.

    One row and two are where padding starts; most vendor code for few rows ends before 16.
    """
    assert fast is not None
    generator = torch.Generator().manual_seed(20250103)
    bias = torch.randn(linear.n, generator=generator).to(linear.dtype)
    for rows, each in ((1, None), (1, bias), (2, bias), (16, None)):
        x = torch.randn(rows, linear.k, generator=generator).to(linear.dtype)
        got = fast(x, each, index)
        difference = None if got is None else first_difference(linear(x, each), got)
        if difference is not None:
            logger.error(
                "linear N=%d K=%d %s: the compiled path differs at %d rows, %s (0x%s, got 0x%s): off for this weight",
                linear.n, linear.k, linear.dtype, rows, *difference,
            )  # fmt: skip
            return False
    return True
