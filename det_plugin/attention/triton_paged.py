"""Paged attention in Triton: the canonical order of :mod:`det_plugin.attention.contract`.

One kernel serves prefill and decode.  A tile is ``BLOCK_M`` packed rows, (query, head of the group) in that
order, of one request and one key head.  Requests with few rows run in small tiles, all others in tall ones;
which launch serves a request is decided on the device, from that request alone.  When the tiles do not fill
the GPU, several programs share a tile: each writes the partial results of whole segments, and the last one
to finish folds all of them in order.

Source of the tiling: FlashAttention-2 (Dao, 2023) and Flash-Decoding (Dao et al., 2023); both are run here
with the reduction order pinned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from det_plugin.attention import triton_schedules
from det_plugin.attention.contract import (
    BLOCK_KEYS,
    FINE_KEYS,
    FINE_SEGMENT_KEYS,
    PAGE_MAX,
    PAGE_MULTIPLE,
    SEGMENT_KEYS,
    segment_of,
)

LOG2E = 1.4426950408889634
_ONES = 8  # columns of the block of ones that sums the weights


@triton.jit
def _segment_of(key, FINE: tl.constexpr, FINE_SEGMENT: tl.constexpr, SEGMENT: tl.constexpr):
    """:func:`det_plugin.attention.contract.segment_of`."""
    return tl.where(key < FINE, key // FINE_SEGMENT, FINE // FINE_SEGMENT + (key - FINE) // SEGMENT)


@triton.jit
def _segment_start(number, FINE: tl.constexpr, FINE_SEGMENT: tl.constexpr, SEGMENT: tl.constexpr):
    """:func:`det_plugin.attention.contract.segment_start`."""
    count: tl.constexpr = FINE // FINE_SEGMENT
    return tl.where(number < count, number * FINE_SEGMENT, FINE + (number - count) * SEGMENT)


@triton.jit
def _fold(o, m_all, l_all, acc, m, l, c):  # noqa: E741
    """Fold one segment's (acc, m, l) into (o, m_all, l_all); a masked segment changes nothing."""
    m_new = tl.maximum(m_all, m)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    a = tl.exp2((m_all - m_safe) * c)
    b = tl.exp2((m - m_safe) * c)
    o = tl.fma(o, a[:, None], acc * b[:, None])
    return o, m_new, tl.fma(l_all, a, l * b)


@triton.jit
def _block(
    acc,
    m,
    row_sum,
    q,
    ones,
    n,
    pos,
    lo,
    hi,
    k_base,
    v_base,
    table_base,
    k_stride_b,
    k_stride_n,
    v_stride_b,
    v_stride_n,
    c,
    pre_scale,
    softcap,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One key block: scores, weights, running maximum, both products."""
    key = n + tl.arange(0, BLOCK_N)
    d = tl.arange(0, D_PAD)
    if PAGE % BLOCK_N == 0:
        page = tl.load(table_base + n // PAGE).to(tl.int64)
        k_row = page * k_stride_b + (key % PAGE).to(tl.int64) * k_stride_n
        v_row = page * v_stride_b + (key % PAGE).to(tl.int64) * v_stride_n
    else:
        if MASKED:
            page = tl.load(table_base + key // PAGE, mask=(key >= lo) & (key < hi), other=0).to(tl.int64)
        else:
            page = tl.load(table_base + key // PAGE).to(tl.int64)
        k_row = page * k_stride_b + (key % PAGE).to(tl.int64) * k_stride_n
        v_row = page * v_stride_b + (key % PAGE).to(tl.int64) * v_stride_n
    k_ptrs = k_base + k_row[None, :] + d[:, None]
    v_ptrs = v_base + v_row[:, None] + d[None, :]
    if MASKED:
        live = (key >= lo) & (key < hi)
        if D == D_PAD:
            k = tl.load(k_ptrs, mask=live[None, :], other=0.0)
            v = tl.load(v_ptrs, mask=live[:, None], other=0.0)
        else:
            k = tl.load(k_ptrs, mask=live[None, :] & (d < D)[:, None], other=0.0)
            v = tl.load(v_ptrs, mask=live[:, None] & (d < D)[None, :], other=0.0)
    elif D == D_PAD:
        k = tl.load(k_ptrs)
        v = tl.load(v_ptrs)
    else:
        k = tl.load(k_ptrs, mask=(d < D)[:, None], other=0.0)
        v = tl.load(v_ptrs, mask=(d < D)[None, :], other=0.0)
    s = tl.dot(q, k)
    if SOFTCAP:  # softcap * tanh(x / softcap), tanh(y) = 1 - 2 / (exp(2 y) + 1)
        e = tl.exp2(s * pre_scale)
        s = softcap * (1.0 - 2.0 / (e + 1.0))
    if MASKED:
        visible = key[None, :] <= pos[:, None]
        if WINDOW > 0:
            visible = visible & (key[None, :] > pos[:, None] - WINDOW)
        s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    w = tl.exp2(tl.fma(s, c, (-m_safe * c)[:, None])).to(v.dtype)
    a = tl.exp2((m - m_safe) * c)
    row_sum = tl.dot(w, ones, row_sum * a[:, None])
    acc = tl.dot(w, v, acc * a[:, None])
    return acc, m_new, row_sum


@triton.jit
def _store(o, l_all, out_ptr, token, head, row_ok, stride_t, stride_h, D: tl.constexpr, D_PAD: tl.constexpr):
    d = tl.arange(0, D_PAD)
    y = o / tl.where(l_all == 0.0, 1.0, l_all)[:, None] + 0.0  # + 0.0 turns -0.0 into 0.0
    ptrs = out_ptr + (token * stride_t + head * stride_h)[:, None] + d[None, :]
    tl.store(ptrs, y.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["num_reqs", "num_tiles", "max_segments", "few_rows", "table_stride"])
def _paged_attention_kernel(
    out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    query_start_ptr,
    seq_len_ptr,
    sink_ptr,
    part_acc_ptr,
    part_ml_ptr,
    ticket_ptr,
    num_reqs,
    num_tiles,
    max_segments,
    c,
    pre_scale,
    softcap,
    inv_sink_scale,
    few_rows,
    out_stride_t,
    out_stride_h,
    q_stride_t,
    q_stride_h,
    k_stride_b,
    k_stride_n,
    k_stride_h,
    v_stride_b,
    v_stride_n,
    v_stride_h,
    table_stride,
    GROUP: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT: tl.constexpr,
    FINE: tl.constexpr,
    FINE_SEGMENT: tl.constexpr,
    ONES: tl.constexpr,
    FEW: tl.constexpr,
    SHARED: tl.constexpr,
):
    """FEW: one tile per request, requests of at most ``few_rows`` rows.  Otherwise: the other requests."""
    kv_head = tl.program_id(0) % HK
    tile = num_tiles - 1 - tl.program_id(0) // HK  # the tiles with most keys start first
    if FEW:
        req = tile
        first_row = 0
    else:
        left = 0  # the request whose range of tiles [start * GROUP // BLOCK_M + index, ...) holds this tile
        right = num_reqs
        while right - left > 1:
            mid = (left + right) // 2
            if tl.load(query_start_ptr + mid) * GROUP // BLOCK_M + mid <= tile:
                left = mid
            else:
                right = mid
        req = left
        first_row = (tile - tl.load(query_start_ptr + req) * GROUP // BLOCK_M - req) * BLOCK_M
    q_start = tl.load(query_start_ptr + req)
    q_len = tl.load(query_start_ptr + req + 1) - q_start
    kv_len = tl.load(seq_len_ptr + req)
    rows = q_len * GROUP
    if FEW:
        if (rows == 0) | (rows > few_rows):
            return
    elif (first_row >= rows) | (rows <= few_rows):
        return

    row = first_row + tl.arange(0, BLOCK_M)
    row_ok = row < rows
    token = (q_start + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    context = kv_len - q_len
    pos = context + row // GROUP
    first_pos = context + first_row // GROUP
    last_pos = tl.minimum(kv_len - 1, context + (first_row + BLOCK_M - 1) // GROUP)
    hi = last_pos + 1
    lo = 0
    if WINDOW > 0:
        lo = tl.maximum(0, first_pos - WINDOW + 1)
    seg_lo = _segment_of(lo, FINE, FINE_SEGMENT, SEGMENT)
    segments = _segment_of(hi - 1, FINE, FINE_SEGMENT, SEGMENT) + 1 - seg_lo
    z = tl.program_id(1)
    programs = tl.num_programs(1)
    if SHARED:
        if z >= segments:
            return

    d = tl.arange(0, D_PAD)
    q_ptrs = q_ptr + (token * q_stride_t + head * q_stride_h)[:, None] + d[None, :]
    q = tl.load(q_ptrs, mask=row_ok[:, None] & (d < D)[None, :], other=0.0)
    ones = tl.full((BLOCK_N, ONES), 1.0, q.dtype)
    k_base = k_ptr + kv_head * k_stride_h
    v_base = v_ptr + kv_head * v_stride_h
    table_base = table_ptr + req.to(tl.int64) * table_stride

    o = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    if SINKS:
        m_all = tl.load(sink_ptr + head).to(tl.float32) * inv_sink_scale
        l_all = tl.full((BLOCK_M,), 1.0, tl.float32)
    else:
        m_all = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l_all = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M, ONES), tl.float32)
    begin = lo // BLOCK_N * BLOCK_N

    if SHARED:
        for seg in range(seg_lo + z, seg_lo + segments, programs):
            acc = tl.zeros((BLOCK_M, D_PAD), tl.float32)
            m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            row_sum = tl.zeros((BLOCK_M, ONES), tl.float32)
            seg_begin = tl.maximum(_segment_start(seg, FINE, FINE_SEGMENT, SEGMENT), begin)
            seg_end = tl.minimum(_segment_start(seg + 1, FINE, FINE_SEGMENT, SEGMENT), hi)
            for n in range(seg_begin, seg_end, BLOCK_N):
                acc, m, row_sum = _block(
                    acc,
                    m,
                    row_sum,
                    q,
                    ones,
                    n,
                    pos,
                    lo,
                    hi,
                    k_base,
                    v_base,
                    table_base,
                    k_stride_b,
                    k_stride_n,
                    v_stride_b,
                    v_stride_n,
                    c,
                    pre_scale,
                    softcap,
                    D,
                    D_PAD,
                    BLOCK_N,
                    PAGE,
                    WINDOW,
                    SOFTCAP,
                    True,
                )
            if segments > 1:
                slot = (token * (HK * GROUP) + head) * max_segments + seg
                tl.store(part_acc_ptr + slot[:, None] * D_PAD + d[None, :], acc, mask=row_ok[:, None])
                tl.store(part_ml_ptr + slot * 2, m, mask=row_ok)
                tl.store(part_ml_ptr + slot * 2 + 1, tl.max(row_sum, 1), mask=row_ok)
        if segments == 1:
            o, m_all, l_all = _fold(o, m_all, l_all, acc, m, tl.max(row_sum, 1), c)
            _store(o, l_all, out_ptr, token, head, row_ok, out_stride_t, out_stride_h, D, D_PAD)
        else:
            tl.debug_barrier()  # every store above is issued before the ticket is drawn
            ticket = ticket_ptr + tile * HK + kv_head
            if tl.atomic_add(ticket, 1, sem="acq_rel") == tl.minimum(programs, segments) - 1:
                for first in range(seg_lo, seg_lo + segments, 4):
                    for i in tl.static_range(4):
                        seg = first + i
                        here = row_ok & (tl.zeros_like(row) + seg < seg_lo + segments)
                        slot = (token * (HK * GROUP) + head) * max_segments + seg
                        acc = tl.load(
                            part_acc_ptr + slot[:, None] * D_PAD + d[None, :],
                            mask=here[:, None],
                            other=0.0,
                            cache_modifier=".cg",
                        )
                        m = tl.load(part_ml_ptr + slot * 2, mask=here, other=float("-inf"), cache_modifier=".cg")
                        l_seg = tl.load(part_ml_ptr + slot * 2 + 1, mask=here, other=0.0, cache_modifier=".cg")
                        o, m_all, l_all = _fold(o, m_all, l_all, acc, m, l_seg, c)
                _store(o, l_all, out_ptr, token, head, row_ok, out_stride_t, out_stride_h, D, D_PAD)
                tl.store(ticket, 0)  # ready for the next launch
    else:
        unmasked_end = begin
        if WINDOW == 0:
            unmasked_end = (first_pos + 1) // BLOCK_N * BLOCK_N
        for masked in tl.static_range(2):  # the blocks that every row sees whole, then the others
            for n in range(unmasked_end if masked else begin, hi if masked else unmasked_end, BLOCK_N):
                acc, m, row_sum = _block(
                    acc,
                    m,
                    row_sum,
                    q,
                    ones,
                    n,
                    pos,
                    lo,
                    hi,
                    k_base,
                    v_base,
                    table_base,
                    k_stride_b,
                    k_stride_n,
                    v_stride_b,
                    v_stride_n,
                    c,
                    pre_scale,
                    softcap,
                    D,
                    D_PAD,
                    BLOCK_N,
                    PAGE,
                    WINDOW,
                    SOFTCAP,
                    masked == 1,
                )
                if (n + BLOCK_N) % tl.where(n < FINE, FINE_SEGMENT, SEGMENT) == 0:
                    o, m_all, l_all = _fold(o, m_all, l_all, acc, m, tl.max(row_sum, 1), c)
                    acc = tl.zeros((BLOCK_M, D_PAD), tl.float32)
                    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
                    row_sum = tl.zeros((BLOCK_M, ONES), tl.float32)
        o, m_all, l_all = _fold(o, m_all, l_all, acc, m, tl.max(row_sum, 1), c)
        _store(o, l_all, out_ptr, token, head, row_ok, out_stride_t, out_stride_h, D, D_PAD)


@dataclass(frozen=True)
class Workspace:
    """Scratch memory of :func:`paged_attention`, shared by all layers that run one after another.

    Attributes:
        max_segments: segments of the longest context it serves.
        max_tokens: query tokens of the largest batch whose tiles may be shared by several programs.
        acc: fp32 ``[max_tokens, num_heads, max_segments, padded head dim]``, partial accumulators.
        ml: fp32 ``[max_tokens, num_heads, max_segments, 2]``, partial maxima and sums.
        tickets: int32, one per tile, zero between launches.
    """

    max_segments: int
    max_tokens: int
    acc: torch.Tensor
    ml: torch.Tensor
    tickets: torch.Tensor


def make_workspace(
    num_heads: int, head_dim: int, max_context: int, device: torch.device | str, max_bytes: int = 192 << 20
) -> Workspace:
    """Allocate scratch memory for contexts of up to ``max_context`` keys, at most about ``max_bytes``."""
    segments = segment_of(max(1, max_context) - 1) + 1
    width = triton.next_power_of_2(head_dim)
    per_token = num_heads * segments * (width + 2) * 4
    tokens = max(1, max_bytes // per_token)
    tokens = min(tokens, triton_schedules.SPLIT_MAX_TOKENS)
    empty = lambda *shape: torch.empty(shape, dtype=torch.float32, device=device)
    return Workspace(
        segments,
        tokens,
        empty(tokens, num_heads, segments, width),
        empty(tokens, num_heads, segments, 2),
        torch.zeros(2 * tokens * num_heads + num_heads, dtype=torch.int32, device=device),
    )


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_query_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    schedules: triton_schedules.Schedules | None = None,
) -> torch.Tensor:
    """Causal attention of a batch of requests over a paged KV cache, in the canonical order.

    Args:
        q: ``[num_tokens, num_heads, head_dim]``, bf16 or fp16; the last dimension is dense.
        k_cache, v_cache: ``[num_pages, page_size, num_kv_heads, head_dim]``, any strides, dense last dimension.
        out: like ``q``; mutated.  Rows of no request are left alone.
        block_table: int32 ``[num_reqs, pages]``.
        query_start_loc: int32 ``[num_reqs + 1]``, not decreasing, starts with 0.
        seq_lens: int32 ``[num_reqs]``, keys of each request, its new tokens included.
        max_query_len: upper bound of the query lengths; only decides what is launched.
        scale: factor of the scores, positive.
        window: visible keys per row, the row's own included; 0 for all.
        softcap: 0.0 for none.
        sinks: ``[num_heads]``, logit of each head's sink, or None.
        workspace: from :func:`make_workspace`; without it every tile is one program.
        schedules: tile shapes; the default comes from :mod:`det_plugin.attention.triton_schedules`.

    Nothing is read back to the host, and the launches depend on shapes and ``max_query_len`` only, so the call
    can be captured into a CUDA graph.

    Raises:
        ValueError: a shape, stride or dtype does not fit.
    """
    tokens, heads, head_dim = q.shape
    reqs = seq_lens.shape[0]
    page, kv_heads = k_cache.shape[1], k_cache.shape[2]
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == k_cache.dtype == v_cache.dtype == out.dtype:
        raise ValueError(
            f"dtypes: expected bfloat16 or float16 throughout, got q {q.dtype}, k_cache {k_cache.dtype}, "
            f"v_cache {v_cache.dtype}, out {out.dtype}"
        )
    if heads % kv_heads or k_cache.shape[3] != head_dim or v_cache.shape != k_cache.shape or out.shape != q.shape:
        raise ValueError(
            f"shapes: got q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}, "
            f"out {tuple(out.shape)}; expected [tokens, heads, d] and [pages, page, kv heads, d]"
        )
    if page % PAGE_MULTIPLE or page > PAGE_MAX:
        raise ValueError(f"page size: expected a multiple of {PAGE_MULTIPLE} up to {PAGE_MAX}, got {page}")
    if not scale > 0:
        raise ValueError(f"scale: expected a positive number, got {scale}")
    if not q.stride(2) == k_cache.stride(3) == v_cache.stride(3) == out.stride(2) == 1:
        raise ValueError("strides: expected a dense last dimension of q, k_cache, v_cache and out")
    if query_start_loc.shape[0] != reqs + 1 or block_table.shape[0] < reqs:
        raise ValueError(
            f"query_start_loc: expected [{reqs + 1}] and block_table [{reqs}, pages], got "
            f"{tuple(query_start_loc.shape)} and {tuple(block_table.shape)}"
        )
    if tokens == 0 or reqs == 0:
        return out
    group = heads // kv_heads
    plan = schedules or triton_schedules.default_schedules(head_dim, group, page)
    small = plan.scarce if reqs * kv_heads <= triton_schedules.SCARCE_TILES else plan.few
    launches = [(True, small)] if group <= small.block_m else []
    if not launches or max_query_len * group > plan.few.block_m:
        launches.append((False, plan.many))
    c = LOG2E if softcap else scale * LOG2E
    for few, schedule in launches:
        tiles = reqs if few else tokens * group // schedule.block_m + reqs
        split = 1
        if workspace is not None and tokens <= workspace.max_tokens:
            split = schedule.split(tiles * kv_heads, workspace.max_segments)
            if tiles * kv_heads > workspace.tickets.shape[0]:
                split = 1
        scratch, segments = (out, out, seq_lens), 1
        if workspace is not None and split > 1:
            scratch, segments = (workspace.acc, workspace.ml, workspace.tickets), workspace.max_segments
        _paged_attention_kernel[(tiles * kv_heads, split)](
            out,
            q,
            k_cache,
            v_cache,
            block_table,
            query_start_loc,
            seq_lens,
            q if sinks is None else sinks,
            *scratch,
            reqs,
            tiles,
            segments,
            c,
            2.0 * LOG2E * scale / softcap if softcap else 0.0,
            softcap,
            1.0 if softcap else 1.0 / scale,
            plan.few.block_m if group <= plan.few.block_m else 0,
            out.stride(0),
            out.stride(1),
            q.stride(0),
            q.stride(1),
            k_cache.stride(0),
            k_cache.stride(1),
            k_cache.stride(2),
            v_cache.stride(0),
            v_cache.stride(1),
            v_cache.stride(2),
            block_table.stride(0),
            GROUP=group,
            HK=kv_heads,
            D=head_dim,
            D_PAD=triton.next_power_of_2(head_dim),
            PAGE=page,
            WINDOW=window,
            SOFTCAP=softcap > 0,
            SINKS=sinks is not None,
            BLOCK_M=schedule.block_m,
            BLOCK_N=BLOCK_KEYS,
            SEGMENT=SEGMENT_KEYS,
            FINE=FINE_KEYS,
            FINE_SEGMENT=FINE_SEGMENT_KEYS,
            ONES=_ONES,
            FEW=few,
            SHARED=split > 1,
            num_warps=schedule.num_warps,
            num_stages=schedule.num_stages,
            enable_fp_fusion=False,
        )
    return out
