"""How the kernel benchmarks measure: peaks of the GPU, both sides of a case in turn, and rates.

pytest-benchmark reads the durations from a clock that moves by what CUDA events measured.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import kernel_cases
import kernel_prepare
import ops_check
import timing
import torch
from kernel_prepare import UnavailableError

from det_plugin.evidence.fingerprint import package_version

ROUNDS = 11
COPY_BYTES = 2 << 30
MATMUL_SIZE = 8192
COMPILE_SECONDS = 60


def unavailable() -> str | None:
    """Why nothing can be measured here; None where a GPU is."""
    return None if torch.cuda.is_available() else "kernel benchmarks need a CUDA GPU: torch sees none on this machine"


class EventClock:
    """A timer that stands still but for the durations it is given; seconds."""

    __name__ = "cuda_events"

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, durations: Iterator[float]) -> None:
        """Move on by the next duration."""
        self.now = next(durations)

    def back(self) -> None:
        """Return to 0, so that the next difference is a duration without rounding."""
        self.now = 0.0


@dataclass(frozen=True)
class Peaks:
    """What the GPU can do, measured in the same run: bytes read and written a second by a large device copy, and
    operations a second of a large bfloat16 matrix product on random data."""

    copy_bytes_per_s: float
    matmul_flop_per_s: float


def measure_peaks() -> Peaks:
    """Measure the peaks; medians over replays."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=kernel_prepare.DEVICE)
    target = torch.empty_like(source)
    make = lambda: torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=kernel_prepare.DEVICE, dtype=torch.bfloat16)
    a, b, c = make(), make(), make()
    sides = {"copy": [lambda: target.copy_(source)], "matmul": [lambda: torch.mm(a, b, out=c)]}
    times = timing.interleaved(sides, 3 * ROUNDS, flush=True)
    copy, matmul = (statistics.median(times[name]) * 1e-6 for name in ("copy", "matmul"))
    return Peaks(2 * COPY_BYTES / copy, 2 * MATMUL_SIZE**3 / matmul)


def rates(moved: int, flop: int | None, seconds: float, peaks: Peaks) -> dict[str, float]:
    """Bytes and operations a second, and both as fractions of the peaks; operations only where they are counted."""
    found = {"bytes_per_s": moved / seconds, "fraction_of_copy": moved / seconds / peaks.copy_bytes_per_s}
    if flop is not None:
        found |= {"flop_per_s": flop / seconds, "fraction_of_matmul": flop / seconds / peaks.matmul_flop_per_s}
    return found


@dataclass
class Measured:
    """One case.

    Attributes:
        seconds: per call, of every round, by side.
        facts: what is known of the case.
        missing: why there is no stock side.
        failure: what its stock side raised, where it should have run.
    """

    seconds: dict[str, list[float]]
    facts: dict[str, Any]
    missing: str | None = None
    failure: Exception | None = None


def measure(name: str) -> Measured:
    """Check one case's result, then time both sides in turn.

    Raises:
        UnavailableError: its kernels are not available here.
        AssertionError: the deterministic result is wrong.
    """
    case = kernel_cases.CASES[name]
    prepared = case.prepare()
    prepared.check()
    sides = {"deterministic": prepared.deterministic}
    missing, failure = None, None
    try:
        stock = prepared.stock()
        stock[0]()
        torch.cuda.synchronize()
        sides = {"stock": stock, **sides}
    except UnavailableError as error:
        missing = str(error)
    except Exception as error:  # its test fails with it; the deterministic side is measured all the same
        missing, failure = f"{type(error).__name__}: {error}", error
    times = timing.interleaved(sides, ROUNDS, flush=True)
    facts = {
        "case": name,
        "operator": case.operator,
        "model": case.model,
        "backend": case.backend,
        "shape": case.name,
        "bytes": prepared.bytes,
        "flop": prepared.flop,
        "stock_runs": prepared.stock_name,
        "schedule": prepared.schedule,
        "calls_per_graph": len(prepared.deterministic),
    }
    seconds = {side: [t * 1e-6 for t in values] for side, values in times.items()}
    return Measured(seconds, facts, missing, failure)


def compile_groups(groups: Sequence[str]) -> None:
    """Fill Triton's cache from one process per group, side by side; what fails there fails again, visibly, here."""
    script = str(Path(kernel_cases.__file__))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    jobs = {group: subprocess.Popen([sys.executable, script, group], **quiet) for group in groups}
    deadline = time.monotonic() + COMPILE_SECONDS
    for group, job in jobs.items():
        try:
            status: object = job.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
            status = f"none within {COMPILE_SECONDS} s"
        if status:
            warnings.warn(f"compiling the kernels of {group!r} ahead: exit status {status}", stacklevel=2)


def environment() -> dict[str, Any]:
    """What the results were measured on."""
    packages = {"vllm": "vllm", "flashinfer": "flashinfer-python"}
    return ops_check.environment(None) | {name: package_version(package) for name, package in packages.items()}


@dataclass
class KernelSession:
    """One run: measures each case when its first side is asked for, and nothing after ``limit`` seconds.

    Attributes:
        selected: the cases that will be asked for; their kernels are compiled ahead.
        limit: seconds since ``started``; 0 for no limit.
        started: ``time.monotonic()`` at which the run began.
        left_out: why cases, or their stock sides, were not measured.
    """

    selected: Sequence[str]
    limit: float
    started: float = field(default_factory=time.monotonic)
    left_out: dict[str, str] = field(default_factory=dict)
    measured: dict[str, Measured | Exception] = field(default_factory=dict)

    @cached_property
    def peaks(self) -> Peaks:
        """Of this GPU; compiles ahead first, so that nothing else runs while it is measured."""
        groups = dict.fromkeys(
            kernel_cases.CASES[name].group for name in self.selected if kernel_cases.CASES[name].group
        )
        if len(groups) > 1:
            compile_groups(list(groups))
        kernel_cases.configure()
        torch.manual_seed(0)
        return measure_peaks()

    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self.started

    def get(self, name: str) -> Measured:
        """The measurement of one case, made once.

        Raises:
            UnavailableError: not available here, or the time is up.
        """
        if name not in self.measured:
            _ = self.peaks
            if self.limit and self.seconds() > self.limit:
                self.left_out[name] = f"the limit of {self.limit:.0f} s was reached"
                raise UnavailableError(self.left_out[name])
            try:
                found = self.measured[name] = measure(name)
                if found.missing is not None:
                    self.left_out[f"{name}, stock"] = found.missing
            except Exception as error:
                self.left_out[name] = str(error) or type(error).__name__
                self.measured[name] = error
        result = self.measured[name]
        if isinstance(result, Exception):
            raise result
        return result

    def report(self) -> dict[str, Any]:
        """What the JSON file holds beside the benchmarks."""
        return {
            "environment": environment(),
            "peaks": vars(self.peaks),
            "left_out": self.left_out,
            "seconds": round(self.seconds(), 1),
        }
