"""The sampler in plain numpy: the specification that the compiled CPU and Triton versions equal bit for bit.

Contract.
    Input is one row of fp32 logits, after bias, penalties, bad words and masks.  Tokens are ordered by
    (logit descending, vocabulary id ascending).  Every filter keeps a prefix of that order, so the filters
    together keep the shortest of the prefixes:

    - min_p: ``logit * s - max * s >= fp32(ln(min_p))``, with ``s = fp32(1 / temperature)``;
    - top_k: the first k that min_p kept;
    - top_p: the shortest prefix whose weight reaches ``top_p`` times the weight of what min_p and top_k kept.

    Weights are ``exp`` of the scaled logit relative to the row's maximum in fixed point (40 fraction bits), so
    sums are exact whatever their order.  The token sampled is the argmax of ``logit * s + noise`` over the
    kept ids, smallest id first among equals; greedy rows take the argmax of the logits.  Nothing looks at
    another row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from det_plugin.sampling.noise import LOG2_E, TARGET, exp2_fixed, gumbel_noise

GREEDY_EPS = 1e-5
"""Temperatures below this are greedy, as in the host."""

_F = np.float32


class RowParams(NamedTuple):
    """Sampling parameters of one row.

    Attributes:
        temperature: below :data:`GREEDY_EPS` means greedy.
        top_k: 0 or less, or at least the vocabulary's size: off.
        top_p: 1 or more: off.
        min_p: 0: off.
        seed: int64 seed of the sequence.
        position: index of the sampled token in prompt + output.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 42
    position: int = 0


def inverse_temperature(temperature: float) -> np.float32:
    """fp32(1 / fp32(temperature)); 1 for greedy rows."""
    return _F(1) if temperature < GREEDY_EPS else _F(1) / _F(temperature)


def log_min_p(min_p: float) -> np.float32:
    """fp32(ln(fp32(min_p))); minus infinity when the filter is off, or so small that fp32 has no such number."""
    rounded = _F(min_p)
    return _F(math.log(rounded)) if rounded > 0 else _F(-np.inf)


def weight_target(top_p: float, total: int) -> int:
    """Weight at which the top-p prefix ends, from fp32 top_p and the exact total."""
    return max(1, math.ceil(float(_F(top_p)) * float(total)))


def kept_tokens(logits: np.ndarray, params: RowParams) -> np.ndarray:
    """Boolean mask over the vocabulary: the prefix that the filters keep.  ``logits``: float32 [V]."""
    logits = np.asarray(logits, dtype=np.float32) + _F(0)
    top = logits.max()
    if not np.isfinite(top):
        return logits == top
    s = inverse_temperature(params.temperature)
    d = logits * s - top * s
    keep = (logits > -np.inf) & (d >= log_min_p(params.min_p))
    order = np.argsort(-logits, kind="stable")
    order = order[keep[order]]
    if 0 < params.top_k < len(order):
        order = order[: params.top_k]
    if _F(params.top_p) < 1:
        cumulative = np.cumsum(exp2_fixed(d[order] * _F(LOG2_E)))
        order = order[: int(np.searchsorted(cumulative, weight_target(params.top_p, int(cumulative[-1])))) + 1]
    mask = np.zeros(len(logits), dtype=bool)
    mask[order] = True
    return mask


def sample_reference(logits: np.ndarray, params: RowParams, stream: int = TARGET) -> int:
    """Sampled vocabulary id of one row of float32 logits [V]; 0 when every token is masked."""
    logits = np.asarray(logits, dtype=np.float32)
    if params.temperature < GREEDY_EPS:
        return int(np.argmax(logits))
    ids = np.flatnonzero(kept_tokens(logits, params))
    score = logits[ids] * inverse_temperature(params.temperature)
    score = score + gumbel_noise(params.seed, params.position, ids, stream)
    return int(ids[np.argmax(score)])
