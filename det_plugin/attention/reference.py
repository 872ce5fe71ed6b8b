"""Attention in plain torch: a float64 reference, and the canonical order step by step."""

from __future__ import annotations

import math

import torch

from det_plugin.attention.contract import BLOCK_KEYS, segment_of, segment_start


def gather_pages(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """Keys or values of one request: ``cache`` [pages, page, kv heads, d] -> [length, kv heads, d]."""
    page = cache.shape[1]
    index = pages[: -(-length // page)].long()
    return cache[index].reshape(-1, *cache.shape[2:])[:length]


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one request in float64.

    Args:
        q: ``[query_len, num_heads, d]``, the last ``query_len`` positions of the request.
        k, v: ``[length, num_kv_heads, d]``.

    Returns:
        float64 ``[query_len, num_heads, d]``.
    """
    rows, heads, _ = q.shape
    length, kv_heads, _ = k.shape
    kk = k.double().repeat_interleave(heads // kv_heads, 1)
    vv = v.double().repeat_interleave(heads // kv_heads, 1)
    s = torch.einsum("qhd,khd->hqk", q.double(), kk) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    pos = torch.arange(length - rows, length, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)[None, :]
    visible = key <= pos
    if window:
        visible &= key > pos - window
    s = s.masked_fill(~visible, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double()[:, None, None].expand(heads, rows, 1)], -1)
    w = torch.softmax(s, -1)[..., :length]
    return torch.einsum("hqk,khd->qhd", w, vv)


def attention_in_order(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The canonical order in fp32 torch, arguments as in :func:`attention_reference`.

    Blocks, segments, maxima and folds are those of the contract.  The sums inside one product and ``exp2``
    are torch's, so results agree with a kernel's to rounding, not bit for bit.
    """
    rows, heads, dim = q.shape
    length, kv_heads, _ = k.shape
    kk = k.float().repeat_interleave(heads // kv_heads, 1)
    vv = v.float().repeat_interleave(heads // kv_heads, 1)
    c = math.log2(math.e) * (1.0 if softcap else scale)
    pos = torch.arange(length - rows, length, device=q.device)

    def safe(m):
        return torch.where(m == -math.inf, torch.zeros_like(m), m)

    big_m = torch.full((heads, rows), -math.inf, device=q.device)
    big_l = torch.zeros(heads, rows, device=q.device)
    if sinks is not None:
        big_m = (sinks.float() * (1.0 if softcap else 1.0 / scale))[:, None].expand(heads, rows).contiguous()
        big_l = torch.ones(heads, rows, device=q.device)
    o = torch.zeros(heads, rows, dim, device=q.device)
    for seg in range(segment_of(length - 1) + 1):
        acc = torch.zeros_like(o)
        m = torch.full_like(big_m, -math.inf)
        total = torch.zeros_like(big_m)
        for n in range(segment_start(seg), min(segment_start(seg + 1), length), BLOCK_KEYS):
            key = torch.arange(n, min(n + BLOCK_KEYS, length), device=q.device)
            s = torch.einsum("qhd,khd->hqk", q.float(), kk[key])
            if softcap:
                s = softcap * torch.tanh(s * scale / softcap)
            visible = key[None, :] <= pos[:, None]
            if window:
                visible &= key[None, :] > pos[:, None] - window
            s = s.masked_fill(~visible, -math.inf)
            m_new = torch.maximum(m, s.amax(-1))
            w = torch.exp2(s * c - (safe(m_new) * c)[..., None]).to(v.dtype).float()
            a = torch.exp2((m - safe(m_new)) * c)
            total = total * a + w.sum(-1)
            acc = acc * a[..., None] + torch.einsum("hqk,khd->hqd", w, vv[key])
            m = m_new
        m_new = torch.maximum(big_m, m)
        a = torch.exp2((big_m - safe(m_new)) * c)
        b = torch.exp2((m - safe(m_new)) * c)
        o = o * a[..., None] + acc * b[..., None]
        big_l = big_l * a + total * b
        big_m = m_new
    return (o / big_l[..., None] + 0.0).transpose(0, 1).to(q.dtype)
