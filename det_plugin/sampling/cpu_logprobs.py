"""Logprobs on the CPU, in a fixed order.

Contract.  ``logprob = fp32(fp64(logit) - lse)``, ``lse = max + ln(sum of exp)`` in fp64, the sum in fixed point
with 40 fraction bits, exact in any order.  The top k are ordered by (logprob descending, id ascending): a larger
k only appends.  Rows are walked one by one; nothing depends on how many there are, or on what a neighbour asked
for.
"""

from __future__ import annotations

import math

import numpy as np

from det_plugin.sampling.cpu import _F, _LOG2E, _NINF, _jit, _weight, check_logits


@_jit
def _lse_rows(logits, out):
    for r in range(logits.shape[0]):
        row = logits[r]
        top = row.max()
        if not (top > _NINF and top < _F(np.inf)):
            out[r] = np.float64(top)
            continue
        total = np.int64(0)
        for i in range(len(row)):
            total += _weight((row[i] - top) * _LOG2E)
        out[r] = np.float64(top) + math.log(np.float64(total) * 2.0**-40)


@_jit
def _log_softmax_rows(logits, lse, out):
    for r in range(logits.shape[0]):
        for i in range(logits.shape[1]):
            out[r, i] = _F(np.float64(logits[r, i]) - lse[r])


@_jit
def _top_rows(logits, lse, k, ids, values):
    """The k largest fp32(logit - lse) of each row, smallest id first among equals (insertion; k is small)."""
    for r in range(logits.shape[0]):
        row = logits[r]
        n = 0
        for i in range(len(row)):
            v = _F(np.float64(row[i]) - lse[r])
            if n == k and not v > values[r, k - 1]:
                continue
            j = n if n < k else k - 1
            while j > 0 and v > values[r, j - 1]:
                values[r, j] = values[r, j - 1]
                ids[r, j] = ids[r, j - 1]
                j -= 1
            values[r, j] = v
            ids[r, j] = i
            if n < k:
                n += 1


@_jit
def _rank_rows(logits, lse, tokens, out):
    for r in range(logits.shape[0]):
        v = _F(np.float64(logits[r, tokens[r]]) - lse[r])
        n = 0
        for i in range(logits.shape[1]):
            if _F(np.float64(logits[r, i]) - lse[r]) >= v:
                n += 1
        out[r] = n


def logsumexp(logits: np.ndarray) -> np.ndarray:
    """float64 [R] of float32 logits [R, V], exact sum of fixed-point weights."""
    check_logits(logits)
    out = np.empty(len(logits), np.float64)
    _lse_rows(logits, out)
    return out


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float32 [R, V]: ``fp32(logit - logsumexp)``."""
    out = np.empty_like(logits)
    _log_softmax_rows(logits, logsumexp(logits), out)
    return out


def top_logprobs(logits: np.ndarray, lse: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(int64 ids, float32 logprobs), both [R, k]: largest first, smallest id first among equals.

    A larger k only appends: the first columns do not change.
    """
    check_logits(logits)
    rows, vocab = logits.shape
    k = min(k, vocab)
    ids = np.zeros((rows, k), np.int64)
    values = np.empty((rows, k), np.float32)
    if k > 256:
        for r in range(rows):
            v = (logits[r].astype(np.float64) - lse[r]).astype(np.float32)
            ids[r] = np.argsort(-v, kind="stable")[:k]
            values[r] = v[ids[r]]
    elif k:
        _top_rows(logits, lse, k, ids, values)
    return ids, values


def token_logprobs(logits: np.ndarray, lse: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """float32 logprobs [R, C] of the ids in int64 tokens [R, C]."""
    return (np.take_along_axis(logits, tokens, axis=1).astype(np.float64) - lse[:, None]).astype(np.float32)


def token_ranks(logits: np.ndarray, lse: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """int64 [R]: number of ids whose logprob is at least that of ``tokens`` (int64 [R]), as the host ranks."""
    out = np.empty(len(logits), np.int64)
    _rank_rows(logits, lse, np.ascontiguousarray(tokens, dtype=np.int64), out)
    return out


def warm_up() -> None:
    """Compile every kernel (or load it from numba's cache)."""
    logits = np.zeros((2, 8), np.float32)
    lse = logsumexp(logits)
    log_softmax(logits)
    top_logprobs(logits, lse, 2)
    token_ranks(logits, lse, np.zeros(2, np.int64))
