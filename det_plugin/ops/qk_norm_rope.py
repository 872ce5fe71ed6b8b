"""RMS norm of query and key heads, then the rotary embedding, in one pass over the fused QKV projection.

Contract
    Each head of each token alone: the norm of :mod:`det_plugin.ops.rms_norm` over the head size, rounded to x's
    dtype; then, for the pair (a, b) = (element i, element i + head size / 2) and the position's (cos, sin),
    ``a' = a cos - b sin`` and ``b' = b cos + a sin`` in fp32, rounded once.
    Which of the two products of each sum is fused with the addition is the *contraction*: the host's rotary kernel
    leaves it to its compiler, so it is found by comparing bytes (:func:`find_contraction`); with it this operator
    is a schedule of "norm, norm, rotary embedding".
    The result may depend on the head's elements, the weights, the position's row of the cache, the dtype and the
    contraction; not on the number of tokens, their order or strides.

Source: Su et al., RoFormer (2021), in the half-split layout; Zhang and Sennrich, RMSNorm (2019).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    triton,
)
from det_plugin.ops.rms_norm import DTYPES, rms_norm_reference

CONTRACTIONS = ("first", "second", "none")
"""``first``: fma(a, cos, -(b sin)) and fma(b, cos, a sin); ``second``: the other product is fused; ``none``: two
roundings."""


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """fp32 fused multiply-add of values whose product float64 holds exactly.

    float64 may round the sum once more, which differs from a single rounding only at a tie of both.
    """
    return (a.double() * b.double() + c.double()).float()


def rotate_reference(a: torch.Tensor, b: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, contraction: str) -> Any:
    """``(a', b')`` in fp32 by one contraction."""
    if contraction == "first":
        return _fma(a, cos, -(b * sin)), _fma(b, cos, a * sin)
    if contraction == "second":
        return _fma(-b, sin, a * cos), _fma(a, sin, b * cos)
    return a * cos - b * sin, b * cos + a * sin


def qk_norm_rope_reference(
    qkv: torch.Tensor, positions: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor,
    cos_sin: torch.Tensor, num_heads: int, num_kv_heads: int, eps: float, contraction: str = "first",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """:func:`qk_norm_rope` in plain torch."""
    _check(qkv, positions, q_weight, k_weight, cos_sin, num_heads, num_kv_heads, contraction)
    size = q_weight.shape[0]
    cos, sin = (part[:, None].float() for part in cos_sin[positions].chunk(2, dim=-1))
    results = []
    for first, heads, weight in ((0, num_heads, q_weight), (num_heads, num_kv_heads, k_weight)):
        x = qkv[:, first * size : (first + heads) * size].reshape(-1, heads, size)
        a, b = rms_norm_reference(x, weight, eps).float().chunk(2, dim=-1)
        rotated = torch.cat(rotate_reference(a, b, cos, sin, contraction), dim=-1)
        results.append(rotated.to(qkv.dtype).reshape(qkv.shape[0], heads * size))
    return results[0], results[1]


@triton.jit
def _rotate(a, b, cos, sin, CONTRACTION: tl.constexpr):
    if CONTRACTION == 0:
        low = tl.fma(a, cos, -(b * sin))
        high = tl.fma(b, cos, a * sin)
    elif CONTRACTION == 1:
        low = tl.fma(-b, sin, a * cos)
        high = tl.fma(a, sin, b * cos)
    else:
        low = a * cos - b * sin
        high = b * cos + a * sin
    return low, high


@triton.jit(do_not_specialize=["rows"])
def _qk_norm_rope_kernel(
    qkv_ptr, position_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, q_ptr, k_ptr,
    rows, qkv_stride, cos_sin_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, LOG2_LANES: tl.constexpr,
    HALF: tl.constexpr, ROWS: tl.constexpr, CONTRACTION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """ROWS heads per program; row r is head r % (HEADS + KV_HEADS) of token r // (HEADS + KV_HEADS)."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    token = row // (HEADS + KV_HEADS)
    head = row % (HEADS + KV_HEADS)
    is_q = head < HEADS
    base = (token * qkv_stride + head * N)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    x = tl.load(qkv_ptr + base + lane, mask=live[:, None] & (lane < N), other=0.0).to(tl.float32)
    total = tl.fma(x, x, tl.zeros((ROWS, LANES), tl.float32))
    variance = tl.div_rn(tree_sum(total, LOG2_LANES), tl.full((ROWS,), N, tl.float32))
    rstd = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(variance + eps))[:, None]
    position = tl.load(position_ptr + token, mask=live, other=0)[:, None]
    half = tl.arange(0, HALF)[None, :]
    mask = live[:, None] & (half < N // 2)
    q_mask, k_mask = mask & is_q[:, None], mask & (head >= HEADS)[:, None]
    cos = tl.load(cos_sin_ptr + position * cos_sin_stride + half, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(cos_sin_ptr + position * cos_sin_stride + N // 2 + half, mask=mask, other=0.0).to(tl.float32)
    in_half = half < N // 2
    q_low = tl.load(q_weight_ptr + half, mask=in_half, other=0.0).to(tl.float32)
    q_high = tl.load(q_weight_ptr + N // 2 + half, mask=in_half, other=0.0).to(tl.float32)
    k_low = tl.load(k_weight_ptr + half, mask=in_half, other=0.0).to(tl.float32)
    k_high = tl.load(k_weight_ptr + N // 2 + half, mask=in_half, other=0.0).to(tl.float32)
    w_low, w_high = tl.where(is_q[:, None], q_low, k_low), tl.where(is_q[:, None], q_high, k_high)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    a = tl.load(qkv_ptr + base + half, mask=mask, other=0.0).to(tl.float32) * rstd * w_low
    b = tl.load(qkv_ptr + base + N // 2 + half, mask=mask, other=0.0).to(tl.float32) * rstd * w_high
    low, high = _rotate(a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32), cos, sin, CONTRACTION)
    q_out = q_ptr + (token * (HEADS * N) + head * N)[:, None] + half
    tl.store(q_out, low.to(dtype), mask=q_mask)
    tl.store(q_out + N // 2, high.to(dtype), mask=q_mask)
    k_out = k_ptr + (token * (KV_HEADS * N) + (head - HEADS) * N)[:, None] + half
    tl.store(k_out, low.to(dtype), mask=k_mask)
    tl.store(k_out + N // 2, high.to(dtype), mask=k_mask)


def _check(
    qkv: torch.Tensor, positions: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor,
    cos_sin: torch.Tensor, num_heads: int, num_kv_heads: int, contraction: str,
) -> None:  # fmt: skip
    size = q_weight.shape[0] if q_weight.dim() == 1 else 0
    if qkv.dtype not in DTYPES:
        raise ValueError(f"qkv: got dtype {qkv.dtype}, accepts {', '.join(map(str, DTYPES))}")
    if size < 2 or size % 2:
        raise ValueError(f"q_weight: got shape {list(q_weight.shape)}, expected [d] with an even d")
    width = (num_heads + 2 * num_kv_heads) * size
    if qkv.dim() != 2 or qkv.shape[1] != width or qkv.stride(1) != 1:
        raise ValueError(
            f"qkv: got shape {list(qkv.shape)}, strides {qkv.stride()}, expected [tokens, {width}] in rows"
        )
    if tuple(positions.shape) != (qkv.shape[0],) or positions.dtype != torch.int64:
        raise ValueError(f"positions: got {positions.dtype}{list(positions.shape)}, expected int64[{qkv.shape[0]}]")
    if tuple(k_weight.shape) != (size,):
        raise ValueError(f"k_weight: got shape {list(k_weight.shape)}, expected [{size}]")
    if cos_sin.dim() != 2 or cos_sin.shape[1] != size or cos_sin.stride(1) != 1:
        raise ValueError(f"cos_sin: got shape {list(cos_sin.shape)}, expected [positions, {size}] in rows")
    if contraction not in CONTRACTIONS:
        raise ValueError(f"contraction: got {contraction!r}, accepts {', '.join(CONTRACTIONS)}")


def qk_norm_rope_kernel(
    qkv: torch.Tensor, positions: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor,
    cos_sin: torch.Tensor, num_heads: int, num_kv_heads: int, eps: float, contraction: str = "first",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """:func:`qk_norm_rope` by the Triton kernel (CUDA tensors)."""
    _check(qkv, positions, q_weight, k_weight, cos_sin, num_heads, num_kv_heads, contraction)
    require_kernel_device(qkv)
    size, tokens = q_weight.shape[0], qkv.shape[0]
    queries = torch.empty((tokens, num_heads * size), dtype=qkv.dtype, device=qkv.device)
    keys = torch.empty((tokens, num_kv_heads * size), dtype=qkv.dtype, device=qkv.device)
    rows = tokens * (num_heads + num_kv_heads)
    if rows:
        lanes = next_power_of_2(size)
        per_program = max(1, 1024 // lanes)
        overlap = can_overlap(qkv.device.index)
        q_weight, k_weight, positions = q_weight.contiguous(), k_weight.contiguous(), positions.contiguous()
        pointers = (qkv, positions, q_weight, k_weight, cos_sin, queries, keys)
        strides = (qkv.stride(0), cos_sin.stride(0))
        constants = (
            num_heads, num_kv_heads, size, lanes, lanes.bit_length() - 1, next_power_of_2(size // 2), per_program,
            CONTRACTIONS.index(contraction), overlap,
        )  # fmt: skip
        key, arguments = (strides, rows < 2**31, forms(*pointers)), (*pointers, rows, *strides, float(eps))
        launch(
            _qk_norm_rope_kernel, key, (cdiv(rows, per_program), 1, 1), arguments, constants,
            num_warps=4, enable_fp_fusion=False, launch_pdl=overlap,
        )  # fmt: skip
        if rows < 2**31 and k_weight.dtype == q_weight.dtype and rows_fast.active():
            name = (
                2, size, qkv.dtype, q_weight.dtype, cos_sin.dtype, CONTRACTIONS.index(contraction), num_heads,
                num_kv_heads, qkv.device.index, float(eps), *strides,
            )  # fmt: skip
            call = (qkv, positions, q_weight, k_weight, cos_sin, num_heads, num_kv_heads, float(eps), contraction)
            rows_fast.offer(
                name, compiled_form(_qk_norm_rope_kernel, key, constants), _qk_norm_rope_kernel.arg_names, arguments,
                per_program, torch.ops.det_plugin.qk_norm_rope, call, (queries, keys),
            )  # fmt: skip
    return queries, keys


def qk_norm_rope(
    qkv: torch.Tensor, positions: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor,
    cos_sin: torch.Tensor, num_heads: int, num_kv_heads: int, eps: float, contraction: str = "first",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Normalised and rotated query and key heads.

    Args:
        qkv: [tokens, (num_heads + 2 num_kv_heads) * d], bfloat16, float16 or float32; queries, keys, values in turn;
            last dimension contiguous.
        positions: [tokens], int64.
        q_weight, k_weight: [d], qkv's dtype; d even.
        cos_sin: [positions, d], cosines then sines of the d / 2 angles; any float dtype.
        num_heads, num_kv_heads: heads of queries and of keys.
        eps: added to the mean square.
        contraction: one of :data:`CONTRACTIONS`.

    Returns:
        queries [tokens, num_heads * d] and keys [tokens, num_kv_heads * d], contiguous, qkv's dtype.

    Raises:
        ValueError: naming the argument, what it got and what it accepts.
    """
    return torch.ops.det_plugin.qk_norm_rope(
        qkv, positions, q_weight, k_weight, cos_sin, num_heads, num_kv_heads, eps, contraction
    )


def find_contraction(separate: Callable[..., tuple[torch.Tensor, torch.Tensor]], *arguments: Any) -> str | None:
    """The contraction with which :func:`qk_norm_rope` gives the bytes of norms and rotary embedding apart.

    Args:
        separate: takes ``arguments`` and returns queries and keys as :func:`qk_norm_rope` does.
        arguments: those of :func:`qk_norm_rope`, without the contraction; some thousand heads tell them apart.

    Returns:
        None when no contraction matches: then the operators must stay apart.
    """
    fused: Any = qk_norm_rope_kernel
    want = [part.contiguous().view(torch.uint8) for part in separate(*arguments)]
    for contraction in CONTRACTIONS:
        got = fused(*arguments, contraction)
        if all(torch.equal(a.view(torch.uint8), b) for a, b in zip(got, want, strict=True)):
            return contraction
    return None
