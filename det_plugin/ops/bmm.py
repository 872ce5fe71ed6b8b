"""Batched matrix product: y[i] = a[i] b[i].

Contract
    Order, accumulator and rounding as in :mod:`det_plugin.ops.linear_cuda`: along K in fp32, sequential for
    bfloat16 and float16, by blocks of 32 for float32; one rounding.  One tile serves every shape, so a result
    depends on its row of a, its column of b, K, the dtype and the GPU architecture alone.
"""

import torch

from det_plugin.ops._triton import require_kernel_device
from det_plugin.ops.blocked_sum import blocked_product
from det_plugin.ops.linear_schedules import CANONICAL, run_tile


def bmm_reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The contract in plain torch, one element of K at a time (CPU implementation; slow)."""
    check_bmm_arguments(a, b)
    if a.dtype == torch.float32:
        return blocked_product(a, b.transpose(1, 2))
    total = torch.zeros((a.shape[0], a.shape[1], b.shape[2]), dtype=torch.float32, device=a.device)
    for k in range(a.shape[2]):
        total = total + a[:, :, k, None].float() * b[:, k, None, :].float()
    return total.to(a.dtype)


def check_bmm_arguments(a: torch.Tensor, b: torch.Tensor) -> None:
    """Shapes, dtypes and devices.

    Raises:
        ValueError: naming the argument, what it got and what it accepts.
    """
    if a.dtype not in CANONICAL:
        raise ValueError(f"a: got dtype {a.dtype}, accepts {', '.join(map(str, CANONICAL))}")
    if a.dim() != 3:
        raise ValueError(f"a: got shape {list(a.shape)}, expected three dimensions [B, M, K]")
    if b.dim() != 3 or b.shape[0] != a.shape[0] or b.shape[1] != a.shape[2]:
        raise ValueError(f"b: got shape {list(b.shape)}, expected [{a.shape[0]}, {a.shape[2]}, N]")
    if b.dtype != a.dtype or b.device != a.device:
        raise ValueError(f"b: got {b.dtype} on {b.device}, expected {a.dtype} on {a.device}")


def bmm_kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """:func:`bmm` by the Triton kernel (CUDA tensors)."""
    check_bmm_arguments(a, b)
    batches, m, k = a.shape
    n = b.shape[2]
    y = torch.zeros((batches, m, n), dtype=a.dtype, device=a.device)
    if y.numel() and k:
        require_kernel_device(a)
        for start in range(0, batches, 65535):  # the second grid dimension's limit
            part = slice(start, start + 65535)
            run_tile(CANONICAL[a.dtype], a[part], b[part].transpose(1, 2), None, y[part])
    return y


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """y[i] = a[i] b[i], batch-invariant.

    Args:
        a: [B, M, K], bfloat16, float16 or float32, any strides.
        b: [B, K, N], a's dtype, any strides.

    Returns:
        [B, M, N], contiguous, a's dtype.

    Raises:
        ValueError: wrong dtype, shape or device.
    """
    return torch.ops.det_plugin.bmm(a, b)
