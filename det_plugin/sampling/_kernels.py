"""Triton functions shared by the sampler's kernels: the arithmetic of :mod:`det_plugin.sampling.noise`.

Every kernel that uses them is launched with ``enable_fp_fusion=False``, so each multiplication and addition
rounds once, as specified, and a row's bits do not depend on the kernel that computes them.
"""

from __future__ import annotations

from det_plugin.ops._triton import constant, tl, triton
from det_plugin.sampling import noise

M0, M1 = constant(noise.PHILOX_M0), constant(noise.PHILOX_M1)
W0, W1 = constant(noise.PHILOX_W0), constant(noise.PHILOX_W1)
SQH = constant(noise.SQRT_HALF_BITS)
LN2_HI, LN2_LO = constant(noise.LN2_HI), constant(noise.LN2_LO)
L0, L1, L2, L3, L4, L5, L6 = (constant(c) for c in noise.LN_COEFFS)
E0, E1, E2, E3, E4, E5 = (constant(c) for c in noise.EXP2_COEFFS)
LOG2_E = constant(noise.LOG2_E)
GREEDY_EPS = constant(1e-5)
BIG = constant(2**31 - 1)


@triton.jit
def philox_words(group, position, stream, seed):
    """Four uint32 words for each id group (int32 vector); position and seed are int64 scalars."""
    c0 = group.to(tl.uint32)
    zero = c0 * 0
    c1 = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = zero + stream.to(tl.uint32)
    c3 = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    m0 = tl.full(c0.shape, M0, tl.uint32)
    m1 = tl.full(c0.shape, M1, tl.uint32)
    for _ in tl.static_range(10):
        h0 = tl.umulhi(c0, m0)
        h1 = tl.umulhi(c2, m1)
        l0 = c0 * m0
        l1 = c2 * m1
        c0 = h1 ^ c1 ^ k0
        c1 = l1
        c2 = h0 ^ c3 ^ k1
        c3 = l0
        k0 = (k0.to(tl.uint64) + W0).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + W1).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _ln1p(e, f):
    acc = f * L6 + L5
    acc = acc * f + L4
    acc = acc * f + L3
    acc = acc * f + L2
    acc = acc * f + L1
    acc = acc * f + L0
    y = acc * f * (f * f)
    y = y - 0.5 * (f * f)
    y = y + e * LN2_LO
    y = f + y
    return y + e * LN2_HI


@triton.jit
def _split(x):
    bits = x.to(tl.int32, bitcast=True)
    e = (bits - SQH) >> 23
    f = (bits - (e << 23)).to(tl.float32, bitcast=True) - 1.0
    return e.to(tl.float32), f


@triton.jit
def gumbel(r):
    """Gumbel noise of random uint32 words."""
    u = (r.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    v = ((~r).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    e, f = _split(v)
    small = r < 1073741824
    x = -_ln1p(tl.where(small, 0.0, e), tl.where(small, -u, f))
    e, f = _split(x)
    return -_ln1p(e, f)


@triton.jit
def weight(x):
    """2**x, x <= 0, as int64 with 40 fraction bits."""
    live = x > -64.0
    x = tl.where(live, x, 0.0)
    i = tl.floor(x)
    f = x - i
    acc = f * E5 + E4
    acc = acc * f + E3
    acc = acc * f + E2
    acc = acc * f + E1
    acc = acc * f + E0
    mantissa = ((acc * f + 1.0) * 8388608.0).to(tl.int32).to(tl.int64)
    shift = tl.minimum(-i, 63.0).to(tl.int32).to(tl.int64)
    return tl.where(live, (mantissa << 17) >> shift, 0)


@triton.jit
def pick(score, token):
    """(largest score, smallest id that has it) of two vectors."""
    best = tl.max(score, axis=0)
    return best, tl.min(tl.where(score == best, token, BIG), axis=0)
