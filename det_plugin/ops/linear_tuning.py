"""Measures schedules of the linear operator and writes tuning tables.  Speed only: bits never depend on it."""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from det_plugin.ops.linear_schedules import Table, Tile

if TYPE_CHECKING:
    from det_plugin.ops.linear_cuda import Plan

ROWS = (1, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
"""Row counts that are measured; each is the largest of its interval in the table."""

ROTATION_BYTES = 192 * 2**20
"""Weights are rotated over this many bytes, so that they come from device memory and not from the L2 cache."""


def candidates(dtype: torch.dtype, n: int, k: int) -> set[str]:
    """Tiles worth measuring beside cuBLASLt."""
    if dtype == torch.float32:
        return {"pointer-16x32x64-w4-s3", "pointer-32x32x32-w4-s3", "pointer-64x64x32-w4-s2"}
    names = {"pointer-16x32x128-w4-s4", "pointer-16x16x256-w4-s4", "pointer-64x64x64-w4-s4"}
    if torch.cuda.get_device_capability()[0] == 9 and n * dtype.itemsize % 16 == k * dtype.itemsize % 16 == 0:
        names |= {"tma-16x32x128-w4-s5", "swap-16x64x128-w4-s5", "swap-32x64x128-w4-s5"}
    return names


def graph_time(calls: Sequence[Callable[[], object]], replays: int = 3) -> float:
    """Microseconds per call: all calls in one CUDA graph, median over replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
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


def rotating_weights(n: int, k: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Distinct random weights whose sizes add up to more than the L2 cache."""
    copies = max(2, min(400, ROTATION_BYTES // (n * k * dtype.itemsize) + 1))
    first = torch.randn(n, k, device=device, dtype=dtype)
    return [first, *(torch.roll(first, i + 1, 0) for i in range(copies - 1))]


def measure_table(plan: "Plan", device: torch.device, margin: float = 1.02) -> Table:
    """Fastest certified schedule at each of :data:`ROWS`; a tile must beat cuBLASLt by ``margin``."""
    weights = rotating_weights(plan.n, plan.k, plan.dtype, device)
    bias = torch.randn(plan.n, device=device, dtype=plan.dtype) if plan.has_bias else None
    best: list[tuple[int | None, str]] = []
    tiles = [name for name in plan.certificate.accepted if not name.startswith("cublaslt")]
    for m in (rows for rows in ROWS if rows <= plan.max_rows):
        x = torch.randn(m, plan.k, device=device, dtype=plan.dtype)
        y = torch.empty(m, plan.n, device=device, dtype=plan.dtype)
        algorithm = plan.vendor(m)
        vendor = None if algorithm is None else algorithm.name
        times: dict[str, float] = {}
        for name in [*([vendor] if vendor else []), *(tiles if m <= 256 or not vendor else [])]:
            if name != vendor and m > Tile.parse(name).max_rows(plan.max_rows):
                continue
            launch = plan.bind(name, m)
            time = graph_time([partial(_call, launch, x, w, bias, y) for w in weights])
            times[name] = time if name == vendor else time * margin
        winner = min(times, key=lambda name: times[name])
        best.append((m, "cublaslt" if winner == vendor else winner))
    return merge_intervals(best)


def _call(launch, x, w, bias, y) -> None:
    launch(x, w, bias, y, torch.cuda.current_stream().cuda_stream)


def merge_intervals(best: Sequence[tuple[int | None, str]]) -> Table:
    """Join neighbouring intervals with the same schedule; the last one loses its bound."""
    merged: list[tuple[int | None, str]] = []
    for bound, name in best:
        if merged and merged[-1][1] == name:
            merged[-1] = (bound, name)
        else:
            merged.append((bound, name))
    merged[-1] = (None, merged[-1][1])
    return tuple(merged)


def save_table(path: Path, gpu: str, key: str, table: Table) -> None:
    """Add one problem's table to a GPU model's file (atomically)."""
    document = {"format": 1, "gpu": gpu, "schedules": {}}
    if path.exists():
        document = json.loads(path.read_text(encoding="utf-8"))
    document["schedules"][key] = [list(row) for row in table]  # type: ignore[index]
    document["schedules"] = dict(sorted(document["schedules"].items()))  # type: ignore[attr-defined]
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        lines = ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(rows)}"
            for name, rows in document["schedules"].items()  # type: ignore[attr-defined]
        )
        head = f'{{\n "format": 1,\n "gpu": {json.dumps(gpu)},\n "schedules": {{\n'
        file.write(head + lines + "\n }\n}\n")
    os.replace(temporary, path)
