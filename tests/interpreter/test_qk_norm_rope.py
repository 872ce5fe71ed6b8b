"""The fused query/key norm and rotary embedding: order, indexing, and the contraction's certificate.

In float16 and float32: the interpreter converts to bfloat16 by cutting off.
"""

from __future__ import annotations

import pytest
import torch

from det_plugin.ops.qk_norm_rope import CONTRACTIONS, find_contraction, qk_norm_rope_kernel, qk_norm_rope_reference
from det_plugin.ops.rms_norm import rms_norm_reference

EPS = 1e-6


def arguments(tokens=7, heads=4, kv=2, size=64, dtype=torch.float16, cache=torch.float32, seed=0):
    torch.manual_seed(seed)
    qkv = torch.randn(tokens, (heads + 2 * kv) * size).to(dtype)
    positions = torch.randint(0, 500, (tokens,))
    weights = [(1 + 0.2 * torch.randn(size)).to(dtype) for _ in range(2)]
    angles = torch.arange(500)[:, None] * 10000.0 ** (-torch.arange(size // 2) * 2 / size)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(cache)
    return qkv, positions, *weights, cos_sin, heads, kv, EPS


def same(got, want):
    return all(
        torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in zip(got, want, strict=True)
    )


@pytest.mark.parametrize("contraction", CONTRACTIONS)
@pytest.mark.parametrize(
    "shape",
    [
        dict(size=64),
        dict(size=128, cache=torch.float16),
        dict(size=96, heads=3, kv=1),
        dict(size=256, heads=2, kv=2, cache=torch.float16),
        dict(size=2, tokens=1, heads=1, kv=1),
        dict(size=80, tokens=33, heads=5, kv=1),
    ],
)
def test_equals_the_specification(contraction, shape):
    given = arguments(**shape)
    assert same(qk_norm_rope_kernel(*given, contraction), qk_norm_rope_reference(*given, contraction))


def test_accuracy_against_float64():
    qkv, positions, q_weight, _, cos_sin, heads, _, eps = given = arguments(tokens=40, size=128)
    x = qkv[:, : heads * 128].reshape(-1, heads, 128).double()
    x = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * q_weight.double()
    cos, sin = (part[:, None].double() for part in cos_sin[positions].chunk(2, dim=-1))
    a, b = x.chunk(2, dim=-1)
    exact = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).reshape(40, -1)
    error = (qk_norm_rope_kernel(*given)[0].double() - exact).abs().max() / exact.abs().max()
    assert error < 2 * 2.0**-11  # two roundings to float16


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_row_does_not_depend_on_the_others(dtype):
    qkv, positions, *rest = arguments(tokens=29, dtype=dtype)
    whole = qk_norm_rope_kernel(qkv, positions, *rest)
    for start, end in ((0, 1), (3, 4), (5, 12), (28, 29)):
        part = qk_norm_rope_kernel(qkv[start:end], positions[start:end], *rest)
        assert same(part, [x[start:end] for x in whole])
    wide = torch.cat([qkv, qkv], dim=1)[:, : qkv.shape[1]]  # rows further apart
    assert same(qk_norm_rope_kernel(wide, positions, *rest), whole)
    order = torch.randperm(29)
    assert same(qk_norm_rope_kernel(qkv[order], positions[order], *rest), [x[order] for x in whole])


def test_a_contraction_that_follows_the_row_count_is_seen():
    """Negative control of the test above: a deliberately wrong schedule, in float32, which hides no rounding."""
    qkv, positions, *rest = arguments(tokens=29, dtype=torch.float32)
    run = lambda rows: qk_norm_rope_kernel(
        qkv[rows], positions[rows], *rest, "first" if len(qkv[rows]) > 16 else "none"
    )
    assert not same(run(slice(0, 12)), [x[:12] for x in run(slice(0, 29))])


def test_nothing_is_written_beyond_the_results():
    given = arguments(tokens=3, size=80, heads=3, kv=1)
    before = [x.clone() for x in given[:5]]
    qk_norm_rope_kernel(*given)
    assert all(torch.equal(x, y) for x, y in zip(given[:5], before, strict=True))


def test_no_token():
    queries, keys = qk_norm_rope_kernel(*arguments(tokens=0))
    assert queries.shape == (0, 256)
    assert keys.shape == (0, 128)


def separate(how):
    def run(qkv, positions, q_weight, k_weight, cos_sin, heads, kv, eps):
        return qk_norm_rope_reference(qkv, positions, q_weight, k_weight, cos_sin, heads, kv, eps, how)

    return run


@pytest.mark.parametrize("how", CONTRACTIONS)
def test_the_contraction_is_found_by_its_bytes(how):
    assert find_contraction(separate(how), *arguments(tokens=64, heads=16, kv=8, size=64)) == how


def test_no_contraction_matches_another_order():
    """Negative control: a rotation of heads that were not rounded in between."""

    def unrounded(qkv, positions, q_weight, k_weight, cos_sin, heads, kv, eps):
        wide = [x.float() for x in (qkv, q_weight, k_weight)]
        got = qk_norm_rope_reference(wide[0], positions, wide[1], wide[2], cos_sin, heads, kv, eps)
        return got[0].to(qkv.dtype), got[1].to(qkv.dtype)

    assert find_contraction(unrounded, *arguments(tokens=64, heads=16, kv=8, size=64)) is None


def test_the_norm_is_that_of_the_norm_operator():
    qkv, positions, q_weight, k_weight, cos_sin, heads, kv, eps = arguments(tokens=9, size=128)
    cos_sin[:] = torch.cat([torch.ones(64), torch.zeros(64)])  # no rotation
    queries, _ = qk_norm_rope_kernel(qkv, positions, q_weight, k_weight, cos_sin, heads, kv, eps)
    want = rms_norm_reference(qkv[:, : heads * 128].reshape(-1, heads, 128), q_weight, eps)
    assert torch.equal(queries.view(torch.uint8), want.reshape(9, -1).view(torch.uint8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(qkv=torch.zeros(7, 5, dtype=torch.float16)), "qkv: got shape"),
        (dict(qkv=torch.zeros(7, 512, dtype=torch.int32)), "qkv: got dtype"),
        (dict(positions=torch.zeros(7, dtype=torch.int32)), "positions: got"),
        (dict(q_weight=torch.ones(63, dtype=torch.float16)), "q_weight: got"),
        (dict(k_weight=torch.ones(32, dtype=torch.float16)), "k_weight: got"),
        (dict(cos_sin=torch.zeros(500, 32)), "cos_sin: got"),
        (dict(contraction="fused"), "contraction: got"),
    ],
)
def test_bad_arguments(change, message):
    names = ("qkv", "positions", "q_weight", "k_weight", "cos_sin", "num_heads", "num_kv_heads", "eps")
    with pytest.raises(ValueError, match=message):
        qk_norm_rope_kernel(**{**dict(zip(names, arguments(), strict=True)), **change})
