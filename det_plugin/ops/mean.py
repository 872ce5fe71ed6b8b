"""Mean over one or several dimensions.

Contract
    Order: the reduced elements (row-major over the reduced dimensions, N of them) are summed in fp32 over
    ``min(2^ceil(log2 N), 1024)`` lanes: lane i takes the elements i, i + lanes, … one after the other, then
    the lanes are added by pairs.  The tree depends on N alone.  The sum is divided by N in IEEE fp32 and
    rounded once, to x's dtype.
    The result may depend on the reduced values, N and the dtype; not on the kept dimensions' sizes or on
    strides.
"""

from collections.abc import Sequence

import torch

from det_plugin.ops._triton import (
    cdiv,
    next_power_of_2,
    require_kernel_device,
    tl,
    tree_sum,
    tree_sum_reference,
    triton,
)
from det_plugin.ops.rms_norm import DTYPES

MAX_LANES = 1024


def mean_rows_reference(x: torch.Tensor) -> torch.Tensor:
    """Mean over the last dimension by the contract, in plain torch: bit for bit the kernel's result."""
    n = x.shape[-1]
    lanes = min(next_power_of_2(n), MAX_LANES)
    padded = torch.nn.functional.pad(x.float(), (0, cdiv(n, lanes) * lanes - n))
    total = torch.zeros_like(padded[..., :lanes])
    for chunk in padded.split(lanes, dim=-1):
        total = total + chunk
    return (tree_sum_reference(total) / torch.full((), float(n), device=x.device)).to(x.dtype)


@triton.jit
def _mean_kernel(
    x_ptr,
    y_ptr,
    rows,
    N,
    LANES: tl.constexpr,
    LOG2_LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)[None, :]
    base = x_ptr + (row * N)[:, None]
    live = (row < rows)[:, None]
    total = tl.zeros((ROWS, LANES), tl.float32)
    for start in range(0, N, LANES):
        total += tl.load(base + start + lane, mask=live & (start + lane < N), other=0.0).to(tl.float32)
    mean = tl.div_rn(tree_sum(total, LOG2_LANES), tl.full((ROWS,), N, tl.float32))
    tl.store(y_ptr + row, mean.to(y_ptr.dtype.element_ty), mask=row < rows)


def _normalised(x: torch.Tensor, dim: Sequence[int]) -> list[int]:
    if x.dtype not in DTYPES:
        raise ValueError(f"x: got dtype {x.dtype}, accepts {', '.join(map(str, DTYPES))}")
    reduced = sorted(d % x.dim() for d in dim if -x.dim() <= d < x.dim())
    if len(reduced) != len(dim) or len(set(reduced)) != len(dim) or not dim:
        raise ValueError(f"dim: got {list(dim)}, expected distinct dimensions of a {x.dim()}-d tensor")
    return reduced


def mean_shape(x: torch.Tensor, dim: Sequence[int], keepdim: bool) -> list[int]:
    """Shape of the result."""
    reduced = _normalised(x, dim)
    return [1 if i in reduced else size for i, size in enumerate(x.shape) if keepdim or i not in reduced]


def _rows_of(x: torch.Tensor, dim: Sequence[int]) -> torch.Tensor:
    """[kept, reduced] contiguous."""
    reduced = _normalised(x, dim)
    kept = [i for i in range(x.dim()) if i not in reduced]
    count = 1
    for i in reduced:
        count *= x.shape[i]
    if count == 0:
        raise ValueError(f"x: got shape {list(x.shape)}, expected at least one element to reduce")
    return x.permute(*kept, *reduced).reshape(-1, count).contiguous()


def mean_reference(x: torch.Tensor, dim: Sequence[int], keepdim: bool) -> torch.Tensor:
    """:func:`mean` in plain torch."""
    return mean_rows_reference(_rows_of(x, dim)).reshape(mean_shape(x, dim, keepdim))


def mean_kernel(x: torch.Tensor, dim: Sequence[int], keepdim: bool) -> torch.Tensor:
    """:func:`mean` by the Triton kernel (CUDA tensors)."""
    rows = _rows_of(x, dim)
    require_kernel_device(x)
    count, n = rows.shape
    y = torch.empty((count,), dtype=x.dtype, device=x.device)
    if count:
        lanes = min(next_power_of_2(n), MAX_LANES)
        per_program = max(1, 1024 // lanes)
        _mean_kernel[(cdiv(count, per_program),)](
            rows,
            y,
            count,
            n,
            LANES=lanes,
            LOG2_LANES=lanes.bit_length() - 1,
            ROWS=per_program,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return y.reshape(mean_shape(x, dim, keepdim))


def mean(x: torch.Tensor, dim: int | Sequence[int], keepdim: bool = False) -> torch.Tensor:
    """Mean over ``dim``.

    Args:
        x: bfloat16, float16 or float32, any strides.
        dim: one dimension or several distinct ones, negative counts from the end.
        keepdim: keep reduced dimensions with size 1.

    Returns:
        x's dtype, contiguous.

    Raises:
        ValueError: wrong dtype or dimensions, or nothing to reduce.
    """
    return torch.ops.det_plugin.mean(x, [dim] if isinstance(dim, int) else list(dim), keepdim)
