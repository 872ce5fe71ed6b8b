"""The order of float32 products: its fused multiply-add against the C library's, its blocks, its accuracy."""

from __future__ import annotations

import ctypes
import ctypes.util

import numpy as np
import torch

from det_plugin.ops.blocked_sum import SUM_BLOCK, blocked_product, fused_multiply_add
from det_plugin.ops.bmm import bmm_reference


def c_fma(a, b, c):
    fma = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fma.argtypes, fma.restype = [ctypes.c_float] * 3, ctypes.c_float
    return np.array([fma(*row) for row in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)], np.float32)


def assert_same_bytes(got, want):
    got = got.numpy()
    nan = np.isnan(want)
    assert np.array_equal(np.isnan(got), nan)
    assert np.array_equal(got.view(np.int32)[~nan], want.view(np.int32)[~nan])


def test_fused_multiply_add_rounds_once():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (3, 20000), generator=generator, dtype=torch.int64).to(torch.int32)
    a, b, c = bits.view(torch.float32)  # all exponents, infinities and NaN among them
    assert_same_bytes(fused_multiply_add(a, b, c), c_fma(a, b, c))
    a, b, c = torch.randn(3, 20000, generator=generator)
    assert_same_bytes(fused_multiply_add(a, b, c), c_fma(a, b, c))
    assert_same_bytes(fused_multiply_add(a, b, -a * b), c_fma(a, b, -a * b))
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), float("nan"), 2.0**-149, -(2.0**-126), 3e38])
    a, b, c = torch.cartesian_prod(special, special, special).unbind(1)
    assert_same_bytes(fused_multiply_add(a, b, c), c_fma(a, b, c))


def test_control_a_sum_rounded_to_float64_first_meets_a_false_tie():
    a, b, c = torch.tensor([2.0**-24 + 2.0**-47]), torch.tensor([1 - 2.0**-23]), torch.tensor([1 + 2.0**-23])
    assert_same_bytes(fused_multiply_add(a, b, c), c_fma(a, b, c))
    assert_same_bytes(fused_multiply_add(-a, b, -c), c_fma(-a, b, -c))
    twice = (a.double() * b.double() + c.double()).float()
    assert twice != fused_multiply_add(a, b, c)


def test_blocks_are_added_one_after_the_other():
    k = 3 * SUM_BLOCK + 5
    x, w = torch.randn(2, 4, k), torch.randn(2, 6, k)
    blocks = [slice(start, start + SUM_BLOCK) for start in range(0, k, SUM_BLOCK)]
    total = torch.zeros(2, 4, 6)
    for block in blocks:
        part = torch.zeros(2, 4, 6)
        for i in range(k)[block]:
            part = fused_multiply_add(x[:, :, None, i], w[:, None, :, i], part)
        total = total + part
    assert torch.equal(blocked_product(x, w), total)
    assert not torch.equal(blocked_product(x, w, k), total)  # negative control: one chain
    assert torch.equal(bmm_reference(x, w.transpose(1, 2)), total)
    assert blocked_product(x[..., :0], w[..., :0]).eq(0).all()


def test_error_is_below_half_of_one_chains():
    for k in (576, 1536, 6144):
        x, w = torch.randn(32, k), torch.randn(32, k)
        exact = x.double() @ w.double().T
        blocks, chain = ((blocked_product(x, w, b).double() - exact).norm() for b in (SUM_BLOCK, k))
        assert blocks < 0.5 * chain, k
