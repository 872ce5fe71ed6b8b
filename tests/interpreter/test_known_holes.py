"""Failures published about other systems (docs/known_holes.md), on our Triton kernels under the interpreter.

Run with TRITON_INTERPRET=1.  Each invariance test has a control: the same comparison with the hole put in.
"""

from __future__ import annotations

import attention_cases as cases
import pytest
import torch

from det_plugin.attention import triton_paged
from det_plugin.ops import rms_norm as norms
from det_plugin.ops._triton import INTERPRET
from det_plugin.ops.bmm import bmm_kernel
from det_plugin.ops.linear_schedules import CANONICAL, Tile, run_tile
from det_plugin.ops.mean import mean_kernel
from det_plugin.ops.rms_norm import fused_add_rms_norm_kernel, rms_norm_kernel, rms_norm_reference
from det_plugin.ops.softmax import softmax_kernel

if not INTERPRET:
    raise RuntimeError("run with TRITON_INTERPRET=1 (make interpreter)")


SCALE = 1 / 96
EPS = {torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def same(a, b):
    return a.dtype == b.dtype and a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- row 3: head size 256, a prefill joins -----------------------------------------------------------------------


def part(batch, request, first=0, last=None):
    """Rows ``first`` to ``last`` of one request of a batch, alone; the request ends with row ``last``."""
    start, end = int(batch["start"][request]), int(batch["start"][request + 1])
    rows = end - start
    last = rows if last is None else last
    return dict(
        batch,
        q=batch["q"][start + first : start + last],
        start=torch.tensor([0, last - first], dtype=torch.int32),
        lens=batch["lens"][request : request + 1] - (rows - last),
        table=batch["table"][request : request + 1],
    )


@pytest.fixture(scope="module")
def wide_heads():
    """Heads of 256: a decoding request, alone and when a prefill joins, with the schedules of the default."""
    batch = cases.batch(2, 1, 256, [1, 20], [150, 90], 16, exact=True)
    return batch, cases.launch(part(batch, 0), None, scale=SCALE)


def test_row_3_head_size_256_when_a_prefill_joins(wide_heads):
    batch, alone = wide_heads
    joined = cases.launch(batch, None, scale=SCALE)
    assert same(joined[:1], alone)
    for row in (0, 19):  # the prefill's own rows, decoded
        decoded = cases.launch(part(batch, 1, row, row + 1), None, scale=SCALE)
        assert same(joined[1 + row : 2 + row], decoded)


def test_row_3_control_a_key_tile_that_follows_the_batch(wide_heads, monkeypatch):
    batch, alone = wide_heads
    monkeypatch.setattr(triton_paged, "BLOCK_KEYS", 16)  # what a tile picked by "has a prefill" amounts to
    assert not same(cases.launch(batch, None, scale=SCALE)[:1], alone)


# --- row 11: chunks smaller than any alignment -------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompt():
    """26 rows after 74 cached keys, in one piece."""
    batch = cases.batch(4, 2, 64, [26], [100], 16, exact=True)
    return batch, cases.launch(batch, None, scale=SCALE)


def chunked(batch, size):
    rows = batch["q"].shape[0]
    return torch.cat(
        [cases.launch(part(batch, 0, a, min(a + size, rows)), None, scale=SCALE) for a in range(0, rows, size)]
    )


@pytest.mark.parametrize("size", [1, 3, 7, 15, 17])
def test_row_11_chunks_below_every_alignment(prompt, size):
    batch, whole = prompt
    assert same(chunked(batch, size), whole)


def test_row_11_control_key_blocks_that_follow_the_chunk(prompt, monkeypatch):
    batch, whole = prompt
    monkeypatch.setattr(triton_paged, "BLOCK_KEYS", 16)
    assert not same(chunked(batch, 7), whole)


# --- row 4: a block size that flips at 256 rows ------------------------------------------------------------------

ROWS = (1, 255, 256, 257)


@pytest.fixture(scope="module")
def norm_rows():
    return randn(257, 256), randn(257, 256, seed=1), randn(256, seed=2)


def test_row_4_norm_on_both_sides_of_256_rows(norm_rows):
    x, _, w = norm_rows
    whole = rms_norm_kernel(x, w, 1e-6)
    for rows in ROWS:
        assert same(rms_norm_kernel(x[-rows:], w, 1e-6), whole[-rows:])


def test_row_4_fused_norm_on_both_sides_of_256_rows(norm_rows):
    x, r, w = norm_rows
    total = x + r
    whole = rms_norm_kernel(total, w, 1e-6)
    for rows in ROWS:
        y, residual = fused_add_rms_norm_kernel(x[:rows], r[:rows], w, 1e-6)
        assert same(y, whole[:rows])
        assert same(residual, total[:rows])


def test_row_4_control_a_block_that_flips_at_256_rows(norm_rows, monkeypatch):
    x, _, w = norm_rows
    small = rms_norm_kernel(x[:255], w, 1e-6)
    monkeypatch.setattr(norms, "MAX_LANES", 64)
    assert not same(rms_norm_kernel(x[:256], w, 1e-6)[:255], small)


# --- row 32: odd shapes ------------------------------------------------------------------------------------------

GUARD, MARK = 8192, 7.0
TILES = {
    torch.float16: ["pointer-64x64x64-w4-s3", "pointer-16x32x64-w4-s3"],
    torch.float32: ["pointer-128x64x32-w4-s3", "pointer-16x32x32-w4-s6"],
}
ODD = [(1, 1, 1), (3, 17, 1), (17, 3, 17), (1, 33, 4097), (3, 1, 4097), (5, 4097, 3), (4097, 3, 5), (65, 129, 3)]


@pytest.fixture
def guarded(monkeypatch):
    """Outputs allocated between marked guards; call the result to check that the guards are whole."""
    blocks, empty, zeros = [], torch.empty, torch.zeros

    def make(*shape, fill=float("nan"), dtype=None, device=None):
        shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        count = torch.Size(shape).numel()
        block = torch.full((count + 2 * GUARD,), MARK, dtype=dtype)
        blocks.append((block, count))
        return block[GUARD : GUARD + count].fill_(fill).view(shape)

    def check():
        assert blocks, "no output was allocated: nothing was tested"
        for block, count in blocks:
            assert (block[:GUARD] == MARK).all(), "written before the output"
            assert (block[GUARD + count :] == MARK).all(), "written behind the output"
        found = len(blocks)
        blocks.clear()
        return found

    check.make = make
    check.use = lambda: (
        monkeypatch.setattr(torch, "empty", make),
        monkeypatch.setattr(torch, "zeros", lambda *s, **kw: make(*s, fill=0.0, **kw)),
    )
    check.leave = lambda: (monkeypatch.setattr(torch, "empty", empty), monkeypatch.setattr(torch, "zeros", zeros))
    return check


def assert_close(y, want, dtype, k=1):
    assert not y.isnan().any()
    assert (y.double() - want).norm() <= (2 * EPS[dtype] + 2.0**-24 * max(4, k**0.5)) * want.norm()


@pytest.mark.parametrize(("m", "n", "k"), ODD, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_row_32_linear(guarded, m, n, k, dtype):
    tiles = {*TILES[dtype], CANONICAL[dtype].name} if m * n * k < 10_000 else {CANONICAL[dtype].name}
    x, w, bias = (randn(*s, dtype=dtype, seed=i) for i, s in enumerate([(m, k), (n, k), (n,)]))
    want = x.double() @ w.double().T + bias.double()
    for tile in sorted(tiles):
        y = guarded.make(m, n, dtype=dtype)
        run_tile(Tile.parse(tile), x, w, bias, y)
        assert_close(y, want, dtype, k)
        assert guarded() == 1


@pytest.mark.parametrize("tile", ["tma-16x32x64-w4-s3", "swap-16x64x64-w4-s3", "persistent-32x32x32-w4-s3"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 8), (3, 17, 8), (17, 3, 72), (65, 129, 24)], ids=str)
def test_row_32_linear_by_descriptors(guarded, tile, m, n, k):
    """These tiles ask for rows of whole 16 bytes; rows and columns may be odd."""
    x, w = randn(m, k, dtype=torch.float16), randn(n, k, dtype=torch.float16, seed=1)
    y = guarded.make(m, n, dtype=torch.float16)
    run_tile(Tile.parse(tile), x, w, None, y)
    assert_close(y, x.double() @ w.double().T, torch.float16, k)
    assert guarded() == 1


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (3, 17, 1), (17, 3, 17), (1, 3, 4097), (3, 129, 3), (65, 1, 33)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_row_32_bmm(guarded, m, n, k, dtype):
    a, b = randn(3, m, k, dtype=dtype), randn(3, k, n, dtype=dtype, seed=1)
    guarded.use()
    y = bmm_kernel(a, b)
    guarded.leave()
    assert_close(y, a.double() @ b.double(), dtype, k)
    assert guarded() == 1


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("width", [1, 3, 17, 4097])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_row_32_rows_of_odd_width(guarded, rows, width, dtype):
    x, w = randn(rows, width, dtype=dtype) + 0.25, randn(width, dtype=dtype, seed=1)
    wide = x.double()
    want = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w.double()
    for name, call, exact, kind in (
        ("rms_norm", lambda: rms_norm_kernel(x, w, 1e-6), want, dtype),
        ("mean", lambda: mean_kernel(x, [-1], False), wide.mean(-1), dtype),
        ("mean over rows", lambda: mean_kernel(x, [0], True), wide.mean(0, keepdim=True), dtype),
        ("softmax", lambda: softmax_kernel(x, False), wide.softmax(-1), torch.float32),
        ("log_softmax", lambda: softmax_kernel(x, True), wide.log_softmax(-1), torch.float32),
    ):
        if name == "mean over rows" and width > 100:
            continue  # as many programs as columns
        guarded.use()
        y = call()
        guarded.leave()
        assert y.shape == exact.shape, name
        assert_close(y, exact, kind, 16)
        assert guarded() >= 1, name
    assert same(rms_norm_kernel(x.half(), w.half(), 1e-6), rms_norm_reference(x.half(), w.half(), 1e-6))


def test_row_32_control_the_guards_see_a_kernel_that_writes_too_far(guarded):
    x, w = randn(3, 17), randn(5, 17, seed=1)
    y = guarded.make(2, 5, dtype=torch.float32)  # one row too few for three rows of x
    run_tile(Tile.parse(TILES[x.dtype][0]), x, w, None, y)
    with pytest.raises(AssertionError, match="behind the output"):
        guarded()
