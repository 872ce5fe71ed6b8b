"""RMS norm, and residual add fused with it.

    y = x / sqrt(mean(x²) + eps) · (weight + weight_offset)

Contract
    Order: a row's squares are summed in fp32 over ``min(2^ceil(log2 N), 8192)`` lanes: lane i takes the
    elements i, i + lanes, … one after the other with fused multiply-add, then the lanes are added by pairs
    (:func:`det_plugin.ops._triton.tree_sum`).  The tree depends on the width N alone.
    Mean, square root and reciprocal are IEEE fp32 operations; the result is rounded once, to x's dtype.
    Fused residual add: r = round(x + residual) in x's dtype, from an fp32 sum; the norm is taken of the
    *rounded* r.  So fused_add_rms_norm(x, residual) has the bits of ``r = x + residual; rms_norm(r)``.
    The result may depend on the row's values, N, dtypes, eps and weights; not on the number of rows, their
    strides or alignment, or the rows per program.
"""

import torch

from det_plugin.ops import rows_fast
from det_plugin.ops._triton import (
    begin,
    can_overlap,
    cdiv,
    compiled_form,
    forms,
    launch,
    next_power_of_2,
    require_kernel_device,
    tl,
    tree_sum,
    tree_sum_reference,
    triton,
)

MAX_LANES = 8192
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_offset: float = 0.0
) -> torch.Tensor:
    """The contract in plain torch, bit for bit.

    Fused multiply-add, square root and reciprocal go through fp64, which rounds to the same fp32 numbers
    (torch's own fp32 square root is not correctly rounded on every processor, and on CUDA it multiplies by
    the reciprocal when it divides by a number or a CPU tensor).
    """
    n = x.shape[-1]
    lanes = min(next_power_of_2(n), MAX_LANES)
    wide = x.float()
    padded = torch.nn.functional.pad(wide, (0, cdiv(n, lanes) * lanes - n))
    total = torch.zeros_like(padded[..., :lanes])
    for chunk in padded.split(lanes, dim=-1):
        total = (total.double() + chunk.double() * chunk.double()).float()
    variance = tree_sum_reference(total) / torch.full((), float(n), device=x.device)
    root = torch.sqrt((variance + torch.full((), eps, device=x.device)).double()).float()
    rstd = (1.0 / root.double()).float()
    y = wide * rstd.unsqueeze(-1)
    if weight is not None:
        y = y * (weight.float() + weight_offset if weight_offset else weight.float())
    return y.to(x.dtype)


def fused_add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(norm, sum)`` by the contract, in plain torch."""
    check_row_arguments(x, weight)
    _check_residual(x, residual)
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm_reference(total, weight, eps, weight_offset), total


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    rows,
    inner,
    x_outer_stride,
    x_inner_stride,
    eps,
    N: tl.constexpr,
    LANES: tl.constexpr,
    LOG2_LANES: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """ROWS rows per program; row r of the flattened x lies at (r // inner, r % inner); the rest is contiguous."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (row < rows)[:, None]
    x_row = (row // inner * x_outer_stride + row % inner * x_inner_stride)[:, None]
    at_row = (row * N)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    total = tl.zeros((ROWS, LANES), tl.float32)
    x = tl.zeros((ROWS, LANES), tl.float32)
    for start in tl.static_range(0, N, LANES):
        mask = live & (start + lane < N)
        x = tl.load(x_ptr + x_row + start + lane, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            r = tl.load(residual_ptr + at_row + start + lane, mask=mask, other=0.0).to(tl.float32)
            rounded = (x + r).to(total_ptr.dtype.element_ty)
            tl.store(total_ptr + at_row + start + lane, rounded, mask=mask)
            x = rounded.to(tl.float32)
        total = tl.fma(x, x, total)
    if HAS_RESIDUAL and N > LANES:
        tl.debug_barrier()  # the second pass reads what the first one wrote
    variance = tl.div_rn(tree_sum(total, LOG2_LANES), tl.full((ROWS,), N, tl.float32))
    rstd = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(variance + eps))[:, None]
    for start in tl.static_range(0, N, LANES):
        mask = live & (start + lane < N)
        if N > LANES:
            if HAS_RESIDUAL:
                x = tl.load(total_ptr + at_row + start + lane, mask=mask, other=0.0).to(tl.float32)
            else:
                x = tl.load(x_ptr + x_row + start + lane, mask=mask, other=0.0).to(tl.float32)
        y = x * rstd
        if HAS_WEIGHT:
            w = tl.load(weight_ptr + start + lane, mask=start + lane < N, other=0.0).to(tl.float32)
            if WEIGHT_OFFSET != 0.0:
                w = w + WEIGHT_OFFSET
            y = y * w
        tl.store(y_ptr + at_row + start + lane, y.to(y_ptr.dtype.element_ty), mask=mask)


def _as_rows(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """``(x, rows per outer step, outer stride, inner stride)`` of a tensor read in place, or of a copy."""
    if x.is_contiguous():
        return x, 1, x.shape[-1], 0
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() == 1:
        return x, 1, 0, 0
    if x.dim() == 2:
        return x, 1, x.stride(0), 0
    if x.dim() == 3:
        return x, x.shape[1], x.stride(0), x.stride(1)
    try:
        merged = x.view(-1, x.shape[-2], x.shape[-1])
    except RuntimeError:
        x = x.contiguous()
        merged = x.view(-1, x.shape[-2], x.shape[-1])
    return x, x.shape[-2], merged.stride(0), merged.stride(1)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(norm, new residual)``; without ``residual`` the second is the first."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = y if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    require_kernel_device(x)
    n = x.shape[-1]
    rows = x.numel() // n if n else 0
    if rows == 0:
        return y, total
    lanes = min(next_power_of_2(n), MAX_LANES)
    per_program = max(1, 1024 // lanes)
    x, inner, x_outer, x_inner = _as_rows(x)
    overlap = can_overlap(x.device.index)
    other = x if residual is None else residual.contiguous()
    scale = x if weight is None else weight.contiguous()
    key = (inner, x_outer, x_inner, rows < 2**31, forms(x, other, scale, y, total))
    arguments = (x, other, scale, y, total, rows, inner, x_outer, x_inner, float(eps))
    constants = (
        n, lanes, lanes.bit_length() - 1, per_program,
        residual is not None, weight is not None, float(weight_offset), overlap,
    )  # fmt: skip
    launch(
        _rms_norm_kernel, key, (cdiv(rows, per_program), 1, 1), arguments, constants,
        num_warps=max(4, min(16, lanes * per_program // 512)), enable_fp_fusion=False, launch_pdl=overlap,
    )  # fmt: skip
    if (inner, x_outer, x_inner) == (1, n, 0) and rows < 2**31 and rows_fast.active():
        compiled = compiled_form(_rms_norm_kernel, key, constants)
        kind = None if weight is None else weight.dtype
        name = (int(residual is not None), n, x.dtype, kind, x.device.index, float(eps), float(weight_offset))
        scaled = None if weight is None else scale
        call = (x, *(() if residual is None else (other,)), scaled, float(eps), float(weight_offset))
        operator = torch.ops.det_plugin.rms_norm if residual is None else torch.ops.det_plugin.fused_add_rms_norm
        results = (y,) if residual is None else (y, total)
        rows_fast.offer(name, compiled, _rms_norm_kernel.arg_names, arguments, per_program, operator, call, results)
    return y, total


def check_row_arguments(x: torch.Tensor, weight: torch.Tensor | None, weight_offset: float = 0.0) -> None:
    """Shape and dtype checks shared by the row operators.

    Raises:
        ValueError: naming the argument, what it got and what it accepts.
    """
    if x.dtype not in DTYPES:
        raise ValueError(f"x: got dtype {x.dtype}, accepts {', '.join(map(str, DTYPES))}")
    if x.dim() < 1:
        raise ValueError("x: got a scalar, expected at least one dimension")
    if weight is not None and tuple(weight.shape) != (x.shape[-1],):
        raise ValueError(f"weight: got shape {list(weight.shape)}, expected [{x.shape[-1]}]")
    if weight is not None and weight.device != x.device:
        raise ValueError(f"weight: got device {weight.device}, expected {x.device}")


def rms_norm_kernel(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_offset: float = 0.0
) -> torch.Tensor:
    """:func:`rms_norm` by the Triton kernel (CUDA tensors)."""
    check_row_arguments(x, weight)
    return _launch(x, None, weight, eps, weight_offset)[0]


def _check_residual(x: torch.Tensor, residual: torch.Tensor) -> None:
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(f"residual: got {residual.dtype}{list(residual.shape)}, expected {x.dtype}{list(x.shape)}")


def fused_add_rms_norm_kernel(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`fused_add_rms_norm` by the Triton kernel (CUDA tensors)."""
    check_row_arguments(x, weight)
    _check_residual(x, residual)
    return _launch(x, residual, weight, eps, weight_offset)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6, weight_offset: float = 0.0
) -> torch.Tensor:
    """Root-mean-square norm over the last dimension.

    Args:
        x: [..., N], bfloat16, float16 or float32; rows may be strided (a slice of a fused QKV result).
        weight: [N] of any float dtype, or None for no scale.
        eps: added to the mean square.
        weight_offset: added to the weight in fp32 (1.0 for Gemma).

    Returns:
        [..., N], contiguous, x's dtype.

    Raises:
        ValueError: wrong dtype, shape or device.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    return torch.ops.det_plugin.rms_norm(x, weight, eps, weight_offset)


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual add, then RMS norm.

    Both results are new tensors: an operator that wrote to its arguments would make ``torch.compile`` copy them.

    Args:
        x, residual: [..., N], same shape and dtype; rows of x may be strided.
        weight, eps, weight_offset: as in :func:`rms_norm`.

    Returns:
        ``(norm, sum)``, contiguous, x's shape and dtype; ``sum`` is the rounded x + residual, of which ``norm``
        is the norm.

    Raises:
        ValueError: wrong dtype, shape or device.
    """
    return torch.ops.det_plugin.fused_add_rms_norm(x, residual, weight, eps, weight_offset)
