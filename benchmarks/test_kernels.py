"""Kernel benchmarks: each operator of the forward pass, stock beside deterministic, under a CUDA graph.

    pytest benchmarks/test_kernels.py --benchmark-json FILE
    python benchmarks/kernel_results.py FILE --out benchmarks/results/h200/kernels.json

Every case checks its result first.  Its two sides are captured in one CUDA graph each and replayed in turn, with a cold
L2 cache and over rotated inputs; durations are seconds per call, from CUDA events.  ``extra_info`` holds bytes and
operations a second, and both as fractions of a device copy and of a matrix product measured in the same run.
Without a GPU everything is skipped.  About two minutes; ``--seconds`` bounds it, ``-k linear`` chooses.
"""

from __future__ import annotations

import statistics

import pytest

pytest.importorskip("torch")

import kernel_runs
from kernel_cases import CASES
from kernel_prepare import UnavailableError
from kernel_results import SIDES

CLOCK = kernel_runs.EventClock()
REASON = kernel_runs.unavailable()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
    pytest.mark.benchmark(timer=CLOCK, disable_gc=False, warmup=False),
]


@pytest.mark.parametrize(("name", "side"), [(name, side) for name in CASES for side in SIDES])
def test_kernel(name, side, benchmark, kernels):
    """One side of one case."""
    try:
        measured = kernels.get(name)
    except UnavailableError as error:
        pytest.skip(f"{name}: {error}")
    if side == "stock" and measured.failure is not None:
        raise measured.failure
    if side not in measured.seconds:
        pytest.skip(f"{name}, {side}: {measured.missing}")
    seconds = measured.seconds[side]
    benchmark.group = f"{measured.facts['operator']} {measured.facts['backend']}".strip()
    benchmark.extra_info |= {"side": side, **measured.facts}
    benchmark.extra_info |= kernel_runs.rates(
        measured.facts["bytes"], measured.facts["flop"], statistics.median(seconds), kernels.peaks
    )
    durations = iter(seconds)
    benchmark.pedantic(CLOCK.advance, args=(durations,), setup=CLOCK.back, rounds=len(seconds))
