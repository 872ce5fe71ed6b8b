"""FlashInfer's FA2 prefill kernel under a plan of our own, for prefill and decode alike.

FlashInfer's planner picks the query tile from the batch's average length and, under a CUDA graph, the split
of the keys from its size.  Here the plan is computed without it:

1. The query tile has :data:`TILE_ROWS` packed rows for every batch, so key tiles, warp layout and row sums are
   those of one kernel instance.
2. Keys are cut at multiples of :data:`CHUNK_KEYS` from position 0.  Each chunk's result is rounded to the
   model's dtype and merged upwards by FlashInfer's own merge kernel; chunks that a row does not see weigh
   zero and change nothing.
3. A key tile that a row does not see is not neutral: the kernel rescales by exp2(m * scale - round(m * scale))
   with a fused multiply-add, which is not exactly one.  So the rows of one query tile must see one number of key
   tiles, as a row decoded alone does: a request's rows are cut once, where :attr:`Layout.cut` divides the
   position, and are then laid on whole tiles.
4. Under a CUDA graph the plan is computed on the device, and entries beyond the real ones are marked invalid.

Source: Ye et al., FlashInfer (2025); plan layout read in 0.7.0.post1 (``attention/scheduler.cuh``).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from det_plugin.attention import flashinfer_plan
from det_plugin.attention.contract import FLASHINFER_HEAD_DIMS as HEAD_DIMS
from det_plugin.errors import ConfigError, UnsupportedError

CHUNK_KEYS = 2048
"""Keys per chunk."""

TILE_ROWS = 64
"""Packed rows, (query, head of the group), per query tile."""

_CAUSAL, _NHD = 1, 0
_FIELDS = ("request", "tile", "chunk", "o_start", "chunk_keys", "total_rows", "merge_start", "valid")


@functools.cache
def kernel(dtype: torch.dtype, head_dim: int, softcap: bool):
    """FlashInfer's compiled module; built on first use, which takes minutes where no build is cached.

    Raises:
        UnsupportedError: FlashInfer is missing, or the head size is not proven.
    """
    if head_dim not in HEAD_DIMS:
        raise UnsupportedError(
            f"head size {head_dim} with the flashinfer attention backend",
            f"proven for {', '.join(map(str, HEAD_DIMS))}",
            "choose --attention-backend TRITON_ATTN",
        )
    try:
        from flashinfer.jit.attention import gen_batch_prefill_module
    except ImportError as error:
        raise UnsupportedError(
            "the flashinfer attention backend",
            f"FlashInfer is not available ({error})",
            "pip install 'det-plugin[flashinfer]', or choose another backend",
        ) from None
    module = gen_batch_prefill_module(
        "fa2", dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, False, softcap, False
    )
    return module.build_and_load()


def key_tile(head_dim: int, shared_memory: int | None = None) -> int:
    """Keys per tile of the kernel, which chooses them by the GPU's shared memory.

    Args:
        head_dim: head size.
        shared_memory: bytes per multiprocessor; default: of the current device.
    """
    if shared_memory is None:
        shared_memory = torch.cuda.get_device_properties(None).shared_memory_per_multiprocessor
    query, keys = TILE_ROWS * head_dim * 2, 16 * head_dim * 4  # bytes: the query tile, 16 keys with their values
    blocks = 2 if shared_memory >= 2 * (query + keys) else 1
    room = min(8, (shared_memory // blocks - query) // keys)
    return 16 * (1 << (max(room, 1).bit_length() - 1))


@dataclass(frozen=True)
class Layout:
    """Heads of this rank, the page size in keys, and the kernel's keys per tile (:func:`key_tile`).

    Raises:
        UnsupportedError: a query tile would span several key tiles.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    key_tile: int = 128

    def __post_init__(self) -> None:
        if self.cut * self.group % TILE_ROWS:
            raise UnsupportedError(
                f"head size {self.head_dim} with {self.group} query heads per key head on this GPU and the "
                "flashinfer attention backend",
                f"a query tile of {TILE_ROWS} rows spans several key tiles of {self.key_tile}",
                "choose --attention-backend TRITON_ATTN",
            )

    @property
    def cut(self) -> int:
        """Rows are laid on query tiles from a multiple of this position on: key tiles then end between tiles."""
        return min(TILE_ROWS, self.key_tile)

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def partial_bytes(self, rows: int, chunks: int) -> int:
        """Bytes of the partial results of ``rows`` query rows."""
        return rows * chunks * self.num_heads * (self.head_dim * 2 + 4) + 256


@dataclass
class Launch:
    """One call of the kernel over consecutive rows.

    ``table``: int32 ``[sequences, width]``, one row of pages per sequence; None: the batch's own block table, of
    which a request is at most one sequence.
    """

    plan: list[int]
    ints: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    last_page_len: torch.Tensor
    rows: slice
    table: torch.Tensor | None = None


@dataclass(frozen=True)
class Buffers:
    """What captured launches read: the packed plan (uint8), page counts and starts (int32)."""

    plan: torch.Tensor
    last_page_len: torch.Tensor
    kv_indptr: torch.Tensor


def make_buffers(max_reqs: int, max_context: int, device: torch.device | str) -> Buffers:
    """Buffers for batches of up to ``max_reqs`` single rows with contexts of up to ``max_context`` keys."""
    _, size = _pack(_decode_sections(max_reqs, int(max(1, _chunks(max_context)))))
    zeros = lambda n, dtype: torch.zeros(n, dtype=dtype, device=device)
    return Buffers(zeros(size + 128, torch.uint8), zeros(max_reqs, torch.int32), zeros(max_reqs + 1, torch.int32))


def _decode_sections(reqs: int, chunks: int) -> dict[str, int]:
    """Entries of each section of a plan of single rows."""
    entries, starts = reqs * chunks, reqs + 1
    return dict(
        request=entries,
        tile=entries,
        chunk=entries,
        o_start=starts,
        chunk_keys=1,
        total_rows=1,
        merge_start=starts,
        valid=entries,
    )


def _pack(sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """Byte offsets of int32 sections (``valid``: bytes), each on a 16-byte boundary."""
    at, offsets = 0, {}
    for name in _FIELDS:
        offsets[name] = at
        at += -(-sizes[name] * (1 if name == "valid" else 4) // 16) * 16
    return offsets, at


def _plan_vector(layout, offsets, entries, rows, chunks, graph) -> list[int]:
    """The 15 numbers of FlashInfer's PrefillPlanInfo."""
    values = rows * chunks * layout.num_heads * layout.head_dim * 2
    return [
        entries,
        rows,
        offsets["total_rows"],
        TILE_ROWS,
        offsets["request"],
        offsets["tile"],
        offsets["chunk"],
        offsets["merge_start"],
        offsets["o_start"],
        offsets["chunk_keys"],
        0,
        -(-values // 128) * 128,
        offsets["valid"],
        int(graph),
        int(chunks > 1),
    ]


def _chunks(length):
    return (length + CHUNK_KEYS - 1) // CHUNK_KEYS


def check_workspace(layout: Layout, rows: int, max_context: int, workspace_bytes: int) -> None:
    """Refuse a workspace too small for ``rows`` single rows of ``max_context`` keys.

    Raises:
        ConfigError: naming the bytes it has and needs.
    """
    need = layout.partial_bytes(rows, int(_chunks(max_context)))
    if need > workspace_bytes:
        raise ConfigError(
            f"FlashInfer workspace: got {workspace_bytes} bytes, needs {need} for {rows} requests of "
            f"{max_context} tokens; raise VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE or lower --max-num-seqs"
        )


def plan_decode(
    layout: Layout,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_context: int,
    table_width: int,
    buffers: Buffers | None = None,
) -> list[Launch]:
    """One launch for a batch of single rows; requests without a row (graph padding) come last.

    Shapes and ``max_context`` alone decide what is launched.  With ``buffers``, all that the launch reads stays
    at one address, so that it can be replayed in a CUDA graph after this was called on new contents.
    """
    reqs, chunks, device = seq_lens.shape[0], int(max(1, _chunks(max_context))), seq_lens.device
    if layout.group > TILE_ROWS:
        raise UnsupportedError(
            f"{layout.group} query heads per key head with the flashinfer attention backend",
            f"proven up to {TILE_ROWS}",
            "choose --attention-backend TRITON_ATTN",
        )
    entries = reqs * chunks
    offsets, size = _pack(_decode_sections(reqs, chunks))
    if buffers is None:
        buffers = make_buffers(reqs, max_context, device)
    ints, last, kv_indptr = buffers.plan[:size], buffers.last_page_len[:reqs], buffers.kv_indptr[: reqs + 1]
    fill = flashinfer_plan.fill if device.type == "cuda" else flashinfer_plan.fill_reference
    lengths = (query_start_loc, seq_lens)
    fill(
        flashinfer_plan.DecodePlan(
            ints, last, kv_indptr, *lengths, offsets, chunks, CHUNK_KEYS, table_width, layout.page_size
        )
    )
    plan = _plan_vector(layout, offsets, entries, reqs, chunks, True)
    return [Launch(plan, ints, query_start_loc, kv_indptr, last, slice(None))]


def cut_rows(layout: Layout, query_lens: np.ndarray, seq_lens: np.ndarray, rows_for) -> list[list[tuple[int, ...]]]:
    """Launches as lists of sequences (request, first row, rows, keys of the last row).

    A sequence starts at a multiple of :attr:`Layout.cut` or ends before the next one.

    Args:
        query_lens, seq_lens: int ``[num_reqs]``, exact.
        rows_for: rows that one launch may have, given the most chunks of a row in it; None: any number.
    """
    launches: list[list[tuple[int, ...]]] = [[]]
    total = most = first = 0
    for request, (count, length) in enumerate(zip(query_lens.tolist(), seq_lens.tolist(), strict=True)):
        at = length - count
        while at < length:
            boundary = at - at % layout.cut + layout.cut
            end = length if at % layout.cut == 0 else min(length, boundary)
            limit = rows_for(max(most, int(_chunks(end))))
            if limit is not None and total + end - at > limit:
                if total:
                    launches.append([])
                    total = most = 0
                    continue
                end = at + (limit if at + limit < boundary else limit - limit % layout.cut)
            launches[-1].append((request, first, end - at, end))
            total, most, first, at = total + end - at, max(most, int(_chunks(end))), first + end - at, end
    return [launch for launch in launches if launch]


def plan_rows(
    layout: Layout,
    query_start_host: np.ndarray,
    seq_lens_host: np.ndarray,
    block_table: torch.Tensor,
    workspace_bytes: int,
) -> list[Launch]:
    """Launches of any batch whose lengths are known on the host; cut where partial results would overflow.

    Args:
        query_start_host, seq_lens_host: int ``[num_reqs + 1]`` and ``[num_reqs]``, exact.
        block_table: int32 ``[num_reqs, width]``; copied where a request becomes several sequences.

    Raises:
        ConfigError: the workspace holds no row of the longest request.
    """

    def rows_for(chunks: int) -> int | None:
        if chunks == 1:
            return None
        rows = workspace_bytes // layout.partial_bytes(1, chunks)
        if rows < 1:
            raise ConfigError(
                f"FlashInfer workspace: {workspace_bytes} bytes hold no row of {int(seq_lens_host.max())} tokens; "
                "raise VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE"
            )
        return rows

    launches = cut_rows(layout, np.diff(query_start_host), seq_lens_host, rows_for)
    return [
        _rows_launch(layout, np.array(pieces, dtype=np.int64), int(query_start_host[0]), block_table)
        for pieces in launches
    ]


def _rows_launch(layout: Layout, pieces: np.ndarray, start: int, block_table: torch.Tensor) -> Launch:
    """One launch of pieces (request, first row, rows, keys of the last row), whose rows follow ``start``."""
    device, (num_requests, table_width) = block_table.device, block_table.shape
    request, first, count, keys = pieces.T
    own = bool((np.diff(request) > 0).all())  # every request is one sequence: the batch's block table serves
    chunks = _chunks(keys)
    most, rows = int(chunks.max()), int(count.sum())
    tiles = -(-count * layout.group // TILE_ROWS)
    per = tiles * (chunks if most > 1 else 1)
    piece = np.repeat(np.arange(len(pieces)), per)
    within = np.arange(int(per.sum())) - np.repeat(np.cumsum(per) - per, per)
    wide = chunks[piece] if most > 1 else np.ones_like(piece)
    sections = dict(
        request=piece,
        tile=within // wide,
        chunk=within % wide,
        o_start=np.concatenate([[0], np.cumsum(count * (chunks if most > 1 else 1))]),
        chunk_keys=np.array([CHUNK_KEYS]),
        total_rows=np.array([rows]),
        merge_start=np.concatenate([[0], np.cumsum(np.repeat(chunks, count))]),
        valid=np.ones(1, dtype=np.int64),
    )
    offsets, size = _pack({name: len(section) for name, section in sections.items()})
    indptr = (np.concatenate([request, [num_requests]]) if own else np.arange(len(pieces) + 1)) * table_width
    last = keys - (np.diff(indptr) - 1) * layout.page_size
    extra = [np.concatenate([[0], np.cumsum(count)]), indptr, last, request]
    packed = np.zeros(size // 4 + sum(len(e) for e in extra), dtype=np.int32)
    for name, section in sections.items():
        packed[offsets[name] // 4 : offsets[name] // 4 + len(section)] = section
    at = size // 4
    for part in extra:
        packed[at : at + len(part)] = part
        at += len(part)
    host = torch.from_numpy(packed)
    if str(device).startswith("cuda"):
        host = host.pin_memory()
    sent = host.to(device, non_blocking=True)
    n = len(pieces)
    qo, kv, pages, index = sent[size // 4 :].split([n + 1, n + 1, n, n])
    plan = _plan_vector(layout, offsets, len(piece), rows, most, False)
    at = start + int(first[0])
    table = None if own else block_table.index_select(0, index)
    return Launch(plan, sent, qo, kv, pages, slice(at, at + rows), table)


def run(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor,
    launches: list[Launch],
    workspace: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Run planned launches.

    Args:
        q: ``[num_tokens, num_heads, d]``, bf16 or fp16.
        k_cache, v_cache: ``[pages, page, kv heads, d]``.
        out: like ``q``, contiguous; mutated.
        block_table: int32 ``[num_reqs, width]``, contiguous; the width they were planned with.
        workspace: uint8, for partial results.

    Raises:
        ValueError: the block table is not contiguous.
    """
    if not block_table.is_contiguous():
        raise ValueError(f"block_table: expected a contiguous tensor, got strides {block_table.stride()}")
    module = kernel(q.dtype, q.shape[2], softcap > 0)
    for launch in launches:
        module.paged_run(
            workspace,
            launch.ints,
            launch.plan,
            q[launch.rows],
            k_cache,
            v_cache,
            launch.qo_indptr,
            launch.kv_indptr,
            (block_table if launch.table is None else launch.table).view(-1),
            launch.last_page_len,
            out[launch.rows],
            None,
            _CAUSAL,
            _NHD,
            -1,
            False,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            None,  # custom mask, ALiBi, multi-item, cache scales
            softcap,
            scale,
            1.0,
            1.0,
            0,
        )
    return out
