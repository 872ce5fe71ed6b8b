"""What the kernel benchmarks run, stock and deterministic, and how many bytes and operations it needs.

Bytes count every input read once and every output written once; operations count a multiply-add as two and an
exponential as one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))
import attention_check
import sampler_check

import det_plugin.ops._custom_ops  # noqa: F401  registers torch.ops.det_plugin.*
from det_plugin.attention import fa3, reference
from det_plugin.errors import UnsupportedError
from det_plugin.evidence.certificates import first_difference
from det_plugin.ops import linear_cuda
from det_plugin.ops.linear_tuning import ROTATION_BYTES, rotating_weights
from det_plugin.ops.qk_norm_rope import qk_norm_rope_reference
from det_plugin.sampling.reference import RowParams, sample_reference

Call = Callable[[], Any]

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
VOCAB = sampler_check.VOCAB
EPS = 1e-6
PAGES = {"fa3": 16, "triton": 64, "flashinfer": 16, "stock": 16, "stock_triton": 16}
"""Keys per page: each backend's default in the host."""
STOCK_ATTENTION = {"fa3": "stock", "triton": "stock_triton", "flashinfer": "stock"}
STOCK_NAMES = {"stock": "the host's FA3", "stock_triton": "the host's Triton kernel"}
POOL_TOKENS = 400_000
MAX_ERROR = 0.01
"""Largest relative error (Frobenius norm) against float64 or the host's kernel: about two roundings to bfloat16."""


class UnavailableError(Exception):
    """A case, or its stock side, cannot run here; the message says why."""


@dataclass
class Prepared:
    """One case, ready to run.

    Attributes:
        deterministic: calls that rotate over more memory than the L2 cache holds.
        stock: makes the same for the engine without the plugin; raises UnavailableError where it isn't there.
        stock_name: what the stock side runs.
        bytes: bytes that one call must move.
        flop: floating-point operations of one call; None where counting them says nothing.
        check: raises AssertionError when the deterministic result is wrong.
        schedule: what the deterministic side runs, where it has a choice.
    """

    deterministic: Sequence[Call]
    stock: Callable[[], Sequence[Call]]
    stock_name: str
    bytes: int
    flop: int | None
    check: Call
    schedule: str | None = None


def same_bytes(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Raise AssertionError at the first byte that differs."""
    difference = first_difference(want, got)
    if difference is not None:
        raise AssertionError(f"{what}: first difference at {difference[0]}: 0x{difference[1]}, got 0x{difference[2]}")


def close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Raise AssertionError when the relative error is above :data:`MAX_ERROR`, or no number."""
    error = ((got.double() - want.double()).norm() / want.double().norm()).item()
    if not error <= MAX_ERROR:
        raise AssertionError(f"{what}: relative error {error:.2e}, expected at most {MAX_ERROR}")


def copies(size: int) -> int:
    """How many inputs of ``size`` bytes to rotate over."""
    return max(2, min(64, ROTATION_BYTES // max(1, size) + 1))


@functools.cache
def host_operators() -> Any:
    """The host's compiled operators.

    Raises:
        UnavailableError: vLLM's CUDA build is not installed.
    """
    try:
        import vllm._custom_ops as operators
    except (ImportError, OSError) as error:
        raise UnavailableError(f"vLLM cannot be imported ({error})") from None
    if not hasattr(torch.ops._C, "rms_norm"):
        raise UnavailableError("vLLM's compiled operators are not loaded")
    return operators


# --- row operators ------------------------------------------------------------------------------------------


def prepare_linear(n: int, k: int, m: int) -> Prepared:
    """y = x Wᵀ, x [m, k], W [n, k]."""
    weights = rotating_weights(n, k, DTYPE, DEVICE)
    x = torch.randn(m, k, device=DEVICE, dtype=DTYPE)
    operator = torch.ops.det_plugin.linear
    plan = linear_cuda.dispatcher.plan(n, k, DTYPE, False, 0)

    def check() -> None:
        w = weights[0]
        y = operator(x, w)
        close(y[:64, :512], x[:64].double() @ w[:512].double().T, "linear")
        same_bytes(operator(x[m - 1 :], w), y[m - 1 :], "linear, the last row alone")

    return Prepared(
        [partial(operator, x, w) for w in weights],
        lambda: [partial(torch.nn.functional.linear, x, w) for w in weights],
        "cuBLAS", (n * k + m * k + m * n) * DTYPE.itemsize, 2 * m * n * k, check, plan.schedule(min(m, plan.max_rows)),
    )  # fmt: skip


def prepare_rms_norm(width: int, rows: int) -> Prepared:
    """RMS norm of [rows, width]."""
    w = 1 + 0.2 * torch.randn(width, device=DEVICE, dtype=DTYPE)
    xs = [torch.randn(rows, width, device=DEVICE, dtype=DTYPE) for _ in range(copies(2 * rows * width * 2))]
    operator = torch.ops.det_plugin.rms_norm

    def host(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        host_operators().rms_norm(y, x, w, EPS)
        return y

    def check() -> None:
        y = operator(xs[0], w, EPS)
        x = xs[0].double()
        close(y, x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * w.double(), "rms_norm")
        same_bytes(operator(xs[0][rows - 1 :], w, EPS), y[rows - 1 :], "rms_norm, the last row alone")

    def host_calls() -> list[Call]:
        host_operators()
        return [partial(host, x) for x in xs]

    size = rows * width
    return Prepared(
        [partial(operator, x, w, EPS) for x in xs],
        host_calls, "the host's CUDA kernel", (2 * size + width) * DTYPE.itemsize, 4 * size, check,
    )  # fmt: skip


def prepare_fused_add_rms_norm(width: int, rows: int) -> Prepared:
    """Residual add and RMS norm of [rows, width]; the host's kernel writes in place."""
    w = 1 + 0.2 * torch.randn(width, device=DEVICE, dtype=DTYPE)
    make = lambda: torch.randn(rows, width, device=DEVICE, dtype=DTYPE)
    pairs = [(make(), make()) for _ in range(copies(4 * rows * width * 2))]
    operator = torch.ops.det_plugin.fused_add_rms_norm

    def check() -> None:
        x, residual = pairs[0]
        y, total = operator(x, residual, w, EPS)
        same_bytes(total, x + residual, "fused_add_rms_norm, the sum")
        same_bytes(y, torch.ops.det_plugin.rms_norm(total, w, EPS), "fused_add_rms_norm, the norm")

    def host_calls() -> list[Call]:
        return [partial(host_operators().fused_add_rms_norm, x, residual, w, EPS) for x, residual in pairs]

    size = rows * width
    return Prepared(
        [partial(operator, x, residual, w, EPS) for x, residual in pairs],
        host_calls, "the host's CUDA kernel, in place", (4 * size + width) * DTYPE.itemsize, 5 * size, check,
    )  # fmt: skip


def prepare_qk_norm_rope(heads: int, kv_heads: int, size: int, tokens: int) -> Prepared:
    """Norms of query and key heads and rotary embedding of [tokens, (heads + 2 kv_heads) size]."""
    width = (heads + 2 * kv_heads) * size
    inputs = [torch.randn(tokens, width, device=DEVICE, dtype=DTYPE) for _ in range(copies(2 * tokens * width * 2))]
    weights = [1 + 0.2 * torch.randn(size, device=DEVICE, dtype=DTYPE) for _ in range(2)]
    positions = torch.randint(0, 40960, (tokens,), device=DEVICE)
    steps = torch.arange(size // 2, device=DEVICE) * 2 / size
    angles = torch.arange(40960, device=DEVICE)[:, None] * 1e6**-steps
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(DTYPE)
    rest = (positions, *weights, cos_sin, heads, kv_heads, EPS, "first")
    operator = torch.ops.det_plugin.qk_norm_rope

    def host(qkv: torch.Tensor) -> None:
        host_operators().fused_qk_norm_rope(
            qkv, heads, kv_heads, kv_heads, size, EPS, *weights, cos_sin, True, positions
        )

    def check() -> None:
        q, k = operator(inputs[0], *rest)
        want = qk_norm_rope_reference(inputs[0][:64], positions[:64], *rest[1:])
        close(q[:64], want[0], "qk_norm_rope, queries")
        close(k[:64], want[1], "qk_norm_rope, keys")
        last = operator(inputs[0][tokens - 1 :], positions[tokens - 1 :], *rest[1:])
        same_bytes(last[0], q[tokens - 1 :], "qk_norm_rope, the last token alone")
        same_bytes(last[1], k[tokens - 1 :], "qk_norm_rope, the last token alone")

    def host_calls() -> list[Call]:
        if not hasattr(host_operators(), "fused_qk_norm_rope") or not hasattr(torch.ops._C, "fused_qk_norm_rope"):
            raise UnavailableError("the host has no fused_qk_norm_rope")
        return [partial(host, qkv) for qkv in inputs]

    elements = tokens * (heads + kv_heads) * size
    moved = 2 * elements * DTYPE.itemsize + tokens * (positions.itemsize + size * DTYPE.itemsize)
    return Prepared(
        [partial(operator, qkv, *rest) for qkv in inputs],
        host_calls, "the host's fused CUDA kernel, in place", moved, 7 * elements, check,
    )  # fmt: skip


def prepare_log_softmax(width: int, rows: int) -> Prepared:
    """log_softmax of bfloat16 [rows, width] to float32."""
    xs = [4 * torch.randn(rows, width, device=DEVICE, dtype=DTYPE) for _ in range(copies(rows * width * 6))]
    operator = torch.ops.det_plugin.log_softmax

    def check() -> None:
        y = operator(xs[0])
        close(y, torch.log_softmax(xs[0].double(), -1), "log_softmax")
        same_bytes(operator(xs[0][rows - 1 :]), y[rows - 1 :], "log_softmax, the last row alone")

    size = rows * width
    return Prepared(
        [partial(operator, x) for x in xs],
        lambda: [partial(torch.log_softmax, x, -1, dtype=torch.float32) for x in xs],
        "torch.log_softmax", size * (DTYPE.itemsize + 4), 4 * size, check,
    )  # fmt: skip


# --- attention ----------------------------------------------------------------------------------------------


@functools.cache
def pool(page: int, kv_heads: int, size: int) -> Any:
    """A paged cache, kept for all attention cases with this page size."""
    return attention_check.Pool(kv_heads, size, page, POOL_TOKENS)


def require_backend(name: str, size: int) -> None:
    """Raise UnavailableError unless a backend's kernel can be loaded at once."""
    try:
        if name in ("fa3", "stock"):
            fa3.load()
        elif name == "stock_triton":
            from vllm.v1.attention.ops.triton_unified_attention import unified_attention  # noqa: F401
        elif name == "flashinfer":
            from flashinfer.jit.attention import gen_batch_prefill_module

            spec = gen_batch_prefill_module("fa2", DTYPE, DTYPE, DTYPE, torch.int32, size, size, 0, False, False, False)
            if not spec.is_compiled:
                raise UnavailableError(
                    "FlashInfer's module is not built, which takes minutes; "
                    "tests/gpu/attention_check.py --backends flashinfer builds it"
                )
    except (ImportError, OSError, UnsupportedError) as error:
        raise UnavailableError(f"{name} is not available ({error})") from None


def prepare_attention(backend: str, heads: tuple[int, int, int], kind: str, count: int, context: int) -> Prepared:
    """``count`` requests of ``context`` keys: one query row each (decode), or all rows (prefill)."""
    require_backend(backend, heads[2])
    out: list[torch.Tensor] = []

    def calls(name: str) -> list[Call]:
        require_backend(name, heads[2])
        keys = pool(PAGES[name], *heads[1:])
        batches = attention_check.rotated_batches(keys, heads, kind, count, context)
        if not out:
            out.append(torch.empty_like(batches[0].q))
        return attention_check.layer_calls(name, heads, keys, batches, out[0])

    deterministic = calls(backend)
    other = STOCK_ATTENTION[backend]

    def check() -> None:
        batch, keys = deterministic[0].args[:2]  # type: ignore[attr-defined]
        deterministic[0]()
        first = batch.requests[0]
        rows = min(16, first.q.shape[0])
        got = batch.rows(out[0], first)[-rows:]
        index = torch.as_tensor(first.pages, device=DEVICE)
        k, v = (reference.gather_pages(cache, index, context) for cache in (keys.k, keys.v))
        close(got, reference.attention_reference(first.q[-rows:], k, v, scale=heads[2] ** -0.5), f"{backend} {kind}")

    h, hk, d = heads
    rows, visible = (1, context) if kind == "decode" else (context, context * (context + 1) // 2)
    moved = count * (2 * context * hk * d + 2 * rows * h * d) * DTYPE.itemsize
    return Prepared(deterministic, partial(calls, other), STOCK_NAMES[other], moved, 4 * count * visible * h * d, check)


# --- sampling -----------------------------------------------------------------------------------------------


def prepare_sampling(rows: int, parameters: dict[str, Any]) -> Prepared:
    """One sampling step over bfloat16 logits [rows, VOCAB] as a language model gives them."""
    params = [RowParams(seed=i, position=100 + i, **parameters) for i in range(rows)]
    batches = [
        sampler_check.Batch(sampler_check.peaked_logits(rows, VOCAB, str(DEVICE)).to(DTYPE), params)
        for _ in range(min(16, copies(rows * VOCAB * DTYPE.itemsize)))
    ]

    def host_calls() -> list[Call]:
        try:
            step = sampler_check.stock_step()
        except (ImportError, OSError) as error:
            raise UnavailableError(f"vLLM cannot be imported ({error})") from None
        return [partial(step, batch, "top_k" in parameters, "top_p" in parameters) for batch in batches]

    def check() -> None:
        tokens = batches[0].sample()
        some = sorted({0, rows - 1})
        host = batches[0].logits[some].float().cpu().numpy()
        want = [sample_reference(row, params[i]) for row, i in zip(host, some, strict=True)]
        if tokens[some].tolist() != want:
            raise AssertionError(f"sampling: got tokens {tokens[some].tolist()} in rows {some}, expected {want}")

    moved = rows * (VOCAB * DTYPE.itemsize + 8)
    return Prepared([batch.sample for batch in batches], host_calls, "the host's Triton kernels", moved, None, check)
