"""FlashAttention 3 with its reduction order pinned to the row's position.

The vendor kernel picks tile, mask template and number of splits from batch-wide numbers.  Here they follow
from the layer and from the row's own position ``p``:

1. Key blocks have ``block_keys`` keys (the kernel's kBlockN for a causal mask), aligned to position 0 and
   walked downwards.
2. A row sees ``n = p // block_keys + 1`` blocks.  Up to ``unsplit_blocks`` they are walked in one go; more are cut
   into ``ceil(n / split_blocks)`` splits of equal length, and the splits' fp32 partial results are combined upwards
   by the vendor's combine kernel.
3. Rows whose number of blocks differs do not share a tile once they are split: a chunk of a prompt is handed
   to the kernel as several sequences, cut at multiples of ``block_keys``.

So the number of splits is a property of the row, not of the batch, and long contexts still fill the GPU.
``max_seqlen_q`` is passed as a constant (it selects the tile), and scheduler metadata is the vendor's with
the split counts overwritten.  Sliding windows and sinks are not offered: this kernel aligns the blocks of a
window to the tile's first row, and adds a sink once per split.

Source: Shah et al., FlashAttention-3 (2024); kernel as built into vLLM 0.32 (``_vllm_fa3_C``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from det_plugin.errors import UnsupportedError

SPLIT_KEYS = 2048
"""Keys per split, at most."""

UNSPLIT_KEYS = 3072
"""Contexts up to here are not split.  Splits cost prefill a pass through memory, and their absence costs the decoding
of very few requests parallel work; above this length both are worth it (docs/performance.md)."""

MAX_SEQUENCES = 992
"""Sequences per launch: the vendor's kernel drops splits above this."""

MAX_SPLITS = 255
_WIDE = 16384  # max_seqlen_q that selects the tall tile for every supported head size and group
_LENGTH_SLACK = 1024  # a step scheduled ahead may run past the longest context
_PARTIAL_BYTES = 512 << 20  # fp32 partial results of one launch, at most


@dataclass(frozen=True)
class Layout:
    """What the kernel is specialised for: ``page_size`` in keys; ``dtype`` is a torch dtype."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype

    @property
    def block_keys(self) -> int:
        """Keys per block of the kernel's causal template (hopper/tile_size.h)."""
        return 128 if self.head_dim <= 128 else 96 if self.head_dim <= 192 else 80

    @property
    def split_blocks(self) -> int:
        return SPLIT_KEYS // self.block_keys

    @property
    def unsplit_blocks(self) -> int:
        return UNSPLIT_KEYS // self.block_keys

    @property
    def unsplit_keys(self) -> int:
        """Keys of the longest context that is not split."""
        return self.unsplit_blocks * self.block_keys

    @property
    def decode_max_query(self) -> int:
        """max_seqlen_q of a launch of single rows.  At head size 128 the 64-row tile has the bits of the tall
        one, and the mask stays causal; at every other size the two differ, or there is only one."""
        return 1 if self.head_dim == 128 else _WIDE

    def splits(self, length):
        """Splits of a row that sees ``length`` keys; int, numpy array or tensor; 1 for an empty row."""
        blocks = (length + self.block_keys - 1) // self.block_keys
        count = (blocks + self.split_blocks - 1) // self.split_blocks
        if isinstance(count, torch.Tensor):
            return torch.where(blocks > self.unsplit_blocks, count, 1)
        return np.where(blocks > self.unsplit_blocks, count, 1)


@dataclass
class Launch:
    """One call of the kernel: ``len(seqused_k)`` sequences that start at ``cu_seqlens_q`` within ``rows``.

    ``requests`` or ``kv_batch_idx`` says which rows of the block table they use; with ``seqused_q``, a
    sequence ends before the next one starts.
    """

    cu_seqlens_q: torch.Tensor
    seqused_k: torch.Tensor
    max_query: int
    num_splits: int
    metadata: torch.Tensor
    rows: slice
    requests: slice | None = None
    kv_batch_idx: torch.Tensor | None = None
    seqused_q: torch.Tensor | None = None


def load() -> None:
    """Make the vendor's operators available without importing vLLM.

    Raises:
        UnsupportedError: vLLM's FlashAttention 3 library is missing or does not load.
    """
    if hasattr(torch.ops._vllm_fa3_C, "fwd"):
        return
    import importlib.util
    import pathlib

    spec = importlib.util.find_spec("vllm")
    found: list[pathlib.Path] = []
    for place in (spec.submodule_search_locations or []) if spec else []:
        found += sorted(pathlib.Path(place, "vllm_flash_attn").glob("_vllm_fa3_C*.so"))
    try:
        torch.ops.load_library(str(found[0]))
    except (IndexError, OSError) as error:
        raise UnsupportedError(
            "the fa3 attention backend",
            f"FlashAttention 3 is not available ({error!r})",
            "choose --attention-backend TRITON_ATTN",
        ) from None


@functools.cache
def _splits_by_length(layout: Layout, longest: int, device: torch.device) -> torch.Tensor:
    """int32 ``[longest + slack]``: splits of a row by the keys it sees; a look-up in place of seven kernels a step."""
    return layout.splits(torch.arange(longest + _LENGTH_SLACK, dtype=torch.int32, device=device))


def _metadata(
    layout: Layout, cu_seqlens_q, seqused_k, max_query, max_context, num_splits, seqused_q=None
) -> torch.Tensor:
    """The vendor's scheduler metadata; with splits, its counts replaced by the rows' own."""
    count = seqused_k.shape[0]
    metadata = torch.ops._vllm_fa3_C.get_scheduler_metadata(
        count,
        max_query,
        max_context,
        layout.num_heads,
        layout.num_kv_heads,
        layout.head_dim,
        layout.head_dim,
        layout.dtype,
        seqused_k,
        cu_seqlens_q,
        None,
        None,
        seqused_q,
        None,
        layout.page_size,
        0,
        True,
        -1,
        -1,
        False,
        num_splits,
        None,
        0,
    )
    if num_splits > 1:  # [rows per sequence | splits | heads in L2 | tile counter], each padded to 4
        start = -(-count // 4) * 4
        table = _splits_by_length(layout, 1 << max_context.bit_length(), seqused_k.device)
        torch.index_select(table, 0, seqused_k, out=metadata[start : start + count])
    return metadata


def _bound(layout: Layout, length: int) -> int:
    count = int(layout.splits(length))
    if count > MAX_SPLITS:
        limit = MAX_SPLITS * layout.split_blocks * layout.block_keys
        raise UnsupportedError(
            f"a context of {length} tokens with the fa3 attention backend",
            f"proven up to {limit}",
            "choose --attention-backend TRITON_ATTN",
        )
    return count


def plan_decode(
    layout: Layout,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_context: int,
    buffers: Sequence[torch.Tensor] | None = None,
) -> list[Launch]:
    """Launches of a batch of single rows, one per request.

    Only shapes and ``max_context`` decide what is launched; counts are computed on the device, so with
    ``buffers`` (int32, one per 992 requests, 4 * 992 + 4 long) the launches can be replayed in a CUDA graph
    after calling this again on new contents.
    """
    launches = []
    splits = _bound(layout, max_context)
    for number, start in enumerate(range(0, seq_lens.shape[0], MAX_SEQUENCES)):
        end = min(start + MAX_SEQUENCES, seq_lens.shape[0])
        rows, used = query_start_loc[start : end + 1], seq_lens[start:end]
        metadata = _metadata(layout, rows, used, layout.decode_max_query, max_context, splits)
        if buffers is not None:
            size = metadata.shape[0]
            buffers[number][:size].copy_(metadata)
            metadata = buffers[number][:size]
        launches.append(Launch(rows, used, layout.decode_max_query, splits, metadata, slice(None), slice(start, end)))
    return launches


def cut_rows(layout: Layout, query_lens: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    """Cut requests into sequences whose rows all have one number of splits and, if split, one of blocks.

    Args:
        query_lens, seq_lens: int ``[num_reqs]``, exact.

    Returns:
        int64 ``[sequences, 3]``: request, rows, keys seen by the last row.
    """
    step, whole = layout.block_keys, layout.unsplit_keys
    pieces = []
    for request, (rows, length) in enumerate(zip(query_lens.tolist(), seq_lens.tolist(), strict=True)):
        at = length - rows
        while at < length:
            end = min(length, whole if at < whole else (at // step + 1) * step)
            pieces.append((request, end - at, end))
            at = end
    return np.array(pieces, dtype=np.int64).reshape(-1, 3)


def plan_rows(
    layout: Layout,
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    max_context: int,
    device: torch.device | str,
    first_row: int = 0,
    first_request: int = 0,
) -> list[Launch]:
    """Launches of any batch whose lengths are known on the host.  Not for CUDA graphs.

    Args:
        query_lens, seq_lens: as in :func:`cut_rows`, of requests ``first_request`` and following, whose rows
            start at ``first_row``.
    """
    pieces = cut_rows(layout, query_lens, seq_lens)
    starts = first_row + np.cumsum(pieces[:, 1]) - pieces[:, 1]
    splits = layout.splits(pieces[:, 2])
    per_row = layout.num_heads * layout.head_dim * 4
    groups: list[tuple[list[int], int]] = []
    for chosen, limit in ((splits == 1, None), (splits > 1, _PARTIAL_BYTES)):
        group: list[int] = []
        most = 1
        for i in np.flatnonzero(chosen).tolist():
            most_new = max(most, int(splits[i]))
            span = int(starts[i] + pieces[i, 1] - starts[group[0] if group else i])
            if group and (len(group) == MAX_SEQUENCES or (limit and span * most_new * per_row > limit)):
                groups.append((group, most))
                group, most_new = [], int(splits[i])
            group.append(i)
            most = most_new
        if group:
            groups.append((group, most))
    return [_rows_launch(layout, pieces[g], starts[g], most, max_context, device, first_request) for g, most in groups]


def _rows_launch(layout, pieces, starts, splits, max_context, device, first_request) -> Launch:
    """One launch of pieces (request, rows, keys) that start at ``starts``; upload and metadata."""
    _bound(layout, int(pieces[:, 2].max()))
    count, first, end = len(pieces), int(starts[0]), int(starts[-1] + pieces[-1, 1])
    packed = np.concatenate(
        [starts - first, [end - first], pieces[:, 1], pieces[:, 2], pieces[:, 0] + first_request]
    ).astype(np.int32)
    host = torch.from_numpy(packed)
    if str(device).startswith("cuda"):
        host = host.pin_memory()
    rows, used_q, used_k, index = host.to(device, non_blocking=True).split([count + 1, count, count, count])
    max_query = _WIDE if splits == 1 else layout.block_keys  # both select the tall tile
    metadata = _metadata(layout, rows, used_k, max_query, max_context, splits, used_q)
    return Launch(rows, used_k, max_query, splits, metadata, slice(first, end), None, index, used_q)


def plan_batch(
    layout: Layout,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_host: np.ndarray,
    seq_lens_host: np.ndarray,
    max_context: int,
) -> list[Launch]:
    """Launches of a mixed batch; requests with one row that come first are planned as single rows.

    Args:
        query_start_loc, seq_lens: int32 on the device, ``[num_reqs + 1]`` and ``[num_reqs]``.
        query_start_host, seq_lens_host: the same on the host; lengths of requests with several rows are exact,
            those of single rows may be upper bounds.
        max_context: longest context that the block table can hold.
    """
    query_lens = np.diff(query_start_host)
    lengths = seq_lens_host[: len(query_lens)].astype(np.int64)
    if not len(query_lens):
        return []
    if (query_lens == 1).all():
        return plan_decode(layout, query_start_loc, seq_lens, max(1, int(lengths.max())))
    single = int(np.argmin(query_lens == 1))
    if lengths.max() <= layout.unsplit_keys:
        single = 0  # nothing is split: one launch of whole requests
    launches = []
    if single:
        launches = plan_decode(
            layout, query_start_loc[: single + 1], seq_lens[:single], max(1, int(lengths[:single].max()))
        )
        for launch in launches:
            launch.rows = slice(0, single)
    return launches + plan_rows(
        layout,
        query_lens[single:],
        lengths[single:],
        max_context,
        seq_lens.device,
        int(query_start_host[single]),
        single,
    )


def run(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor,
    launches: Sequence[Launch],
    max_context: int,
    *,
    scale: float,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Run planned launches.

    Args:
        q: ``[num_tokens, num_heads, d]``, bf16 or fp16.
        k_cache, v_cache: ``[pages, page, kv heads, d]``.
        out: like ``q``; mutated.
        block_table: int32 ``[num_reqs, pages]``.
        launches: from :func:`plan_decode` and :func:`plan_rows`.
        max_context: the value they were planned with.
    """
    for launch in launches:
        table = block_table if launch.requests is None else block_table[launch.requests]
        torch.ops._vllm_fa3_C.fwd(
            q[launch.rows],
            k_cache,
            v_cache,
            None,
            None,
            None,  # new keys, new values, second query
            out[launch.rows],
            launch.cu_seqlens_q,
            None,
            None,  # cu_seqlens_k, cu_seqlens_k_new
            launch.seqused_q,
            launch.seqused_k,
            launch.max_query,
            max_context,
            table,
            launch.kv_batch_idx,
            None,
            None,
            None,
            None,
            None,
            None,
            None,  # left padding, rotary tables, scales of a quantised cache
            scale,
            True,
            -1,
            -1,
            softcap,
            True,
            launch.metadata,
            launch.num_splits,
            None,
            0,
            None,
            1,
            0,
            None,  # pack_gqa, SM margin, sinks, context parallelism
        )
    return out
