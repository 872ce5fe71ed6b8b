"""Filters against an independent float64 computation, and every implementation against the specification."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from det_plugin.sampling import cpu, filters, reference  # noqa: E402
from det_plugin.sampling.reference import RowParams  # noqa: E402


def float64_filter(logits, params):
    """Kept ids by the plain definition in float64, and the ids that rounding may decide either way."""
    x = logits.astype(np.float64) / float(np.float32(params.temperature))
    p = np.exp(x - x.max())
    p /= p.sum()
    order = np.lexsort((np.arange(len(x)), -logits))
    order = order[logits[order] > -np.inf]
    close = set()
    if params.min_p > 0:
        ratio = p[order] / p.max()
        close |= set(order[np.abs(np.log(np.maximum(ratio, 1e-300)) - math.log(params.min_p)) < 1e-4])
        order = order[ratio >= params.min_p]
    if 0 < params.top_k < len(order):
        order = order[: params.top_k]
    if params.top_p < 1 and len(order):
        q = p[order] / p[order].sum()
        before = np.concatenate([[0], np.cumsum(q)[:-1]])
        edge = np.abs(before - float(np.float32(params.top_p))) < 2e-6
        close |= set(order[edge & (np.arange(len(order)) > 0)])
        order = order[(before < float(np.float32(params.top_p))) | (np.arange(len(order)) == 0)]
    return set(order.tolist()), {int(c) for c in close}


def random_row(rng):
    vocab = int(rng.choice([4, 100, 1000, 5000]))
    x = (rng.standard_normal(vocab) * rng.choice([0.3, 1, 4, 20])).astype(np.float32)
    kind = rng.integers(0, 6)
    if kind == 0:
        x = np.round(x * 2) / 2  # ties
    elif kind == 1:
        x[rng.random(vocab) < 0.8] = -np.inf
    elif kind == 2:
        x[np.arange(vocab) != rng.integers(vocab)] = -np.inf  # all but one masked
    elif kind == 3:
        x[:] = np.float32(rng.standard_normal())  # all equal
    if not np.isfinite(x).any():
        x[0] = 0
    params = RowParams(
        float(rng.choice([0.1, 0.8, 1, 1.5, 5])),
        int(rng.choice([0, 0, 1, 2, 50, vocab, vocab + 7])),
        float(rng.choice([1, 1, 0.999, 0.95, 0.5, 0.1, 1e-6])),
        float(rng.choice([0, 0, 0.02, 0.5, 1])),
        int(rng.integers(0, 2**63)),
        int(rng.integers(0, 100_000)),
    )
    return x.astype(np.float32), params


def batch_params(rows):
    names = ("temperature", "seed", "position", "top_k", "top_p", "min_p")
    return cpu.BatchParams(*([getattr(r, name) for r in rows] for name in names))


def test_2000_random_rows_against_float64_and_across_implementations():
    rng = np.random.default_rng(1)
    decided = 0
    for _ in range(2000):
        x, params = random_row(rng)
        mask = reference.kept_tokens(x, params)
        want, close = float64_filter(x, params)
        kept = set(np.flatnonzero(mask).tolist())
        if not (kept ^ want) <= close:
            # a boundary that falls among ties may move by whole ties; sizes must then agree within rounding
            assert len(kept ^ want) <= 1, params
        decided += kept == want
        batch = batch_params([params])
        data = x[None].copy()
        cpu.apply_filters(data, batch)
        scale = reference.inverse_temperature(params.temperature)
        expected = np.where(mask, x * scale, np.float32(-np.inf))
        assert np.array_equal(data[0], expected)
        column = lambda v, dtype: torch.tensor([v], dtype=dtype)
        got = filters.masked_logits(
            torch.from_numpy(x[None]),
            column(params.temperature, torch.float32),
            column(params.top_k, torch.int64),
            column(params.top_p, torch.float32),
            column(float(reference.log_min_p(params.min_p)), torch.float32),
        )
        assert np.array_equal(got.numpy()[0] + 0.0, expected + np.float32(0))
        assert int(cpu.sample(x[None], batch)[0]) == reference.sample_reference(x, params)
    assert decided > 1950


def test_fixed_weights_equal_numpy():
    from det_plugin.sampling.noise import exp2_fixed

    x = np.concatenate([-np.logspace(-8, 2, 5000), [0, -63.99, -64, -np.inf, np.nan]]).astype(np.float32)
    w = exp2_fixed(x)
    assert np.array_equal(w, filters.fixed_weights(torch.from_numpy(x)).numpy())
    assert w[5000] == 2**40
    live = x > -30
    assert np.abs(w[live] * 2.0**-40 / np.exp2(x[live].astype(np.float64)) - 1).max() < 2e-3
    assert np.abs(w[x > -10] * 2.0**-40 / np.exp2(x[x > -10].astype(np.float64)) - 1).max() < 2e-7


def test_ties_break_by_id():
    x = np.zeros(10, np.float32)
    for k in range(1, 10):
        assert np.flatnonzero(reference.kept_tokens(x, RowParams(top_k=k))).tolist() == list(range(k))
    for kept, p in ((4, 0.5), (1, 0.125), (8, 0.95)):  # fractions that fp32 holds exactly
        assert np.flatnonzero(reference.kept_tokens(x[:8], RowParams(top_p=p))).tolist() == list(range(kept))
    assert cpu.greedy(x[None])[0] == 0


def test_boundary_of_top_p():
    x = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))
    assert reference.kept_tokens(x, RowParams(top_p=0.5)).sum() == 1
    assert reference.kept_tokens(x, RowParams(top_p=0.5001)).sum() == 2


def test_everything_masked():
    x = np.full((1, 8), -np.inf, np.float32)
    params = RowParams(top_p=0.9, top_k=3)
    assert reference.sample_reference(x[0], params) == 0
    assert cpu.sample(x, batch_params([params]))[0] == 0


def test_wrong_logits_are_refused():
    with pytest.raises(ValueError, match="logits: expected contiguous float32"):
        cpu.sample(np.zeros((2, 3)), batch_params([RowParams()] * 2))


@pytest.mark.parametrize("value", [0.0, 1e-46, 7e-46, 5e-324])
def test_min_p_without_an_fp32_number_is_off(value):
    assert reference.log_min_p(value) == -np.inf
    given = np.array([value, 0.1])  # float64, as a caller may have it
    params = cpu.BatchParams([1.0, 1.0], [0, 1], [0, 0], min_p=given)
    assert params.log_min_p[0] == -np.inf
    assert params.log_min_p[1] == reference.log_min_p(0.1) == np.float32(math.log(np.float32(0.1)))
    assert reference.log_min_p(2e-45) > -np.inf  # the control: a number that fp32 has
