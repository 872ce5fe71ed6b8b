"""softmax and log_softmax over the last dimension, in fp32.

    softmax(x)_i = exp(x_i - m) / l        log_softmax(x)_i = (x_i - m) - log(l)
    m = max x,  l = sum_j exp(x_j - m)

Contract
    Order: a row is cut into segments of ``min(2^ceil(log2 N), 4096)`` elements from its start.  Each
    segment's l_s = sum exp(x - m_s) with its own maximum m_s is added by pairs; the segments' l_s ·
    exp(m_s - m) are added by pairs over the next power of two of their number.  The tree depends on the
    width N alone.  Everything is fp32 (inputs are widened exactly); the result is fp32.
    The result may depend on the row's values, N and the dtype; not on the number of rows, their strides or
    alignment, or how many programs share a row.
    A masked element (-inf) has probability exactly 0.  A row with a NaN, a +inf, or nothing but -inf is NaN.
"""

import torch

from det_plugin.ops._triton import (
    cdiv,
    constant,
    next_power_of_2,
    require_kernel_device,
    tl,
    tree_sum,
    tree_sum_reference,
    triton,
)
from det_plugin.ops.rms_norm import check_row_arguments

SEGMENT = 4096
LOG2_E = constant(1.4426950408889634)
LOG2_E_LOW = constant(1.9259629911266175e-08)
LN_2 = constant(0.6931471805599453)


def softmax_reference(x: torch.Tensor, log: bool = False) -> torch.Tensor:
    """The contract in plain torch (fp32 result); equals the kernel up to the accuracy of exp and log."""
    check_row_arguments(x, None)
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=torch.float32, device=x.device)
    n = x.shape[-1]
    segment = min(next_power_of_2(n), SEGMENT)
    count = cdiv(n, segment)
    wide = x.float()
    minus_infinity = float("-inf")
    segments = torch.nn.functional.pad(wide, (0, count * segment - n), value=minus_infinity)
    segments = segments.reshape(*x.shape[:-1], count, segment)
    segment_max = segments.amax(-1)
    shifted = (segments - segment_max.unsqueeze(-1)).nan_to_num(nan=minus_infinity)
    shifted = torch.where(segments.isnan(), segments, shifted)
    segment_sum = tree_sum_reference(shifted.exp())
    row_max = wide.amax(-1, keepdim=True)
    scale = (segment_max - row_max).nan_to_num(nan=minus_infinity).exp()
    scale = torch.where(row_max.isfinite(), scale, torch.full_like(scale, float("nan")))
    scaled = torch.nn.functional.pad(segment_sum * scale, (0, next_power_of_2(count) - count))
    total = tree_sum_reference(scaled).unsqueeze(-1)
    shifted = wide - row_max
    return shifted - total.log() if log else shifted.exp() / total


@triton.jit
def exp_accurate(d):
    """exp(d) for d <= 0 within about 2 ulp: exp2 of the rounded product, corrected by what was rounded off."""
    d = tl.maximum(d, -200.0, propagate_nan=tl.PropagateNan.ALL)
    high = d * LOG2_E
    low = tl.fma(d, LOG2_E_LOW, tl.fma(d, LOG2_E, -high))
    e = tl.exp2(high)
    return tl.fma(e, low * LN_2, e)


@triton.jit
def _segment_statistics(x, SIZE_LOG2: tl.constexpr):
    """Maximum and sum of exp(x - maximum) of ``x`` [rows, 2**SIZE_LOG2]; a segment of -inf sums to 0."""
    m = tl.max(x, axis=1)
    shift = tl.where(m == float("-inf"), 0.0, m)
    return m, tree_sum(exp_accurate(x - shift[:, None]), SIZE_LOG2)


@triton.jit
def _write(x, m, total, y_ptr, offset, mask, LOG: tl.constexpr):
    if LOG:  # noqa: SIM108
        y = (x - m) - tl.log(total)
    else:
        y = tl.div_rn(exp_accurate(x - m), total)
    tl.store(y_ptr + offset, y, mask=mask)


@triton.jit
def _softmax_row_kernel(
    x_ptr,
    y_ptr,
    rows,
    N,
    x_row_stride,
    SEGMENT_SIZE: tl.constexpr,
    SEGMENT_LOG2: tl.constexpr,
    ROWS: tl.constexpr,
    LOG: tl.constexpr,
):
    """Rows of one segment, ROWS of them per program."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    lane = tl.arange(0, SEGMENT_SIZE)[None, :]
    mask = (row < rows) & (lane < N)
    x = tl.load(x_ptr + row * x_row_stride + lane, mask=mask, other=float("-inf")).to(tl.float32)
    m, total = _segment_statistics(x, SEGMENT_LOG2)
    total = tl.where(m == float("-inf"), float("nan"), total)
    shape: tl.constexpr = (ROWS, SEGMENT_SIZE)
    total = tl.broadcast_to(total[:, None], shape)
    _write(x, m[:, None], total, y_ptr, row * N + lane, mask, LOG)


@triton.jit
def _segment_kernel(
    x_ptr,
    statistics_ptr,
    N,
    x_row_stride,
    SEGMENT_SIZE: tl.constexpr,
    SEGMENT_LOG2: tl.constexpr,
):
    """First pass over long rows: (maximum, sum) of one segment of one row per program."""
    row = tl.program_id(1).to(tl.int64)
    segment = tl.program_id(0)
    lane = segment * SEGMENT_SIZE + tl.arange(0, SEGMENT_SIZE)[None, :]
    x = tl.load(x_ptr + row * x_row_stride + lane, mask=lane < N, other=float("-inf")).to(tl.float32)
    m, total = _segment_statistics(x, SEGMENT_LOG2)
    out = statistics_ptr + (row * tl.num_programs(0) + segment) * 2 + tl.arange(0, 1)
    tl.store(out, m)
    tl.store(out + 1, total)


@triton.jit
def _merge_kernel(
    x_ptr,
    statistics_ptr,
    y_ptr,
    N,
    x_row_stride,
    SEGMENT_SIZE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENTS_POWER_OF_2: tl.constexpr,
    SEGMENTS_LOG2: tl.constexpr,
    LOG: tl.constexpr,
):
    """Second pass: every program merges its row's segments in the same tree, then writes one segment."""
    row = tl.program_id(1).to(tl.int64)
    part = tl.arange(0, SEGMENTS_POWER_OF_2)[None, :]
    base = statistics_ptr + (row * SEGMENTS + part) * 2
    segment_max = tl.load(base, mask=part < SEGMENTS, other=float("-inf"))
    segment_sum = tl.load(base + 1, mask=part < SEGMENTS, other=0.0)
    m = tl.max(segment_max, axis=1)
    shift = tl.where(m == float("-inf"), 0.0, m)
    total = tree_sum(segment_sum * exp_accurate(segment_max - shift[:, None]), SEGMENTS_LOG2)
    total = tl.where(m == float("-inf"), float("nan"), total)
    lane = tl.program_id(0) * SEGMENT_SIZE + tl.arange(0, SEGMENT_SIZE)[None, :]
    mask = lane < N
    x = tl.load(x_ptr + row * x_row_stride + lane, mask=mask, other=float("-inf")).to(tl.float32)
    shape: tl.constexpr = (1, SEGMENT_SIZE)
    _write(x, m[:, None], tl.broadcast_to(total[:, None], shape), y_ptr, row * N + lane, mask, LOG)


def softmax_kernel(x: torch.Tensor, log: bool) -> torch.Tensor:
    """softmax (``log``: log_softmax) by the Triton kernels (CUDA tensors)."""
    check_row_arguments(x, None)
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    n = x.shape[-1]
    rows = x.numel() // n if n else 0
    if rows == 0:
        return y
    require_kernel_device(x)
    x = x.reshape(rows, n)
    if n > 1 and x.stride(1) != 1:
        x = x.contiguous()
    segment = min(next_power_of_2(n), SEGMENT)
    count = cdiv(n, segment)
    if count == 1:
        per_program = max(1, 1024 // segment)
        _softmax_row_kernel[(cdiv(rows, per_program),)](
            x,
            y,
            rows,
            n,
            x.stride(0),
            SEGMENT_SIZE=segment,
            SEGMENT_LOG2=segment.bit_length() - 1,
            ROWS=per_program,
            LOG=log,
            num_warps=max(4, segment * per_program // 512),
            enable_fp_fusion=False,
        )
        return y
    statistics = torch.empty((min(rows, 65535), count, 2), dtype=torch.float32, device=x.device)
    for start in range(0, rows, 65535):  # the second grid dimension's limit
        part = x[start : start + 65535]
        grid = (count, part.shape[0])
        _segment_kernel[grid](
            part,
            statistics,
            n,
            x.stride(0),
            SEGMENT_SIZE=segment,
            SEGMENT_LOG2=segment.bit_length() - 1,
            num_warps=8,
            enable_fp_fusion=False,
        )
        _merge_kernel[grid](
            part,
            statistics,
            y.view(rows, n)[start:],
            n,
            x.stride(0),
            SEGMENT_SIZE=segment,
            SEGMENTS=count,
            SEGMENTS_POWER_OF_2=next_power_of_2(count),
            SEGMENTS_LOG2=next_power_of_2(count).bit_length() - 1,
            LOG=log,
            num_warps=8,
            enable_fp_fusion=False,
        )
    return y


def softmax(x: torch.Tensor) -> torch.Tensor:
    """softmax over the last dimension.

    Args:
        x: [..., N], bfloat16, float16 or float32; rows may be strided.

    Returns:
        [..., N], contiguous, float32.

    Raises:
        ValueError: wrong dtype or a scalar.
    """
    return torch.ops.det_plugin.softmax(x)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """log_softmax over the last dimension; arguments and errors as in :func:`softmax`."""
    return torch.ops.det_plugin.log_softmax(x)
