"""A pytest plugin that lets ``benchmarks/test_kernels.py`` run on the CPU: small cases, invented durations.

Every call still runs once, and every check is the real one.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import kernel_cases
import kernel_prepare
import kernel_runs
import timing
from kernel_cases import KernelCase

from det_plugin.ops.linear_cuda import LinearDispatcher

STOCK, OURS = 30.0, 20.0
"""Median microseconds."""


def interleaved(sides, rounds, *, flush=False):
    """As the real one, without a GPU."""
    assert flush
    for calls in sides.values():
        for call in calls:
            call()
    middle = {"stock": STOCK, "deterministic": OURS, "copy": 1.0, "matmul": 2.0}
    return {name: [middle[name] + i - rounds // 2 for i in range(rounds)] for name in sides}


def wrong() -> kernel_prepare.Prepared:
    """A norm whose result is wrong."""
    prepared = kernel_prepare.prepare_rms_norm(64, 3)
    kernel_prepare.close(torch.ones(3), torch.full((3,), 1.1), "wrong norm")
    return prepared


def broken() -> kernel_prepare.Prepared:
    """A norm whose stock side raises when it runs."""
    prepared = kernel_prepare.prepare_rms_norm(64, 3)
    prepared.stock = lambda: [lambda: torch.ones(2) @ torch.ones(3)]
    return prepared


def lonely() -> kernel_prepare.Prepared:
    """A norm without a stock side."""
    prepared = kernel_prepare.prepare_rms_norm(64, 3)

    def stock():
        raise kernel_prepare.UnavailableError("no host here")

    prepared.stock = stock
    return prepared


def absent() -> kernel_prepare.Prepared:
    """A case that cannot run here."""
    raise kernel_prepare.UnavailableError("no such kernel here")


library = torch.library.Library("det_plugin", "FRAGMENT")
library.impl("linear", lambda x, w, bias=None: (x.double() @ w.double().T).to(x.dtype), "CPU")
LinearDispatcher.plan = lambda *_: SimpleNamespace(schedule=lambda m: f"tile-{m}", max_rows=4)
torch.cuda.synchronize = lambda: None
timing.interleaved = interleaved
kernel_prepare.DEVICE = torch.device("cpu")
kernel_prepare.ROTATION_BYTES = 1 << 12
kernel_prepare.rotating_weights = lambda n, k, dtype, device: [torch.randn(n, k, dtype=dtype) for _ in range(3)]
kernel_runs.unavailable = lambda: None
kernel_runs.COPY_BYTES, kernel_runs.MATMUL_SIZE = 1 << 10, 16
kernel_runs.environment = lambda: {"gpu": "NVIDIA Fake", "driver": "1.0", "torch": torch.__version__, "date": "2026-11"}
kernel_runs.compile_groups = lambda groups: print("COMPILED", sorted(groups))
part = functools.partial
kernel_cases.CASES.clear()
kernel_cases.CASES |= {
    "linear": KernelCase("linear", "M", "", "N=8", "a", part(kernel_prepare.prepare_linear, 8, 16, 5)),
    "rms_norm": KernelCase("rms_norm", "M", "", "5 x 64", "b", part(kernel_prepare.prepare_rms_norm, 64, 5)),
    "fused": KernelCase(
        "fused_add_rms_norm", "M", "", "5 x 64", "b", part(kernel_prepare.prepare_fused_add_rms_norm, 64, 5)
    ),
    "qk": KernelCase("qk_norm_rope", "M", "", "7", "b", part(kernel_prepare.prepare_qk_norm_rope, 4, 2, 64, 7)),
    "log_softmax": KernelCase("log_softmax", "", "", "4 x 99", "b", part(kernel_prepare.prepare_log_softmax, 99, 4)),
    "wrong": KernelCase("rms_norm", "M", "", "wrong", "", wrong),
    "broken": KernelCase("rms_norm", "M", "", "broken", "", broken),
    "lonely": KernelCase("rms_norm", "M", "", "lonely", "", lonely),
    "absent": KernelCase("attention", "M", "flashinfer", "absent", "", absent),
}
