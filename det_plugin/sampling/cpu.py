"""Compiled CPU version of :mod:`det_plugin.sampling.reference`.

Contract.  Rows are walked one by one by code that sees that row alone, so neither the number of rows nor the
number of threads can matter.  Sums are exact integers; floats follow the specified fp32 arithmetic (numba
without fast-math contracts and reorders nothing).

Needs numba, which the CPU host requires anyway.  Kernels are compiled once and cached on disk; :func:`warm_up`
does it at start-up instead of at the first request.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from det_plugin.sampling.noise import (
    EXP2_COEFFS,
    GUMBEL_MAX,
    GUMBEL_MIN,
    LN2_HI,
    LN2_LO,
    LN_COEFFS,
    LOG2_E,
    PHILOX_M0,
    PHILOX_M1,
    PHILOX_ROUNDS,
    PHILOX_W0,
    PHILOX_W1,
    SQRT_HALF_BITS,
    TARGET,
)
from det_plugin.sampling.reference import GREEDY_EPS, log_min_p

_F = np.float32
_U = np.uint64
_BLOCK = 4096  # ids that 1024 Philox calls serve
_LOW = _U(0xFFFFFFFF)
_M0, _M1, _W0, _W1 = _U(PHILOX_M0), _U(PHILOX_M1), _U(PHILOX_W0), _U(PHILOX_W1)
_S32, _S17, _S23 = _U(32), np.int64(17), np.int32(23)
_ZERO, _HALF, _ONE = _F(0), _F(0.5), _F(1)
_SCALE = _F(2.0**-32)
_P23, _N23 = _F(2.0**23), _F(2.0**-23)
_LN2, _BIAS = _F(math.log(2)), _F(127)
_L0, _L1, _L2, _L3, _L4, _L5, _L6 = (_F(c) for c in LN_COEFFS)
_E0, _E1, _E2, _E3, _E4, _E5 = (_F(c) for c in EXP2_COEFFS)
_LN2_HI, _LN2_LO, _LOG2E = _F(LN2_HI), _F(LN2_LO), _F(LOG2_E)
_SQH = np.int32(SQRT_HALF_BITS)
_REACH = _F(GUMBEL_MAX - GUMBEL_MIN + 0.01)  # a logit this far below the maximum cannot be sampled
_NINF = _F(-np.inf)
_jit = njit(nogil=True, cache=True, fastmath=False, error_model="numpy")


@_jit
def _philox(c0, c1, c2, c3, k0, k1):
    for _ in range(PHILOX_ROUNDS):
        p0 = c0 * _M0
        p1 = c2 * _M1
        c0, c1, c2, c3 = (p1 >> _S32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _S32) ^ c3 ^ k1, p0 & _LOW
        k0 = (k0 + _W0) & _LOW
        k1 = (k1 + _W1) & _LOW
    return c0, c1, c2, c3


@_jit
def _philox_block(group, position, stream, seed, out):
    """Random words of the 4096 ids that start at group * 4, into out (uint32 [4096])."""
    c1, c3 = position & _LOW, position >> _S32
    for j in range(1024):
        w0, w1, w2, w3 = _philox(group + _U(j), c1, stream, c3, seed & _LOW, seed >> _S32)
        out[j] = np.uint32(w0)
        out[j + 1024] = np.uint32(w1)
        out[j + 2048] = np.uint32(w2)
        out[j + 3072] = np.uint32(w3)


@_jit
def _philox_one(token, position, stream, seed):
    i = _U(token)
    group = (i >> _U(12)) << _U(10) | (i & _U(1023))
    c1, c3 = position & _LOW, position >> _S32
    w0, w1, w2, w3 = _philox(group, c1, stream, c3, seed & _LOW, seed >> _S32)
    word = (i >> _U(10)) & _U(3)
    if word == _U(0):
        return np.uint32(w0)
    if word == _U(1):
        return np.uint32(w1)
    if word == _U(2):
        return np.uint32(w2)
    return np.uint32(w3)


@_jit
def _ln1p(e, f):
    acc = _L6
    acc = acc * f + _L5
    acc = acc * f + _L4
    acc = acc * f + _L3
    acc = acc * f + _L2
    acc = acc * f + _L1
    acc = acc * f + _L0
    z = f * f
    y = acc * f
    y = y * z
    y = y - _HALF * z
    y = y + e * _LN2_LO
    y = f + y
    return y + e * _LN2_HI


@_jit
def _f32_bits(x, cell):
    cell[0] = x
    return cell.view(np.int32)[0]


@_jit
def _bits_f32(b, cell):
    cell.view(np.int32)[0] = b
    return cell[0]


@_jit
def _ln(x, cell):
    b = _f32_bits(x, cell)
    e = np.int32((b - _SQH) >> _S23)
    f = _bits_f32(np.int32(b - (e << _S23)), cell) - _ONE
    return _ln1p(_F(e), f)


@_jit
def _gumbel(r, cell):
    if r < np.uint32(1 << 30):
        u = (_F(r) + _HALF) * _SCALE
        x = -_ln1p(_ZERO, -u)
    else:
        x = -_ln((_F(np.uint32(~r)) + _HALF) * _SCALE, cell)
    return -_ln(x, cell)


@_jit
def _weight(x):
    """Fixed-point 2**x, x <= 0."""
    if not x > _F(-64):
        return np.int64(0)
    i = _F(math.floor(x))
    f = x - i
    acc = _E5
    acc = acc * f + _E4
    acc = acc * f + _E3
    acc = acc * f + _E2
    acc = acc * f + _E1
    acc = acc * f + _E0
    mantissa = np.int64((acc * f + _ONE) * _P23)
    shift = min(np.int64(-i), np.int64(63))
    return (mantissa << _S17) >> shift


@_jit
def _select(keys, weights, use_weights, target, hist):
    """(threshold key, ids wanted among those that equal it) of the shortest prefix that reaches target."""
    prefix = np.int64(0)
    rest = target
    for level in range(3):
        shift = (21, 10, 0)[level]
        width = (11, 11, 10)[level]
        mask = np.int64((1 << width) - 1)
        hist[:] = 0
        for i in range(len(keys)):
            key = np.int64(keys[i])
            if key != 0 and (key >> (shift + width)) == prefix:
                hist[(key >> shift) & mask] += weights[i] if use_weights else 1
        b = mask
        while b >= 0 and hist[b] < rest:
            rest -= hist[b]
            b -= 1
        if b < 0:
            return np.int64(1), np.int64(len(keys))
        prefix = prefix << width | b
    if use_weights:
        for i in range(len(keys)):
            if np.int64(keys[i]) == prefix:
                w = weights[i]
                rest = (rest + w - 1) // w
                break
    return prefix, rest


@_jit
def _threshold(row, top, scale, top_k, top_p, log_min_p, keys, weights, hist):
    """Fill keys (uint32, 0 = dropped); return (threshold key, ids wanted among its equals)."""
    base = top * scale
    need_k = 0 < top_k < len(row)
    need_p = top_p < _ONE
    bits = row.view(np.uint32)
    for i in range(len(row)):
        x = row[i]
        b = bits[i]
        if b == np.uint32(0x80000000):
            b = np.uint32(0)
        key = ~b if b >> np.uint32(31) else b | np.uint32(0x80000000)
        d = x * scale - base
        keys[i] = np.uint32(key) if x > _NINF and d >= log_min_p else np.uint32(0)
    if need_p:
        for i in range(len(row)):
            weights[i] = _weight((row[i] * scale - base) * _LOG2E)
    t, quota = np.int64(1), np.int64(len(row))
    if need_k:
        t, quota = _select(keys, weights, False, np.int64(top_k), hist)
    if need_p:
        total = np.int64(0)
        ties = np.int64(0)
        for i in range(len(row)):
            key = np.int64(keys[i])
            if key > t:
                total += weights[i]
            elif key == t and ties < quota:
                total += weights[i]
                ties += 1
        target = max(np.int64(1), np.int64(math.ceil(np.float64(top_p) * np.float64(total))))
        t, quota = _select(keys, weights, True, target, hist)
    return t, quota


@_jit
def _sample_row(
    row, top, scale, top_k, top_p, log_min_p, seed, position, stream, keys, weights, hist, words, uniforms,
    bounds, cell,
):  # fmt: skip
    if not (top > _NINF and top < _F(np.inf)):
        for i in range(len(row)):
            if row[i] == top:
                return i
        return 0
    filtered = 0 < top_k < len(row) or top_p < _ONE or log_min_p > _NINF
    t, quota = np.int64(1), np.int64(len(row))
    if filtered:
        t, quota = _threshold(row, top, scale, top_k, top_p, log_min_p, keys, weights, hist)
    base = top * scale
    slack = _F(1e-3) + _F(1e-6) * (abs(base) + _F(64))
    best = _NINF
    chosen = 0
    ties = np.int64(0)
    uniform_bits = uniforms.view(np.int32)
    for start in range(0, len(row), _BLOCK):
        stop = min(start + _BLOCK, len(row))
        live = 0
        for i in range(start, stop):
            if (keys[i] >= t if filtered else True) and row[i] * scale - base >= -_REACH - slack:
                live += 1
        if live == 0 and not filtered:
            continue
        whole = live > 100
        if whole:
            _philox_block(_U(start >> 2), position, stream, seed, words)
            # noise <= -ln(u), and log2(u) >= (bits of u) * 2**-23 - 127
            for j in range(stop - start):
                uniforms[j] = (_F(words[j]) + _HALF) * _SCALE
            for j in range(stop - start):
                bounds[j] = row[start + j] * scale + _LN2 * (_BIAS - _F(uniform_bits[j]) * _N23) + slack
        for i in range(start, stop):
            if filtered:
                key = np.int64(keys[i])
                if key < t:
                    continue
                if key == t:
                    ties += 1
                    if ties > quota:
                        continue
            x = row[i] * scale
            if not x + _REACH + slack >= base:
                continue
            if whole and bounds[i - start] < best:
                continue
            r = words[i - start] if whole else _philox_one(i, position, stream, seed)
            score = x + _gumbel(r, cell)
            if score > best:
                best = score
                chosen = i
    return chosen


@_jit
def _sample_rows(logits, tops, greedy, scale, top_k, top_p, log_min_p, seeds, positions, stream, out):
    vocab = logits.shape[1]
    keys = np.empty(vocab, np.uint32)
    weights = np.empty(vocab, np.int64)
    hist = np.empty(2048, np.int64)
    words = np.empty(_BLOCK, np.uint32)
    uniforms = np.empty(_BLOCK, np.float32)
    bounds = np.empty(_BLOCK, np.float32)
    cell = np.empty(1, np.float32)
    for r in range(logits.shape[0]):
        if not greedy[r]:
            out[r] = _sample_row(
                logits[r], tops[r], scale[r], top_k[r], top_p[r], log_min_p[r], _U(seeds[r]), _U(positions[r]),
                _U(stream), keys, weights, hist, words, uniforms, bounds, cell,
            )  # fmt: skip


@_jit
def _filter_rows(logits, greedy, scale, top_k, top_p, log_min_p):
    """In place: kept ids become logit * scale, the others minus infinity; greedy rows are left alone."""
    vocab = logits.shape[1]
    keys = np.empty(vocab, np.uint32)
    weights = np.empty(vocab, np.int64)
    hist = np.empty(2048, np.int64)
    for r in range(logits.shape[0]):
        if greedy[r]:
            continue
        row = logits[r]
        top = row.max()
        if not (top > _NINF and top < _F(np.inf)):
            continue
        filtered = 0 < top_k[r] < vocab or top_p[r] < _ONE or log_min_p[r] > _NINF
        ties = 0
        if filtered:
            t, quota = _threshold(row, top, scale[r], top_k[r], top_p[r], log_min_p[r], keys, weights, hist)
            for i in range(vocab):
                key = np.int64(keys[i])
                keep = key > t
                if key == t:
                    ties += 1
                    keep = ties <= quota
                row[i] = row[i] * scale[r] if keep else _NINF
        else:
            for i in range(vocab):
                row[i] = row[i] * scale[r]


class BatchParams:
    """Sampling parameters of R rows, one array a parameter.

    Args:
        temperature: float32 [R]; below 1e-5 means greedy.
        seeds: int64 [R].
        positions: int64 [R], index of the sampled token in prompt + output.
        top_k: int [R] or None (off); 0 or less is off.
        top_p: float32 [R] or None.
        min_p: float32 [R] or None.
    """

    def __init__(self, temperature, seeds, positions, top_k=None, top_p=None, min_p=None) -> None:
        temperature = np.asarray(temperature, dtype=np.float32)
        rows = len(temperature)
        self.greedy = temperature < GREEDY_EPS
        self.scale = np.where(self.greedy, _ONE, _ONE / np.where(self.greedy, _ONE, temperature))
        self.seeds = np.ascontiguousarray(seeds, dtype=np.int64)
        self.positions = np.ascontiguousarray(positions, dtype=np.int64)
        self.top_k = np.zeros(rows, np.int64) if top_k is None else np.asarray(top_k).astype(np.int64)
        self.top_p = np.ones(rows, np.float32) if top_p is None else np.asarray(top_p).astype(np.float32)
        self.log_min_p = np.full(rows, -np.inf, np.float32)
        if min_p is not None:
            for i in np.flatnonzero(np.asarray(min_p) > 0):
                self.log_min_p[i] = log_min_p(min_p[i])

    def filters(self):
        return self.greedy, self.scale, self.top_k, self.top_p, self.log_min_p


def check_logits(logits: np.ndarray) -> None:
    if logits.dtype != np.float32 or logits.ndim != 2 or not logits.flags.c_contiguous:
        raise ValueError(f"logits: expected contiguous float32 [R, V], got {logits.dtype} {logits.shape}")


def greedy(logits: np.ndarray) -> np.ndarray:
    """int64 [R]: argmax of each row of float32 logits [R, V], smallest id among equals."""
    check_logits(logits)
    return np.argmax(logits, axis=1)


def sample(logits: np.ndarray, params: BatchParams, stream: int = TARGET) -> np.ndarray:
    """Sample one token a row.

    Args:
        logits: float32 [R, V], contiguous, after bias, penalties and masks; not modified.
        params: parameters of the R rows.
        stream: noise stream.

    Returns:
        int64 [R].  Equal, bit for bit, to :func:`det_plugin.sampling.reference.sample_reference` on each row.
    """
    check_logits(logits)
    if params.greedy.all():
        return greedy(logits)
    out = np.zeros(len(logits), np.int64)
    _sample_rows(logits, logits.max(axis=1), *params.filters(), params.seeds, params.positions, stream, out)
    if params.greedy.any():
        rows = np.flatnonzero(params.greedy)
        out[rows] = greedy(np.ascontiguousarray(logits[rows]))
    return out


def apply_filters(logits: np.ndarray, params: BatchParams) -> None:
    """In place on float32 [R, V]: scaled logits of the kept tokens, minus infinity elsewhere."""
    check_logits(logits)
    _filter_rows(logits, *params.filters())


def warm_up() -> None:
    """Compile every kernel (or load it from numba's cache)."""
    logits = np.zeros((2, 8), np.float32)
    params = BatchParams([0.0, 1.0], [1, 2], [3, 4], [0, 3], [1.0, 0.9], [0.0, 0.1])
    sample(logits, params)
    apply_filters(logits, params)
