"""Measures schedules of the linear operator and writes tuning tables.  Speed only: bits never depend on it."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from det_plugin.ops.linear_schedules import Table, Tile, load_tables

if TYPE_CHECKING:
    from det_plugin.ops._cublaslt import Algorithm, LinearProblem
    from det_plugin.ops.linear_plan import Plan

INTERVALS = (1, 8, 16, 32, 64, 128)
"""Row counts that end an interval of the table: what is fastest there serves the whole interval."""

POINTS = (256, 512, 1024, 2048, 4096, 8192)
"""Larger row counts that are measured one by one; between them cuBLASLt's heuristic chooses."""

TILE_MARGIN, VENDOR_MARGIN = 1.02, 1.015
"""How much faster than the heuristic's first choice a tile, or another algorithm, must be."""

ROTATION_BYTES = 192 * 2**20
"""Weights are rotated over this many bytes, so that they come from device memory and not from the L2 cache."""


def candidates(dtype: torch.dtype, n: int, k: int) -> set[str]:
    """Tiles worth measuring beside cuBLASLt (in its place for float32)."""
    if dtype == torch.float32:
        return {
            "pointer-16x16x32-w4-s6",
            "pointer-16x32x32-w4-s6",
            "pointer-32x64x32-w4-s3",
            "pointer-128x64x32-w4-s3",
            "pointer-128x128x32-w8-s3",
        }
    if torch.cuda.get_device_capability()[0] == 9 and n * dtype.itemsize % 16 == k * dtype.itemsize % 16 == 0:
        return {
            "swap-8x32x256-w2-s4",
            "swap-8x64x256-w4-s6",
            "swap-16x64x256-w4-s5",
            "swap-16x128x128-w8-s4",
            "tma-16x64x256-w4-s3",
            "swap-32x64x128-w4-s5",
            "swap-32x128x128-w8-s4",
            "swap-64x64x128-w4-s5",
            "tma-64x128x64-w4-s4",
        }
    return {"pointer-16x32x128-w4-s4", "pointer-16x16x256-w4-s4", "pointer-128x128x64-w8-s3"}


def alternatives(problem: "LinearProblem | None", block: int, count: int = 6) -> "list[tuple[Algorithm, int, int]]":
    """cuBLASLt's suggestions after the first, with the row counts they would serve."""
    found = []
    low = 1
    for m in (*INTERVALS, *POINTS):
        if problem is not None and m <= block:
            start = m if m in POINTS else low
            found += [(a, start, m) for a in problem.algorithms(m, count)[1:]]
        low = m + 1
    return found


def graph_time(calls: Sequence[Callable[[], object]], replays: int = 3) -> float:
    """Microseconds per call: all calls in one CUDA graph, median over replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[len(times) // 2]


def _generator(device: torch.device) -> torch.Generator:
    """Random numbers that leave the process's own generator alone."""
    return torch.Generator(device).manual_seed(0)


def rotating_weights(n: int, k: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Distinct random weights whose sizes add up to more than the L2 cache."""
    copies = max(2, min(400, ROTATION_BYTES // (n * k * dtype.itemsize) + 1))
    first = torch.randn(n, k, device=device, dtype=dtype, generator=_generator(device))
    return [first, *(torch.roll(first, i + 1, 0) for i in range(copies - 1))]


def memory(n: int, k: int, dtype: torch.dtype) -> int:
    """Bytes of the weights that :func:`rotating_weights` makes."""
    return max(2 * n * k * dtype.itemsize, ROTATION_BYTES + n * k * dtype.itemsize)


def measure_table(
    plan: "Plan",
    named: "list[tuple[Algorithm, int, int]]",
    device: torch.device,
    deadline: float = float("inf"),
) -> tuple[Table, bool]:
    """Times the certified schedules at :data:`INTERVALS` and :data:`POINTS`, and ranks them.

    Args:
        plan: certified schedules of one problem.
        named: cuBLASLt's further suggestions, with the row counts each is certified for.
        device: where to measure.
        deadline: value of ``time.monotonic()`` after which no further row count is measured.

    Returns:
        The table, and whether every row count was measured.
    """
    weights = rotating_weights(plan.n, plan.k, plan.dtype, device)
    generator = _generator(device)
    normal = lambda *shape: torch.randn(*shape, device=device, dtype=plan.dtype, generator=generator)
    bias = normal(plan.n) if plan.has_bias else None
    times: dict[int, dict[str, float]] = {}
    tiles = [name for name in plan.certificate.accepted if not name.startswith("cublaslt")]
    for m in (rows for rows in (*INTERVALS, *POINTS) if rows <= plan.max_rows):
        if time.monotonic() > deadline:
            return splice(plan.table, fastest(times)), False
        x = normal(m, plan.k)
        y = torch.empty(m, plan.n, device=device, dtype=plan.dtype)
        vendor = plan.vendor(m)
        launches = {} if vendor is None else {"cublaslt": plan.bind(vendor.name, m)}
        launches |= {
            a.name: plan.bind_algorithm(a, m)
            for a, _, high in named
            if high == m and plan.certified(a.name, m) and (vendor is None or a.name != vendor.name)
        }
        if m <= INTERVALS[-1] or not launches:
            launches |= {name: plan.bind(name, m) for name in tiles if m <= Tile.parse(name).max_rows(plan.max_rows)}
        times[m] = {
            name: graph_time([partial(_call, launch, x, w, bias, y) for w in weights])
            for name, launch in launches.items()
        }
    return rank(times), True


def fastest(times: Mapping[int, Mapping[str, float]]) -> dict[int, str]:
    """Schedules by row count: cuBLASLt's first choice where nothing beats it by its margin."""
    best: dict[int, str] = {}
    for m, measured in times.items():
        if measured:
            best[m] = min(
                measured,
                key=lambda name: (
                    measured[name]
                    * (1 if name == "cublaslt" else VENDOR_MARGIN if name.startswith("cublaslt") else TILE_MARGIN)
                ),
            )
    return best


def rank(times: Mapping[int, Mapping[str, float]]) -> Table:
    """The table that times (microseconds by row count and schedule) ask for."""
    best = fastest(times)
    default = "cublaslt" if any("cublaslt" in measured for measured in times.values()) else None
    rows: list[tuple[int | None, str]] = []
    for m in sorted(best):
        if m in POINTS and default is not None:
            if best[m] != default:
                rows += [(m - 1, default), (m, best[m])]
        else:
            rows.append((m, best[m]))
    last = best[max(best)]
    rows.append((None, default or ("cublaslt" if last.startswith("cublaslt") else last)))
    return merge_intervals(rows)


def splice(table: Table | None, measured: Mapping[int, str]) -> Table:
    """``table`` with the choices for some row counts replaced.

    Args:
        table: what there is; None: cuBLASLt everywhere.
        measured: schedules by row count.  One of :data:`INTERVALS` stands for its interval, others for themselves.

    Returns:
        A table that differs from ``table`` in those row counts only.
    """
    table = table or ((None, "cublaslt"),)
    served = []
    for m, name in measured.items():
        below = max((i for i in INTERVALS if i < m), default=0) if m in INTERVALS else m - 1
        served.append((below, m, name))
    bounds = {bound for bound, _ in table if bound is not None}
    bounds |= {edge for below, m, _ in served for edge in (below, m)}
    rows: list[tuple[int | None, str]] = []
    for bound in [*sorted(bounds - {0}), None]:
        m = max(bounds, default=0) + 1 if bound is None else bound
        kept = next(name for last, name in table if last is None or m <= last)
        rows.append((bound, next((name for below, last, name in served if below < m <= last), kept)))
    return merge_intervals(rows)


def _call(launch, x, w, bias, y) -> None:
    launch(x, w, bias, y, torch.cuda.current_stream().cuda_stream)


def merge_intervals(rows: Sequence[tuple[int | None, str]]) -> Table:
    """Join neighbouring intervals with the same schedule; the last one loses its bound.

    Those of a cuBLASLt algorithm stay apart: it is certified for each interval of its own.
    """
    merged: list[tuple[int | None, str]] = []
    for bound, name in rows:
        if merged and merged[-1][1] == name and not name.startswith("cublaslt-"):
            merged[-1] = (bound, name)
        else:
            merged.append((bound, name))
    merged[-1] = (None, merged[-1][1])
    return tuple(merged)


def save_table(path: Path, gpu: str, key: str, table: Table) -> None:
    """Add one problem's table to a GPU model's file (atomically); a file that can't be read is written anew."""
    try:
        known = load_tables(path)
    except (ValueError, KeyError, TypeError, AttributeError):
        known = {}
    tables = dict(sorted({**known, key: table}.items()))
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(rows)}" for name, rows in tables.items())
    head = f'{{\n "format": 1,\n "gpu": {json.dumps(gpu)},\n "schedules": {{\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(head + lines + "\n }\n}\n")
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
