"""FlashInfer's FA2 prefill kernel under a plan of our own, for prefill and decode alike.

FlashInfer's planner picks the query tile from the batch's average length and, under a CUDA graph, the split
of the keys from its size.  Here the plan is computed without it:

1. The query tile has :data:`TILE_ROWS` packed rows for every batch, so key tiles, warp layout and row sums are
   those of one kernel instance.
2. Keys are cut at multiples of :data:`CHUNK_KEYS` from position 0.  Each chunk's result is rounded to the
   model's dtype and merged upwards by FlashInfer's own merge kernel; chunks that a row does not see weigh
   zero and change nothing.
3. Under a CUDA graph the plan is computed on the device, and entries beyond the real ones are marked invalid.

Source: Ye et al., FlashInfer (2025); plan layout read in 0.7.0.post1 (``attention/scheduler.cuh``).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

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


@dataclass(frozen=True)
class Layout:
    """Heads of this rank, and the page size in keys."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def partial_bytes(self, rows: int, chunks: int) -> int:
        """Bytes of the partial results of ``rows`` query rows."""
        return rows * chunks * self.num_heads * (self.head_dim * 2 + 4) + 256


@dataclass
class Launch:
    """One call of the kernel over consecutive rows, at most one sequence per request."""

    plan: list[int]
    ints: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    last_page_len: torch.Tensor
    rows: slice


@dataclass(frozen=True)
class Buffers:
    """What captured launches read: the packed plan (uint8), page counts and starts (int32)."""

    plan: torch.Tensor
    last_page_len: torch.Tensor
    kv_indptr: torch.Tensor


def make_buffers(max_reqs: int, max_context: int, device: torch.device | str) -> Buffers:
    """Buffers for batches of up to ``max_reqs`` single rows with contexts of up to ``max_context`` keys."""
    entries = max_reqs * int(max(1, _chunks(max_context)))
    _, size = _pack(
        dict(
            request=entries,
            tile=entries,
            chunk=entries,
            o_start=max_reqs + 1,
            chunk_keys=1,
            total_rows=1,
            merge_start=max_reqs + 1,
            valid=entries,
        )
    )
    zeros = lambda n, dtype: torch.zeros(n, dtype=dtype, device=device)
    return Buffers(zeros(size + 128, torch.uint8), zeros(max_reqs, torch.int32), zeros(max_reqs + 1, torch.int32))


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
    offsets, size = _pack(
        dict(
            request=entries,
            tile=entries,
            chunk=entries,
            o_start=reqs + 1,
            chunk_keys=1,
            total_rows=1,
            merge_start=reqs + 1,
            valid=entries,
        )
    )
    ints = torch.zeros(size, dtype=torch.uint8, device=device) if buffers is None else buffers.plan[:size]
    view = lambda name, count: ints[offsets[name] : offsets[name] + 4 * count].view(torch.int32)
    live = query_start_loc[1:] > query_start_loc[:-1]
    count = torch.where(live, _chunks(seq_lens).clamp(min=1), 0).to(torch.int32)
    number = torch.arange(chunks, dtype=torch.int32, device=device)
    request = torch.arange(reqs, dtype=torch.int32, device=device)
    view("request", entries).copy_(request[:, None].expand(reqs, chunks).reshape(-1))
    view("tile", entries).zero_()
    view("chunk", entries).copy_(number[None, :].expand(reqs, chunks).reshape(-1))
    ints[offsets["valid"] : offsets["valid"] + entries].copy_((number[None, :] < count[:, None]).reshape(-1))
    for name in ("o_start", "merge_start"):
        starts = view(name, reqs + 1)
        starts[:1].zero_()
        starts[1:].copy_(torch.cumsum(count, 0))
    if chunks == 1:
        view("o_start", reqs + 1).copy_(query_start_loc)
    view("chunk_keys", 1).fill_(CHUNK_KEYS)
    view("total_rows", 1).copy_(query_start_loc[-1:])
    # each request owns one row of the block table; its length is (width - 1) pages plus this
    last = seq_lens - (table_width - 1) * layout.page_size
    kv_indptr = torch.arange(reqs + 1, dtype=torch.int32, device=device) * table_width
    if buffers is not None:
        last = buffers.last_page_len[:reqs].copy_(last)
        kv_indptr = buffers.kv_indptr[: reqs + 1].copy_(kv_indptr)
    plan = _plan_vector(layout, offsets, entries, reqs, chunks, True)
    return [Launch(plan, ints, query_start_loc, kv_indptr, last, slice(None))]


def plan_rows(
    layout: Layout,
    query_start_host: np.ndarray,
    seq_lens_host: np.ndarray,
    table_width: int,
    device: torch.device | str,
    workspace_bytes: int,
) -> list[Launch]:
    """Launches of any batch whose lengths are known on the host; cut where partial results would overflow.

    Args:
        query_start_host, seq_lens_host: int ``[num_reqs + 1]`` and ``[num_reqs]``, exact.
    """
    groups: list[list[tuple[int, int, int, int]]] = [[]]  # (request, first row, rows, keys of the last row)
    rows = chunks = 0
    lengths = seq_lens_host.tolist()
    for r, (at, end) in enumerate(zip(query_start_host[:-1].tolist(), query_start_host[1:].tolist(), strict=True)):
        row = at
        while row < end:
            most = max(chunks, int(_chunks(lengths[r])))
            room = workspace_bytes // layout.partial_bytes(1, most) - rows if most > 1 else end - row
            take = min(end - row, int(room))
            if take <= 0 or (take < end - row and groups[-1]):
                if not groups[-1]:
                    raise ConfigError(
                        f"FlashInfer workspace: {workspace_bytes} bytes hold no row of {lengths[r]} "
                        "tokens; raise VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE"
                    )
                groups.append([])
                rows = chunks = 0
                continue
            groups[-1].append((r, row, take, lengths[r] - (end - row) + take))
            rows, chunks, row = rows + take, most, row + take
            if row < end:
                groups.append([])
                rows = chunks = 0
    return [
        _rows_launch(layout, np.array(g, dtype=np.int64), table_width, len(seq_lens_host), device) for g in groups if g
    ]


def _rows_launch(layout, pieces, table_width, num_requests, device) -> Launch:
    """One launch of pieces (request, first row, rows, keys of the last row)."""
    request, first, count, keys = pieces.T
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
    indptr = np.concatenate([request, [num_requests]]) * table_width
    last = keys - (np.diff(indptr) - 1) * layout.page_size
    extra = [np.concatenate([[0], np.cumsum(count)]), indptr, last]
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
    qo, kv, pages = sent[size // 4 :].split([n + 1, n + 1, n])
    plan = _plan_vector(layout, offsets, len(piece), rows, most, False)
    return Launch(plan, sent, qo, kv, pages, slice(int(first[0]), int(first[0]) + rows))


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
            block_table.view(-1),
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
