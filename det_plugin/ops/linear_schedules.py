"""Schedules of the linear operator: Triton tiles and cuBLASLt algorithms, and the tables that rank them.

All of them carry out the order that :mod:`det_plugin.ops.linear_cuda` defines.  Names in tuning tables:

    pointer-BMxBNxBK-wW-sS      tiles loaded through pointers: any strides, any alignment
    tma-BMxBNxBK-wW-sS          tiles loaded by the bulk copy engine (compute capability 9.0 and above)
    swap-BMxBNxBK-wW-sS         the same with the operands exchanged, so that few rows fill narrow tiles
    persistent-BMxBNxBK-wW-sS   as tma, one program per multiprocessor
    cublaslt                    cuBLASLt, the algorithm that its heuristic ranks first for the row count
    cublaslt-A.T.S.C.W.O.I      one cuBLASLt algorithm, by its attributes

W warps, S pipeline stages.  float32 runs pointer tiles with BK = 32 only, the block of its order.  A table holds,
for one (dtype, N, K), ``[largest row count, name]`` pairs in rising order, the last one without bound (null).
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from det_plugin.ops._triton import (
    HAVE_TRITON,
    INTERPRET,
    begin,
    can_overlap,
    cdiv,
    forms,
    launch,
    tl,
    triton,
)
from det_plugin.ops.blocked_sum import SUM_BLOCK

if HAVE_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

Table = tuple[tuple[int | None, str], ...]

GROUP_M = 8
"""Row blocks of x that share the weight's tiles in the L2 cache."""

_NAME = re.compile(r"(pointer|tma|swap|persistent)-(\d+)x(\d+)x(\d+)-w(\d+)-s(\d+)")


@dataclass(frozen=True)
class Tile:
    """One Triton tiling: ``block_m`` rows of x by ``block_n`` rows of the weight, ``block_k`` deep."""

    kind: str
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int

    @property
    def name(self) -> str:
        """As tuning tables spell it."""
        return f"{self.kind}-{self.block_m}x{self.block_n}x{self.block_k}-w{self.warps}-s{self.stages}"

    def max_rows(self, block: int) -> int:
        """Largest row count that the tile is certified for and may serve, at most ``block``."""
        return min(block, 16 * self.block_m) if self.block_m < 64 else block

    @classmethod
    def parse(cls, name: str) -> "Tile":
        """Inverse of :attr:`name`.

        Raises:
            ValueError: ``name`` is not a tile's name.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"schedule: got {name!r}, expected like 'pointer-64x64x64-w4-s3' or 'cublaslt'")
        kind, *numbers = match.groups()
        return cls(kind, *map(int, numbers))


CANONICAL = {
    torch.bfloat16: Tile("pointer", 64, 64, 64, 4, 3),
    torch.float16: Tile("pointer", 64, 64, 64, 4, 3),
    torch.float32: Tile("pointer", 64, 64, SUM_BLOCK, 4, 2),
}
"""The tile that defines the bits, by dtype: slow, but runs on any shape and alignment."""


@triton.jit
def _tile_of(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Tile indices in an order that keeps GROUP_M row blocks of x in the L2 cache."""
    blocks_m = tl.cdiv(M, BLOCK_M)
    in_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    first_m = pid // in_group * GROUP_M
    size_m = tl.minimum(blocks_m - first_m, GROUP_M)
    return first_m + pid % in_group % size_m, pid % in_group // size_m


@triton.jit(do_not_specialize=["M"])
def _linear_pointer_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    K,
    x_batch_stride,
    x_row_stride,
    x_k_stride,
    w_batch_stride,
    w_row_stride,
    w_k_stride,
    y_batch_stride,
    zero,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCKED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """y[b] = x[b] w[b]^T (+ bias): one tile per program, K walked from 0 upwards in one fp32 accumulator.

    BLOCKED sums each BLOCK_K elements in an accumulator of their own and adds that to the total.  ``zero`` (0.0,
    else None) is what it starts from: a number that the compiler cannot see, or it folds the addition back into
    one accumulator.
    WIDEN converts operands to fp32 before the product (for the interpreter, whose bf16 product is wrong).
    """
    tile_m, tile_n = _tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    batch = tl.program_id(1).to(tl.int64)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows beyond the edge read row 0 and are not stored.
    row_m = tl.where(m < M, m, 0).to(tl.int64)
    row_n = tl.where(n < N, n, 0).to(tl.int64)
    x_at = x_ptr + batch * x_batch_stride + row_m[:, None] * x_row_stride + k[None, :] * x_k_stride
    w_at = w_ptr + batch * w_batch_stride + row_n[None, :] * w_row_stride + k[:, None] * w_k_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_at)
            w = tl.load(w_at)
        else:
            x = tl.load(x_at, mask=k[None, :] < K - start, other=0.0)
            w = tl.load(w_at, mask=k[:, None] < K - start, other=0.0)
        if WIDEN:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        if BLOCKED:
            total += tl.dot(x, w, tl.full((BLOCK_M, BLOCK_N), zero, tl.float32), input_precision=PRECISION)
        else:
            total = tl.dot(x, w, total, input_precision=PRECISION)
        x_at += BLOCK_K * x_k_stride
        w_at += BLOCK_K * w_k_stride
    if HAS_BIAS:
        total += tl.load(bias_ptr + row_n).to(tl.float32)[None, :]
    y_at = y_ptr + batch * y_batch_stride + row_m[:, None] * N + row_n[None, :]
    tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _tma_tile(
    x_desc,
    w_desc,
    bias_ptr,
    y_ptr,
    pid,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SWAP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    tile_m, tile_n = _tile_of(pid, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    if SWAP:  # noqa: SIM108 (the branches have different types)
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        x = x_desc.load([tile_m * BLOCK_M, start])
        w = w_desc.load([tile_n * BLOCK_N, start])
        if WIDEN:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        if SWAP:  # noqa: SIM108
            total = tl.dot(w, x.T, total)
        else:
            total = tl.dot(x, w.T, total)
    m = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if SWAP:
        total = tl.trans(total)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    mask = (m < M)[:, None] & (n < N)[None, :]
    tl.store(y_ptr + m[:, None] * N + n[None, :], total.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _linear_tma_kernel(
    x_desc,
    w_desc,
    bias_ptr,
    y_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SWAP: tl.constexpr,
    PERSISTENT: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As :func:`_linear_pointer_kernel`, operands brought by the bulk copy engine (zeros beyond the edges).

    SWAP computes the transposed tile, so that the matrix unit's long side runs along the weight's rows.
    PERSISTENT: each program takes every num_programs-th tile.
    """
    begin(OVERLAP)
    pid = tl.program_id(0)
    if PERSISTENT:
        tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
        for tile in tl.range(pid, tiles, tl.num_programs(0), flatten=True):
            _tma_tile(
                x_desc, w_desc, bias_ptr, y_ptr, tile, M, N, K,
                BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, HAS_BIAS, SWAP, WIDEN,
            )  # fmt: skip
    else:
        _tma_tile(
            x_desc, w_desc, bias_ptr, y_ptr, pid, M, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, HAS_BIAS, SWAP, WIDEN,
        )  # fmt: skip


def aligned(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether vendor kernels and the bulk copy engine can read both operands in place (16-byte rows)."""
    size = x.element_size()
    return (
        (x.data_ptr() | w.data_ptr() | x.stride(0) * size | w.stride(0) * size) % 16 == 0
        and x.stride(1) == 1
        and w.stride(1) == 1
    )


def run_tile(
    tile: Tile, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor
) -> tuple[Any, tuple]:
    """Launch one tile.

    Args:
        tile: any tile; kinds other than "pointer" need :func:`aligned` operands of 16 bits.
        x: [M, K], or [B, M, K] for "pointer".
        w: [N, K], or [B, N, K].
        bias: [N] contiguous, or None.
        y: [M, N] or [B, M, N], contiguous, written.

    Returns:
        ``(runner, constants)`` for :func:`bind_tile`; runner is None under the interpreter.

    Raises:
        ValueError: the tile does not carry out float32's order.
    """
    blocked = x.dtype == torch.float32
    if blocked and (tile.kind != "pointer" or tile.block_k != SUM_BLOCK):
        raise ValueError(f"tile: got {tile.name!r} for float32, expected a pointer tile with BK = {SUM_BLOCK}")
    m, k = x.shape[-2:]
    n = w.shape[-2]
    has_bias = bias is not None
    bias_arg = y if bias is None else bias
    blocks = cdiv(m, tile.block_m) * cdiv(n, tile.block_n)
    widen = INTERPRET and x.dtype == torch.bfloat16
    head = (tile.block_m, tile.block_n, tile.block_k, GROUP_M)
    overlap = tile.kind != "pointer" and can_overlap(x.device.index)
    arguments: tuple[Any, ...]
    constants: tuple[Any, ...]
    if tile.kind == "pointer":
        batched = x.dim() == 3
        strides = (
            x.stride(0) if batched else 0, x.stride(-2), x.stride(-1),
            w.stride(0) if batched else 0, w.stride(-2), w.stride(-1),
            y.stride(0) if batched else 0,
        )  # fmt: skip
        kernel = _linear_pointer_kernel
        grid = (blocks, x.shape[0] if batched else 1, 1)
        arguments = (x, w, bias_arg, y, m, n, k, *strides)
        zero, precision = (0.0, "ieee") if blocked else (None, "tf32")
        constants = (zero, *head, k % tile.block_k == 0, has_bias, precision, blocked, widen)
    else:
        strides = (0,) * 7
        persistent = tile.kind == "persistent"
        kernel = _linear_tma_kernel
        grid = (min(blocks, multiprocessors(x.device.index)) if persistent else blocks, 1, 1)
        arguments = (
            TensorDescriptor(x, x.shape, x.stride(), [tile.block_m, tile.block_k]),
            TensorDescriptor(w, w.shape, w.stride(), [tile.block_n, tile.block_k]),
            bias_arg, y, m, n, k,
        )  # fmt: skip
        constants = (*head, has_bias, tile.kind == "swap", persistent, widen, overlap)
    key = (tile, n, k, strides, forms(x, w, y, bias_arg))
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": overlap}
    return launch(kernel, key, grid, arguments, constants, **options), constants


def bind_tile(tile: Tile, m: int, n: int, k: int, otherwise: Callable[..., None] | None = None) -> Callable[..., None]:
    """A launcher ``launch(x, w, bias, y, stream)`` for ``m`` rows that remembers the compiled kernel.

    The memory is used for aligned operands with unit inner strides; others go through :func:`run_tile`, or
    to ``otherwise`` when the tile cannot read them.
    """
    pointer = tile.kind == "pointer"
    known: dict[tuple[int, int], tuple[Any, tuple]] = {}
    x_block, w_block = [tile.block_m, tile.block_k], [tile.block_n, tile.block_k]

    def launch(x, w, bias, y, stream) -> None:
        bias_arg = y if bias is None else bias
        x_stride, w_stride = x.stride(0), w.stride(0)
        found = known.get((x_stride, w_stride))
        ready = (
            found is not None
            and (x.data_ptr() | w.data_ptr() | y.data_ptr() | bias_arg.data_ptr()) & 15 == 0
            and x.stride(1) == 1
            and w.stride(1) == 1
        )
        if ready and found is not None:
            runner, constants = found
            if pointer:
                runner(x, w, bias_arg, y, m, n, k, 0, x_stride, 1, 0, w_stride, 1, 0, *constants, stream=stream)
            else:
                runner(
                    TensorDescriptor(x, (m, k), (x_stride, 1), x_block),
                    TensorDescriptor(w, (n, k), (w_stride, 1), w_block),
                    bias_arg, y, m, n, k, *constants, stream=stream,
                )  # fmt: skip
            return
        plain = aligned(x, w) and (y.data_ptr() | bias_arg.data_ptr()) & 15 == 0
        if not plain and otherwise is not None and not pointer:
            otherwise(x, w, bias, y, stream)
            return
        runner, constants = run_tile(tile, x, w, bias, y)
        if runner is not None and plain:
            known[x_stride, w_stride] = (runner, constants)

    return launch


@cache
def multiprocessors(device: int | None) -> int:
    """Number of multiprocessors of a GPU (4 without one, for the interpreter)."""
    if not torch.cuda.is_available():
        return 4
    return torch.cuda.get_device_properties(device or 0).multi_processor_count


def table_key(dtype: torch.dtype, n: int, k: int) -> str:
    """How a tuning table names a problem."""
    return f"{str(dtype).removeprefix('torch.')},N={n},K={k}"


def table_path(folder: Path, gpu: str) -> Path:
    """File of one GPU model's tuning table."""
    return folder / (re.sub(r"[^A-Za-z0-9]+", "_", gpu).strip("_") + ".json")


def load_tables(path: Path) -> dict[str, Table]:
    """Tuning tables of one file by :func:`table_key`; empty when the file does not exist.

    Raises:
        ValueError: the file is damaged, or names an unknown schedule.
    """
    if not path.exists():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("format") != 1:
        raise ValueError(f"{path}: got format {document.get('format')!r}, expected 1")
    return {key: check_table(rows, f"{path}: {key}") for key, rows in document["schedules"].items()}


def check_table(rows: Any, where: str) -> Table:
    """Validate ``[[largest row count or null, schedule], …]``.

    Raises:
        ValueError: bounds do not rise, the last one is not null, or a name is unknown.
    """
    table = tuple((None if bound is None else int(bound), str(name)) for bound, name in rows)
    bounds = [bound for bound, _ in table[:-1]]
    rising = all(b is not None for b in bounds) and bounds == sorted(set(bounds))  # type: ignore[type-var]
    if not table or table[-1][0] is not None or not rising:
        raise ValueError(f"{where}: got {rows!r}, expected rising row counts that end with null")
    for _, name in table:
        if not name.startswith("cublaslt"):
            Tile.parse(name)
    return table
