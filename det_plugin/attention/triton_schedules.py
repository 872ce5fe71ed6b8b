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
    target_programs: int = 512
    max_split: int = 256

    def split(self, tiles: int, segments: int) -> int:
        """Programs per tile, a power of two, from the number of tiles launched and the longest context."""
        want = min(self.target_programs // max(1, tiles), segments, self.max_split)
        return 1 << (want.bit_length() - 1) if want > 1 else 1


@dataclass(frozen=True)
class Schedules:
    """``few``: requests whose rows fit one small tile (decode); ``scarce``: the same when such tiles are rarer
    than multiprocessors; ``many``: all other requests (prefill)."""

    few: Schedule
    scarce: Schedule
    many: Schedule


SCARCE_TILES = 128


def default_schedules(head_dim: int, group: int, page_size: int = 16) -> Schedules:
    """Schedules for a head size, a number of query heads per key head, and a page size.

    Measured on an H200 with 32 query and 8 key heads of 128: four warps beat two while tiles are scarce, and two
    beat four once the GPU is full; tiles of 64 rows beat 128 where a key block lies in one page, and lose where each
    key looks up its page.
    """
    rows = 16 if group <= 16 else 32 if group <= 32 else 64
    warps = 2 if rows == 16 else 4
    one_page = page_size % 64 == 0
    if head_dim <= 128:
        few, scarce = Schedule(rows, warps, 4), Schedule(rows, 4, 2)
        many = Schedule(64, 4, 3, 264) if one_page else Schedule(128, 8 if head_dim > 64 else 4, 3, 264)
        return Schedules(few, scarce, many)
    few = Schedule(rows, 4, 2)
    return Schedules(few, few, Schedule(64, 8, 2, 264))
