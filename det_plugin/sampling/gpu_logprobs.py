"""Logprobs on the GPU: the definition of :mod:`det_plugin.sampling.cpu`, for chosen ids of each row.

Contract.  ``logprob = fp32(fp64(logit) - lse)``, ``lse = max + ln(sum of exp)`` in fp64, the sum in fixed point
with 40 fraction bits, exact in any order; so a token scored in prefill gets the bits it got in decode.  The top
k are ordered by (logit descending, id ascending): a larger k only appends.  Nothing depends on the number of
rows, on the dtype that carries equal logits, or on what a neighbour asked for.
"""

from __future__ import annotations

import torch

from det_plugin.ops._triton import cdiv, next_power_of_2, require_kernel_device, tl, triton
from det_plugin.sampling._kernels import LOG2_E, weight

SEGMENT = 4096


@triton.jit
def _segment_max_kernel(logits_ptr, row_stride, vocab, top_ptr, BLOCK: tl.constexpr):
    segment = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token = segment * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    tl.store(top_ptr + row * tl.num_programs(0) + segment, tl.max(x, axis=0))


@triton.jit
def _segment_mass_kernel(
    logits_ptr, row_stride, vocab, tokens_ptr, top_ptr, mass_ptr, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Weight of one segment, and how many of its logits are at least the row's own token's."""
    segment = tl.program_id(0)
    segments = tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    part = tl.arange(0, SEGMENTS)
    top = tl.max(tl.load(top_ptr + row * segments + part, mask=part < segments, other=float("-inf")), axis=0)
    row_ptr = logits_ptr + row * row_stride
    own = tl.load(row_ptr + tl.load(tokens_ptr + row)).to(tl.float32)
    token = segment * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    x = tl.load(row_ptr + token, mask=inside, other=float("-inf")).to(tl.float32)
    out = mass_ptr + (row * segments + segment) * 2
    tl.store(out, tl.sum(weight((x - top) * LOG2_E), axis=0))
    tl.store(out + 1, tl.sum((inside & (x >= own)).to(tl.int32), axis=0).to(tl.int64))


@triton.jit
def _score_kernel(
    logits_ptr, row_stride, columns_ptr, columns_stride, num_columns, top_ptr, mass_ptr, segments, score_ptr,
    rank_ptr, SEGMENTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SEGMENTS)
    mask = part < segments
    top = tl.max(tl.load(top_ptr + row * segments + part, mask=mask, other=float("-inf")), axis=0)
    mass = mass_ptr + (row * segments + part) * 2
    total = tl.sum(tl.load(mass, mask=mask, other=0), axis=0)
    lse = top.to(tl.float64)
    if (top > float("-inf")) & (top < float("inf")):
        lse += tl.log(total.to(tl.float64) * 9.094947017729282e-13)
    tl.store(rank_ptr + row, tl.sum(tl.load(mass + 1, mask=mask, other=0), axis=0))
    for start in range(0, num_columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < num_columns
        token = tl.load(columns_ptr + row * columns_stride + column, mask=inside, other=0)
        x = tl.load(logits_ptr + row * row_stride + token, mask=inside, other=0.0).to(tl.float64)
        tl.store(score_ptr + row * num_columns + column, (x - lse).to(tl.float32), mask=inside)


@triton.jit
def _collect_kernel(logits_ptr, row_stride, vocab, limit_ptr, k, ids_ptr, BLOCK: tl.constexpr):
    """Ids, ascending, of the k first tokens in order, given the k-th largest logit."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    limit = tl.load(limit_ptr + row).to(tl.float32)
    above = 0
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        above += tl.sum(((x > limit) & (token < vocab)).to(tl.int32), axis=0)
    quota = k - above
    written = 0
    ties = 0
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        equal = (x == limit) & (token < vocab)
        keep = (x > limit) & (token < vocab)
        if tl.sum((keep | equal).to(tl.int32), axis=0) > 0:
            keep = keep | (equal & (ties + tl.cumsum(equal.to(tl.int32), axis=0) <= quota))
            ties += tl.sum(equal.to(tl.int32), axis=0)
            place = written + tl.cumsum(keep.to(tl.int32), axis=0) - 1
            tl.store(ids_ptr + row * k + place, token.to(tl.int64), mask=keep)
            written += tl.sum(keep.to(tl.int32), axis=0)


def top_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    """int64 [R, k]: the k first ids of each row by (logit descending, id ascending).  ``logits``: [R, V]."""
    require_kernel_device(logits)
    rows, vocab = logits.shape
    k = min(k, vocab)
    if k == 0 or rows == 0:
        return torch.empty((rows, k), dtype=torch.int64, device=logits.device)
    if k > 1024:
        # -0.0 sorts as 0.0, and equal logits keep the order of their ids
        return torch.sort(logits.float() + 0.0, dim=-1, descending=True, stable=True).indices[:, :k]
    limit = torch.topk(logits, k, dim=-1).values[:, -1].contiguous()  # a value: no choice among equals
    ids = torch.empty((rows, k), dtype=torch.int64, device=logits.device)
    _collect_kernel[(rows,)](logits, logits.stride(0), vocab, limit, k, ids, BLOCK=SEGMENT, num_warps=8)
    values = logits.gather(1, ids).float() + 0.0
    order = torch.sort(values, dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)


def scores(logits: torch.Tensor, tokens: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of chosen ids, and the rank of each row's own token.

    Args:
        logits: float32, bfloat16 or float16 [R, V], unit column stride.
        tokens: int64 [R], each row's sampled or prompt token.
        columns: int64 [R, C], ids to score.

    Returns:
        (float32 [R, C] logprobs, int64 [R] ranks: how many logits are at least that of the row's token).
    """
    require_kernel_device(logits)
    rows, vocab = logits.shape
    columns = columns.contiguous()
    segments = cdiv(vocab, SEGMENT)
    padded = next_power_of_2(segments)
    device = logits.device
    top = torch.empty((rows, segments), dtype=torch.float32, device=device)
    mass = torch.empty((rows, segments, 2), dtype=torch.int64, device=device)
    out = torch.empty(columns.shape, dtype=torch.float32, device=device)
    ranks = torch.empty(rows, dtype=torch.int64, device=device)
    options = {"num_warps": 8, "enable_fp_fusion": False}
    for start in range(0, rows, 65535):  # the second grid dimension's limit
        part = slice(start, start + 65535)
        x, count = logits[part], min(65535, rows - start)
        _segment_max_kernel[(segments, count)](x, x.stride(0), vocab, top[part], BLOCK=SEGMENT, **options)
        _segment_mass_kernel[(segments, count)](
            x, x.stride(0), vocab, tokens[part], top[part], mass[part], SEGMENTS=padded, BLOCK=SEGMENT, **options
        )
        _score_kernel[(count,)](
            x, x.stride(0), columns[part], columns.stride(0), columns.shape[1], top[part], mass[part], segments,
            out[part], ranks[part], SEGMENTS=padded, COLUMNS=min(next_power_of_2(columns.shape[1]), 1024),
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out, ranks
