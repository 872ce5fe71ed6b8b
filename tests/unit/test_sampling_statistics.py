"""Draws against the exact distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest

cpu = pytest.importorskip("det_plugin.sampling.cpu", reason="the compiled CPU version needs numba")

from det_plugin.sampling import reference  # noqa: E402
from det_plugin.sampling.reference import RowParams  # noqa: E402

DRAWS = 200_000
CASES = [
    dict(),
    dict(temperature=0.1),
    dict(temperature=5.0),
    dict(temperature=0.8),
    dict(temperature=2.0),
    dict(top_k=1),
    dict(top_k=2),
    dict(top_k=10),
    dict(top_k=40),
    dict(top_p=0.1),
    dict(top_p=0.5),
    dict(top_p=0.95),
    dict(top_p=0.999),
    dict(min_p=0.05),
    dict(min_p=0.5),
    dict(top_k=20, top_p=0.9),
    dict(temperature=0.1, top_p=0.95),
    dict(temperature=5.0, top_p=0.95),
    dict(temperature=5.0, min_p=0.3),
    dict(temperature=0.8, top_k=30, top_p=0.8),
]


def exact_distribution(logits, params):
    keep = reference.kept_tokens(logits, params)
    x = np.where(keep, logits.astype(np.float64) / params.temperature, -np.inf)
    p = np.exp(x - x.max())
    return p / p.sum()


def chi_square_p(observed, expected):
    """Upper tail by the Wilson-Hilferty approximation; cells of fewer than 5 expected draws are merged."""
    small = expected < 5
    o = np.append(observed[~small], observed[small].sum())
    e = np.append(expected[~small], expected[small].sum())
    o, e = o[e > 0], e[e > 0]
    if len(e) < 2:
        return 1.0
    statistic, freedom = float(((o - e) ** 2 / e).sum()), len(e) - 1
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


def draw(logits, params, count, seed=42, vary="position"):
    out = np.zeros(len(logits), np.int64)
    for start in range(0, count, 20_000):
        n = min(20_000, count - start)
        steps = np.arange(start, start + n)
        batch = cpu.BatchParams(
            [params.temperature] * n,
            steps if vary == "seed" else np.full(n, seed),
            steps if vary == "position" else np.full(n, 17),
            [params.top_k] * n,
            [params.top_p] * n,
            [params.min_p] * n,
        )
        tokens = cpu.sample(np.ascontiguousarray(np.broadcast_to(logits, (n, len(logits)))), batch)
        out += np.bincount(tokens, minlength=len(logits))
    return out


@pytest.mark.parametrize("number", range(len(CASES)))
def test_chi_square(number):
    logits = (np.random.default_rng(number).standard_normal(64) * 1.5).astype(np.float32)
    params = RowParams(**CASES[number])
    expected = exact_distribution(logits, params)
    observed = draw(logits, params, DRAWS, seed=1000 + number)
    assert observed[expected == 0].sum() == 0
    assert chi_square_p(observed, expected * DRAWS) > 0.001


def test_chi_square_over_seeds():
    logits = (np.random.default_rng(99).standard_normal(64) * 1.5).astype(np.float32)
    params = RowParams()
    observed = draw(logits, params, DRAWS, vary="seed")
    assert chi_square_p(observed, exact_distribution(logits, params) * DRAWS) > 0.001


def test_chi_square_sees_a_wrong_distribution():
    logits = (np.random.default_rng(0).standard_normal(64) * 1.5).astype(np.float32)
    observed = draw(logits, RowParams(temperature=1.02), DRAWS)
    assert chi_square_p(observed, exact_distribution(logits, RowParams()) * DRAWS) < 1e-6


VOCABULARY = 151_936


def large_vocabulary(params, draws, filtered_draws=200, rows=10):
    """p of ``draws`` draws over consecutive positions.

    Filters cost a walk over the vocabulary, so they run on ``filtered_draws`` of them, which must equal, token by
    token, those from logits masked beforehand; the rest are drawn from the masked logits.
    """
    rng = np.random.default_rng(5)
    logits = rng.standard_normal(VOCABULARY).astype(np.float32)
    logits[rng.integers(0, VOCABULARY, 40)] += 9
    p = exact_distribution(logits, params)
    masked = np.where(reference.kept_tokens(logits, params), logits, np.float32(-np.inf))
    data, masked_data = (np.ascontiguousarray(np.broadcast_to(x, (rows, VOCABULARY))) for x in (logits, masked))
    drawn = np.empty(draws, np.int64)
    for start in range(0, draws, rows):
        positions = np.arange(start, start + rows)
        own = [[value] * rows for value in (params.temperature, 7)]
        tokens = cpu.sample(masked_data, cpu.BatchParams(*own, positions))
        if start < filtered_draws:
            filters = [[value] * rows for value in (params.top_k, params.top_p, params.min_p)]
            assert np.array_equal(cpu.sample(data, cpu.BatchParams(*own, positions, *filters)), tokens)
        drawn[start : start + rows] = tokens
    observed = np.bincount(drawn, minlength=VOCABULARY)
    assert observed[p == 0].sum() == 0
    # the 300 likeliest tokens, then the rest in 200 groups by id
    top = np.argsort(-p)[:300]
    group = np.arange(VOCABULARY) * 200 // VOCABULARY
    group[top] = 200 + np.arange(300)
    return chi_square_p(
        np.bincount(group, weights=observed, minlength=500), np.bincount(group, weights=p, minlength=500) * draws
    )


def test_vocabulary_of_151936():
    assert large_vocabulary(RowParams(temperature=0.8), 1000) > 0.001


@pytest.mark.soak
@pytest.mark.parametrize("number", range(len(CASES)))
def test_vocabulary_of_151936_long(number):
    p = large_vocabulary(RowParams(**CASES[number]), DRAWS)
    print(f"case {number}, {CASES[number]}: p = {p:.4f}")
    assert p > 0.001
