"""The operators' Triton kernels on the CPU: indexing, and the order of every sum, bit for bit.

Run with TRITON_INTERPRET=1.  The interpreter rounds to bfloat16 by truncation and multiplies bfloat16 matrices
wrongly, so bit-exact tests take float16 and float32, and products of bfloat16 are widened first.
"""

import ctypes
import ctypes.util
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from det_plugin.evidence.certificates import Certificate
from det_plugin.ops import linear_schedules, linear_tuning
from det_plugin.ops._triton import INTERPRET, tree_sum_reference
from det_plugin.ops.blocked_sum import fused_multiply_add
from det_plugin.ops.bmm import bmm_kernel, bmm_reference
from det_plugin.ops.linear_cuda import linear_reference
from det_plugin.ops.linear_plan import DEFAULT_TABLES, Plan, certification_data
from det_plugin.ops.linear_schedules import CANONICAL, Tile, run_tile
from det_plugin.ops.mean import mean_kernel, mean_reference
from det_plugin.ops.rms_norm import (
    fused_add_rms_norm_kernel,
    fused_add_rms_norm_reference,
    rms_norm_kernel,
    rms_norm_reference,
)
from det_plugin.ops.softmax import softmax_kernel, softmax_reference

if not INTERPRET:
    raise RuntimeError("run with TRITON_INTERPRET=1 (make interpreter)")

TILES = [
    "pointer-64x64x64-w4-s3",
    "pointer-16x32x64-w4-s3",
    "pointer-32x16x32-w4-s2",
    "tma-16x32x64-w4-s3",
    "swap-16x64x64-w4-s3",
    "persistent-32x32x32-w4-s3",
]
FLOAT32_TILES = ["pointer-32x16x32-w4-s2", *(name for _, name in DEFAULT_TABLES[torch.float32])]
CASES = [
    *itertools.product(TILES, [torch.float16, torch.bfloat16]),
    *itertools.product(FLOAT32_TILES, [torch.float32]),
]
EPS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}


def randn(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(tile, x, w, bias=None):
    y = torch.full((x.shape[0], w.shape[0]), float("nan"), dtype=x.dtype)
    run_tile(Tile.parse(tile) if isinstance(tile, str) else tile, x, w, bias, y)
    return y


def sequential_tiles(x, w, tile):
    """The kernel's order in numpy: K blocks one after the other, added to one fp32 accumulator."""
    k = x.shape[1]
    blocks = -(-k // tile.block_k)

    def padded(t, rows):
        out = np.zeros((rows, blocks * tile.block_k), np.float32)
        out[: t.shape[0], :k] = t.float().numpy()
        return out

    y = np.empty((x.shape[0], w.shape[0]), np.float32)
    for i in range(0, x.shape[0], tile.block_m):
        for j in range(0, w.shape[0], tile.block_n):
            a = padded(x[i : i + tile.block_m], tile.block_m)
            b = padded(w[j : j + tile.block_n], tile.block_n)
            total = np.zeros((tile.block_m, tile.block_n), np.float32)
            for start in range(0, a.shape[1], tile.block_k):
                part = slice(start, start + tile.block_k)
                total = np.matmul(a[:, part], b[:, part].T, dtype=np.float32) + total
            target = y[i : i + tile.block_m, j : j + tile.block_n]
            target[:] = total[: target.shape[0], : target.shape[1]]
    return torch.from_numpy(y).to(x.dtype)


@pytest.mark.parametrize(("tile", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8, 8), (5, 40, 72), (33, 64, 128), (70, 136, 200)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_tile_indexes_every_element(tile, shape, dtype, has_bias):
    """Small integers: every order gives the exact result, so any wrong index shows."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(m)
    x = torch.randint(-2, 3, (m, k), generator=generator).to(dtype)
    w = torch.randint(-2, 3, (n, k), generator=generator).to(dtype)
    bias = torch.randint(-3, 4, (n,), generator=generator).to(dtype) if has_bias else None
    want = x.double() @ w.double().T + (0 if bias is None else bias.double())
    assert want.abs().max() <= 256  # exact in every dtype
    assert torch.equal(run(tile, x, w, bias), want.to(dtype))


@pytest.mark.parametrize("tile", ["pointer-64x64x64-w4-s3", "pointer-16x32x64-w4-s3"])
def test_k_is_walked_in_order_in_one_accumulator(tile):
    x, w = randn(37, 200, dtype=torch.float16), randn(70, 200, dtype=torch.float16, seed=1)
    assert torch.equal(run(tile, x, w), sequential_tiles(x, w, Tile.parse(tile)))


def test_negative_control_another_order_differs():
    x, w = randn(37, 200, dtype=torch.float32), randn(70, 200, dtype=torch.float32, seed=1)
    tile = CANONICAL[torch.float32]
    backwards = sequential_tiles(x.flip(1), w.flip(1), tile)
    assert not torch.equal(run(tile, x, w), backwards)


def blocked(x, w, block, bias=None):
    """float32's order, one C library fused multiply-add at a time; block = K is one chain over all of K."""
    fma = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fma.argtypes, fma.restype = [ctypes.c_float] * 3, ctypes.c_float
    y = np.zeros((len(x), len(w)), np.float32)
    for i, j in np.ndindex(*y.shape):
        products = list(zip(x[i].tolist(), w[j].tolist(), strict=True))
        for start in range(0, len(products), block):
            part = 0.0
            for a, b in products[start : start + block]:
                part = fma(a, b, part)
            y[i, j] += np.float32(part)
        if bias is not None:
            y[i, j] += np.float32(bias[j])
    return torch.from_numpy(y)


@pytest.fixture
def fused_dot(monkeypatch):
    """The interpreter's product of two tiles as the machine code has it: k rising, fused multiply-add."""

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        assert input_precision.name == "IEEE"
        x, w, total = (torch.from_numpy(np.ascontiguousarray(t.data)) for t in (a, b, d))
        for k in range(x.shape[1]):
            total = fused_multiply_add(x[:, k, None], w[None, k], total)
        return interpreter.TensorHandle(total.numpy(), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("tile", FLOAT32_TILES)
@pytest.mark.parametrize("k", [1, 31, 32, 33, 64, 77, 200, 577])
def test_float32_is_summed_in_blocks_of_32(fused_dot, tile, k):
    x, w, bias = (randn(*s, dtype=torch.float32, seed=i) for i, s in enumerate([(3, k), (7, k), (7,)]))
    want, chain = blocked(x, w, 32), blocked(x, w, k)
    assert torch.equal(run(tile, x, w), want)
    assert torch.equal(run(tile, x, w, bias), blocked(x, w, 32, bias))
    assert torch.equal(linear_reference(x, w, bias), blocked(x, w, 32, bias))
    assert torch.equal(want, chain) == (k <= 32)  # negative control: the old order


def test_float32_control_without_its_own_accumulator_the_kernel_sums_one_chain(fused_dot):
    x, w = randn(3, 77, dtype=torch.float32), randn(7, 77, dtype=torch.float32, seed=1)
    y = torch.empty(3, 7)
    linear_schedules._linear_pointer_kernel[(1, 1, 1)](
        x, w, y, y, 3, 7, 77, 0, 77, 1, 0, 77, 1, 0, None, 16, 16, 32, 8, False, False, "ieee", False, False
    )
    assert torch.equal(y, blocked(x, w, 77))
    assert not torch.equal(y, run(CANONICAL[torch.float32], x, w))


def test_float32_bmm_is_summed_in_blocks_of_32(fused_dot):
    a, b = randn(2, 3, 77, dtype=torch.float32), randn(2, 77, 5, dtype=torch.float32, seed=1)
    want = torch.stack([blocked(p, q.T, 32) for p, q in zip(a, b, strict=True)])
    assert torch.equal(bmm_kernel(a, b), want)
    assert torch.equal(bmm_reference(a, b), want)


@pytest.mark.parametrize("tile", ["tma-16x32x32-w4-s3", "swap-16x64x32-w4-s3", "pointer-64x64x64-w4-s3"])
def test_tiles_without_float32s_order_are_refused(tile):
    x, w = randn(3, 64, dtype=torch.float32), randn(8, 64, dtype=torch.float32)
    with pytest.raises(ValueError, match=f"tile: got '{tile}' for float32, expected a pointer tile with BK = 32"):
        run(tile, x, w)


@pytest.mark.parametrize(("tile", "dtype"), CASES, ids=str)
def test_accuracy(tile, dtype):
    x, w, bias = randn(20, 128, dtype=dtype), randn(48, 128, dtype=dtype), randn(48, dtype=dtype)
    want = x.double() @ w.double().T + bias.double()
    error = (run(tile, x, w, bias).double() - want).norm() / want.norm()
    # the interpreter truncates to bfloat16 instead of rounding
    assert error < (4 if dtype == torch.bfloat16 else 2) * max(EPS[dtype], 2.0**-22)


def test_odd_sizes_strides_and_offsets():
    tile = CANONICAL[torch.float16]
    big = randn(40, 90, dtype=torch.float16)
    weight = randn(91, 77, dtype=torch.float16, seed=2)
    x, w = big[1:34:2, 3:80], weight[:43]
    assert torch.equal(run(tile, x, w), run(tile, x.contiguous(), w.contiguous()))
    transposed = w.T.contiguous().T
    assert transposed.stride() != w.contiguous().stride()
    assert torch.equal(run(tile, x, transposed), run(tile, x.contiguous(), w.contiguous()))
    assert torch.equal(run(tile, x, w), sequential_tiles(x, w, tile))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_bmm_equals_linear_in_each_batch(dtype):
    a, b = randn(3, 17, 70, dtype=dtype), randn(3, 70, 33, dtype=dtype, seed=1)
    y = bmm_kernel(a, b)
    for i in range(3):
        assert torch.equal(y[i], run(CANONICAL[dtype], a[i], b[i].T.contiguous()))
    want = a.double() @ b.double()
    assert (y.double() - want).norm() / want.norm() < 2 * max(EPS[dtype], 2.0**-22)
    assert (bmm_reference(a, b).double() - want).norm() / want.norm() < 2 * max(EPS[dtype], 2.0**-22)
    assert bmm_kernel(a[:0], b[:0]).shape == (0, 17, 33)
    with pytest.raises(ValueError, match=r"b: got shape \[3, 70, 33\], expected \[3, 17, N\]"):
        bmm_kernel(a.transpose(1, 2), b)


WIDTHS = [1, 7, 64, 128, 576, 1000, 4096]


@pytest.mark.parametrize("width", [*WIDTHS, 9000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_bit_for_bit(width, dtype, offset):
    if width > 8192 and dtype == torch.float32:
        dtype = torch.float16  # older interpreters do not fuse multiply-add; its products are exact here
    x, w = randn(5, 3, width, dtype=dtype), randn(width, dtype=dtype, seed=1)
    y = rms_norm_kernel(x, w, 1e-6, offset)
    assert torch.equal(y, rms_norm_reference(x, w, 1e-6, offset))
    wide = x.double()
    want = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (w.double() + offset)
    assert (y.double() - want).norm() / want.norm() < 2 * EPS[dtype] + 2.0**-22
    assert torch.equal(rms_norm_kernel(x, None, 1e-6), rms_norm_reference(x, None, 1e-6))


@pytest.mark.parametrize("width", [*WIDTHS, 9000])
def test_fused_add_equals_add_then_norm(width):
    dtype = torch.float16
    x, r = randn(6, width, dtype=dtype), randn(6, width, dtype=dtype, seed=1)
    w = randn(width, dtype=dtype, seed=2)
    y, total = fused_add_rms_norm_kernel(x, r, w, 1e-6)
    assert torch.equal(total, x + r)
    assert torch.equal(y, rms_norm_kernel(x + r, w, 1e-6))
    want, want_total = fused_add_rms_norm_reference(x, r, w, 1e-6)
    assert torch.equal(y, want)
    assert torch.equal(total, want_total)


def test_norm_rows_do_not_depend_on_count_position_or_strides():
    qkv = randn(9, 6 * 64, dtype=torch.float16)
    w = randn(64, dtype=torch.float16, seed=1)
    heads = qkv[:, 64 : 5 * 64].view(9, 4, 64)
    assert not heads.is_contiguous()
    y = rms_norm_kernel(heads, w, 1e-6)
    assert torch.equal(y, rms_norm_kernel(heads.contiguous(), w, 1e-6))
    for i in range(9):
        assert torch.equal(y[i], rms_norm_kernel(heads[i], w, 1e-6))
    deep = randn(2, 3, 4, 64, dtype=torch.float16).transpose(0, 2)
    assert torch.equal(rms_norm_kernel(deep, w, 1e-6), rms_norm_kernel(deep.contiguous(), w, 1e-6))
    last = randn(64, 9, dtype=torch.float16).T
    assert torch.equal(rms_norm_kernel(last, w, 1e-6), rms_norm_kernel(last.contiguous(), w, 1e-6))


def test_fused_add_on_strided_inputs_writes_to_neither():
    buffer = randn(8, 200, dtype=torch.float16)
    for x, r in [
        (buffer[:, :100], randn(8, 100, dtype=torch.float16, seed=1)),
        (randn(8, 100, dtype=torch.float16), buffer[:, 100:]),
        (randn(100, 8, dtype=torch.float16).T, randn(100, 8, dtype=torch.float16, seed=1).T),
        (buffer[:, :100].view(2, 4, 100), randn(8, 100, dtype=torch.float16).view(2, 4, 100)),
    ]:
        before = [t.clone() for t in (buffer, x, r)]
        y, total = fused_add_rms_norm_kernel(x, r, None, 1e-6)
        want, want_total = fused_add_rms_norm_reference(x, r, None, 1e-6)
        assert torch.equal(y, want)
        assert torch.equal(total, want_total)
        assert all(torch.equal(a, b) for a, b in zip(before, (buffer, x, r), strict=True))


def test_tree_is_by_pairs_negative_control():
    v = randn(50, 64, dtype=torch.float32)
    by_halves = v
    while by_halves.shape[1] > 1:
        half = by_halves.shape[1] // 2
        by_halves = by_halves[:, :half] + by_halves[:, half:]
    assert not torch.equal(tree_sum_reference(v), by_halves[:, 0])


@pytest.mark.parametrize("width", [1, 7, 128, 4096, 4097, 12345])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("log", [False, True])
def test_softmax(width, dtype, log):
    x = randn(4, width, dtype=dtype) * 4
    y = softmax_kernel(x, log)
    want = (torch.log_softmax if log else torch.softmax)(x.double(), -1)
    assert y.dtype == torch.float32
    assert torch.allclose(y.double(), want, rtol=1e-5, atol=3e-6 if log else 0)
    assert torch.allclose(y.double(), softmax_reference(x, log).double(), rtol=1e-5, atol=3e-6)
    strided = torch.cat([x, x], 1)[:, width:]
    for i in range(4):
        assert torch.equal(softmax_kernel(x[i], log), y[i])
        assert torch.equal(softmax_kernel(strided[i : i + 1], log)[0], y[i])


@pytest.mark.parametrize("width", [100, 9000])
def test_softmax_of_masked_rows(width):
    x = randn(4, width, dtype=torch.float32)
    x[0, 3:] = float("-inf")
    x[1] = float("-inf")
    x[2, 5] = float("nan")
    x[3, 5] = float("inf")
    y = softmax_kernel(x, False)
    assert (y[0, 3:] == 0).all()
    assert y[0, :3].sum().item() == pytest.approx(1, abs=1e-6)
    assert y[1:].isnan().all()
    logs = softmax_kernel(x[:1], True)
    assert (logs[0, 3:] == float("-inf")).all()


@pytest.mark.parametrize("dim", [[-1], [0], [1], [0, 2], [-3, 1, 2]])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_mean(dim, keepdim, dtype):
    x = randn(3, 5, 1100, dtype=dtype)
    y = mean_kernel(x, dim, keepdim)
    assert torch.equal(y, mean_reference(x, dim, keepdim))
    want = x.double().mean(dim, keepdim)
    assert y.shape == want.shape
    assert torch.allclose(y.double(), want, rtol=2 * EPS[dtype], atol=1e-6)


def test_mean_refusals():
    x = randn(3, 5, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"dim: got \[2\], expected distinct dimensions of a 2-d tensor"):
        mean_kernel(x, [2], False)
    with pytest.raises(ValueError, match="at least one element"):
        mean_kernel(x[:, :0], [1], False)
    with pytest.raises(ValueError, match=r"x: got dtype torch.int64"):
        mean_kernel(torch.ones(3, dtype=torch.int64), [0], False)
    with pytest.raises(ValueError, match=r"weight: got shape \[4\], expected \[5\]"):
        rms_norm_kernel(x, torch.ones(4), 1e-6)


def test_two_measured_tables_have_one_set_of_bytes(fused_dot, monkeypatch):
    """Whatever the clock says, a machine's own table picks among certified schedules."""
    canonical = CANONICAL[torch.float32].name
    tiles = sorted(linear_tuning.candidates(torch.float32, 48, 96))
    certificate = Certificate("linear", "key", canonical, (canonical, *tiles), {}, (1, 8192))
    monkeypatch.setattr(linear_tuning, "INTERVALS", (1, 8, 32))
    monkeypatch.setattr(linear_tuning, "POINTS", ())
    monkeypatch.setattr(linear_tuning, "ROTATION_BYTES", 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0))
    n, k = 48, 96
    unmeasured = Plan(n, k, torch.float32, False, ((None, canonical),), certificate, None)
    x, w, _ = certification_data(33, n, k, torch.float32, False, torch.device("cpu"))

    def tuned(seed):
        clock = random.Random(seed)

        def graph_time(calls):
            calls[0]()
            return clock.random()

        monkeypatch.setattr(linear_tuning, "graph_time", graph_time)
        table, whole = linear_tuning.measure_table(unmeasured, [], torch.device("cpu"))
        assert whole
        return Plan(n, k, torch.float32, False, table, certificate, None)

    plans = [tuned(seed) for seed in range(4)]
    compared, names = 0, set()
    for m in (1, 2, 8, 9, 32, 33):
        answers = []
        for plan in plans:
            y = torch.empty(m, n, dtype=torch.float32)
            plan.launcher(m)(x[:m], w, None, y, 0)
            answers.append(y.view(torch.int32))
        names |= {(m, plan.schedule(m)) for plan in plans}
        assert all(torch.equal(answers[0], other) for other in answers[1:])
        compared += m
    assert len(names) > 6, "the tables must differ"
    halves = [linear_reference(x[:, part], w[:, part]) for part in (slice(0, 48), slice(48, None))]
    wrong = halves[0] + halves[1]
    assert (wrong.view(torch.int32) != answers[0]).any(), "control: K in two halves has other bytes"
