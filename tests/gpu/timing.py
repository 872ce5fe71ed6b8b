"""Timing on a CUDA GPU: calls captured in CUDA graphs, replayed in turn and timed with CUDA events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Call = Callable[[], object]

FLUSH_BYTES = 256 << 20
"""Read between replays where asked for: several times the L2 cache, and longer than a launch takes."""


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """All calls in one CUDA graph; each runs once before, so that it is compiled and planned."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def replay_time(graph: torch.cuda.CUDAGraph, flush: torch.Tensor | None = None) -> float:
    """Microseconds of one replay between two CUDA events.

    Args:
        graph: what to replay.
        flush: read just before, so that the replay finds a cold L2 cache with nothing to write back, and is
            launched while the GPU is still busy: its launch isn't timed.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if flush is not None:
        flush.sum()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def interleaved(sides: Mapping[str, Sequence[Call]], rounds: int, *, flush: bool = False) -> dict[str, list[float]]:
    """Each side's calls as one CUDA graph, replayed in turn.

    Args:
        sides: calls by name; rotate over more memory than the L2 cache holds where that matters.
        rounds: timed replays of every side, after one that isn't timed.
        flush: see :func:`replay_time`.

    Returns:
        Microseconds per call of every round, by name.
    """
    graphs = {name: capture(calls) for name, calls in sides.items()}
    buffer = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda") if flush else None
    for graph in graphs.values():
        graph.replay()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(replay_time(graph, buffer) / len(sides[name]))
    return times


def graph_pairs(
    stock: Sequence[Call], ours: Sequence[Call], rounds: int, replays: int = 5
) -> list[tuple[float, float]]:
    """``rounds`` pairs (stock, ours) of microseconds per call: medians of ``replays`` interleaved replays each."""
    times = interleaved({"stock": stock, "ours": ours}, rounds * replays)

    def medians(values: list[float]) -> list[float]:
        return [statistics.median(values[i * replays : (i + 1) * replays]) for i in range(rounds)]

    return list(zip(medians(times["stock"]), medians(times["ours"]), strict=True))


def wall_time(calls: Sequence[Call]) -> float:
    """Microseconds per call outside CUDA graphs, processor time included."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for call in calls:
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / len(calls) * 1e6
