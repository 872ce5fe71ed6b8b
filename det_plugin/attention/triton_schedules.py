"""Tile shapes of the Triton attention kernel.  Free to follow the batch: all of them carry out one order."""

from __future__ import annotations

from dataclasses import dataclass

SPLIT_MAX_TOKENS = 256
"""Largest batch, in query tokens, whose tiles may be shared by several programs."""


@dataclass(frozen=True)
class Schedule:
    """How one launch is carried out.

    Attributes:
        block_m: packed rows per tile, a power of two of at least 16.
        num_warps, num_stages: as in Triton.
        target_programs: programs wanted before tiles stop being shared.
        max_split: most programs that share one tile.
    """

    block_m: int
    num_warps: int
    num_stages: int
    target_programs: int = 1056
    max_split: int = 256

    def split(self, tiles: int, segments: int) -> int:
        """Programs per tile, a power of two, from the number of tiles launched and the longest context."""
        want = min(self.target_programs // max(1, tiles), segments, self.max_split)
        return 1 << (want.bit_length() - 1) if want > 1 else 1


@dataclass(frozen=True)
class Schedules:
    """``few``: requests whose rows fit one small tile (decode).  ``many``: all others (prefill)."""

    few: Schedule
    many: Schedule


def default_schedules(head_dim: int, group: int) -> Schedules:
    """Schedules for a head size and a number of query heads per key head."""
    rows = 16 if group <= 16 else 32 if group <= 32 else 64
    if head_dim <= 64:
        return Schedules(Schedule(rows, 4, 3), Schedule(128, 4, 3, 264))
    if head_dim <= 128:
        return Schedules(Schedule(rows, 4, 3), Schedule(128, 8, 3, 264))
    return Schedules(Schedule(rows, 4, 2), Schedule(64, 8, 2, 264))
