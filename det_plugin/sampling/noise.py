"""Gumbel noise as a pure function of (seed, absolute position, vocabulary id).

Contract.
    The random integers are Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as
    1, 2, 3", SC 2011; constants and known answers from Random123).  For a token that will stand at index
    ``position`` of prompt + output, drawn with the int64 ``seed``::

        key     = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
        counter = (group(id), position & 0xFFFFFFFF, stream, position >> 32)
        r(id)   = philox4x32_10(counter, key)[word(id)]
        group(id) = (id >> 12) << 10 | id & 1023        word(id) = id >> 10 & 3

    so that one Philox call serves four ids that lie 1024 apart, whatever the size of the vocabulary.
    ``stream`` separates uses that must not share noise: :data:`TARGET`, :data:`DRAFT`, :data:`ACCEPT` of
    speculative decoding, and the derivation of seeds.  There is no generator state.

    The noise is ``-ln(-ln(1 - (r + 0.5) / 2**32))``.  The uniform is open at both ends, so the noise lies in
    [-3.131, 22.875]: always finite, and a masked logit (minus infinity) plus noise is still minus infinity.
    The large values, which win, come from small ``r``, where fp32 keeps all 32 bits.

    Floats are specified too: fp32, one rounding for every operation, no fused multiply-add, the polynomials
    below.  The numpy, compiled-CPU and Triton versions therefore agree bit for bit, not in the integers only.
    Polynomial error: 7e-8 absolute for ln, 9e-8 relative for exp2.
"""

from __future__ import annotations

import numpy as np

TARGET, DRAFT, ACCEPT, CHOICE, PROMPT = range(5)
"""Streams: the sampled token, a draft model's token, acceptance tests; choice and prompt derive seeds."""

PHILOX_M0, PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
PHILOX_W0, PHILOX_W1 = 0x9E3779B9, 0xBB67AE85
PHILOX_ROUNDS = 10

GROUP_IDS = 1024
"""Distance of the four ids that share one Philox call."""

LN_COEFFS = (
    0.3333341181278229,
    -0.2500092387199402,
    0.19985109567642212,
    -0.16592730581760406,
    0.1467660516500473,
    -0.14119839668273926,
    0.09273257851600647,
)
"""ln(1 + f) = f - f*f/2 + f*f*f * sum(c[i] * f**i), f in [sqrt(1/2) - 1, sqrt(2) - 1]; fitted here."""
LN2_HI, LN2_LO = 0.693359375, -2.12194440e-4
SQRT_HALF_BITS = 0x3F3504F3

EXP2_COEFFS = (
    0.6931471824645996,
    0.24022722244262695,
    0.055495936423540115,
    0.009652440436184406,
    0.0012689351569861174,
    0.0002082919527310878,
)
"""2**f = 1 + f * sum(c[i] * f**i), f in [0, 1); fitted here, exactly 1 at f = 0."""
LOG2_E = 1.44269502162933349609375

GUMBEL_MAX, GUMBEL_MIN = 22.875, -3.131
"""Bounds of the noise."""

_F = np.float32


def philox4x32(counter: np.ndarray, key: tuple[int, int], rounds: int = PHILOX_ROUNDS) -> np.ndarray:
    """Philox4x32 of a block of counters.

    Args:
        counter: uint32 array, shape [..., 4].
        key: two 32-bit integers.
        rounds: 10 in the published generator.

    Returns:
        uint32 array of the shape of ``counter``.
    """
    c = [np.asarray(counter[..., i], dtype=np.uint64) for i in range(4)]
    k0, k1 = key[0] & 0xFFFFFFFF, key[1] & 0xFFFFFFFF
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(rounds):
        p0, p1 = c[0] * np.uint64(PHILOX_M0), c[2] * np.uint64(PHILOX_M1)
        c = [(p1 >> shift) ^ c[1] ^ np.uint64(k0), p1 & low, (p0 >> shift) ^ c[3] ^ np.uint64(k1), p0 & low]
        k0, k1 = (k0 + PHILOX_W0) & 0xFFFFFFFF, (k1 + PHILOX_W1) & 0xFFFFFFFF
    return np.stack([x.astype(np.uint32) for x in c], axis=-1)


def split_seed(seed: int) -> tuple[int, int]:
    """The Philox key of an int64 seed."""
    seed &= 0xFFFFFFFFFFFFFFFF
    return seed & 0xFFFFFFFF, seed >> 32


def noise_bits(seed: int, position: int, ids: np.ndarray, stream: int = TARGET) -> np.ndarray:
    """Random uint32 for each vocabulary id.

    Args:
        seed: int64 seed of the sequence.
        position: index that the sampled token will have in prompt + output.
        ids: integer array of vocabulary ids, any shape.
        stream: one of :data:`TARGET`, :data:`DRAFT`, :data:`ACCEPT`.

    Returns:
        uint32 array of the shape of ``ids``.
    """
    ids = np.asarray(ids, dtype=np.int64)
    counter = np.empty((*ids.shape, 4), dtype=np.uint32)
    counter[..., 0] = (ids >> 12) << 10 | (ids & 1023)
    counter[..., 1] = position & 0xFFFFFFFF
    counter[..., 2] = stream
    counter[..., 3] = position >> 32
    words = philox4x32(counter, split_seed(seed))
    return np.take_along_axis(words, ((ids >> 10) & 3)[..., None], axis=-1)[..., 0]


def _ln1p(exponent: np.ndarray, f: np.ndarray) -> np.ndarray:
    """``exponent * ln2 + ln(1 + f)`` in the specified order of fp32 operations."""
    acc = np.full_like(f, _F(LN_COEFFS[-1]))
    for c in LN_COEFFS[-2::-1]:
        acc = acc * f + _F(c)
    z = f * f
    y = acc * f
    y = y * z
    y = y - _F(0.5) * z
    y = y + exponent * _F(LN2_LO)
    y = f + y
    return y + exponent * _F(LN2_HI)


def _split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x = 2**exponent * (1 + f), both fp32, for positive normal x."""
    bits = x.view(np.int32)
    e = (bits - np.int32(SQRT_HALF_BITS)) >> np.int32(23)
    m = (bits - (e << np.int32(23))).view(np.float32)
    return e.astype(np.float32), m - _F(1)


def gumbel_from_bits(bits: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise from random uint32, by the specified fp32 arithmetic; float32, finite."""
    bits = np.atleast_1d(np.asarray(bits, dtype=np.uint32))
    scale = _F(2.0**-32)
    u = (bits.astype(np.float32) + _F(0.5)) * scale
    v = ((~bits).astype(np.float32) + _F(0.5)) * scale
    e, f = _split(v)
    small = bits < np.uint32(1 << 30)
    exponential = -_ln1p(np.where(small, _F(0), e), np.where(small, -u, f))
    return -_ln1p(*_split(exponential))


def gumbel_noise(seed: int, position: int, ids: np.ndarray, stream: int = TARGET) -> np.ndarray:
    """Gumbel noise for each vocabulary id; float32 array of the shape of ``ids``.  See the module's contract."""
    ids = np.asarray(ids, dtype=np.int64)
    return gumbel_from_bits(noise_bits(seed, position, ids, stream)).reshape(ids.shape)


def exp2_fixed(x: np.ndarray) -> np.ndarray:
    """2**x for x <= 0 as fixed point with 40 fraction bits (int64): the weights that filters add up.

    Integer sums are exact, so they do not depend on the order or grouping of the addends.  x = -inf and NaN
    give 0; x = 0 gives exactly 2**40.
    """
    x = np.asarray(x, dtype=np.float32)
    live = x > _F(-64)
    x = np.where(live, x, _F(0))
    i = np.floor(x)
    f = x - i
    acc = np.full_like(f, _F(EXP2_COEFFS[-1]))
    for c in EXP2_COEFFS[-2::-1]:
        acc = acc * f + _F(c)
    mantissa = ((acc * f + _F(1)) * _F(2.0**23)).astype(np.int64)
    shift = np.minimum(-i, _F(63)).astype(np.int64)
    return np.where(live, (mantissa << np.int64(17)) >> shift, np.int64(0))
