"""Noise: published answers, the test-vector file, extremes, independence; derived seeds."""

from __future__ import annotations

import json
import math
from importlib.resources import files

import numpy as np
import pytest

from det_plugin.sampling import noise, seeds

VECTORS = json.loads(files("det_plugin.sampling").joinpath("test_vectors.json").read_text())


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # Random123 1.14, kat_vectors, philox4x32 10
        ([0] * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_published_known_answers(counter, key, words):
    got = noise.philox4x32(np.array(counter, dtype=np.uint32), key)
    assert [f"{int(w):08x}" for w in got] == words.split()


def test_vector_file():
    ids = np.array(VECTORS["ids"])
    for case in VECTORS["noise"]:
        bits = noise.noise_bits(case["seed"], case["position"], ids, case["stream"])
        assert [f"{int(b):08x}" for b in bits] == case["bits"]
        floats = noise.gumbel_from_bits(bits).view(np.uint32)
        assert [f"{int(b):08x}" for b in floats] == case["gumbel"]
    for case in VECTORS["choice_seeds"]:
        assert [seeds.choice_seed(case["seed"], i) for i in range(5)] == case["seeds"]
    for case in VECTORS["prompt_seeds"]:
        assert seeds.prompt_seed(case["seed"], case["prompt"]) == case["result"]


def test_vector_file_compiled_cpu():
    cpu = pytest.importorskip("det_plugin.sampling.cpu", reason="the compiled CPU version needs numba")
    cell = np.empty(1, np.float32)
    u64 = np.uint64
    for case in VECTORS["noise"]:
        for token, bits, gumbel in zip(VECTORS["ids"], case["bits"], case["gumbel"], strict=True):
            got = cpu._philox_one(token, u64(case["position"]), u64(case["stream"]), u64(case["seed"]))
            assert f"{int(got):08x}" == bits
            g = np.float32(cpu._gumbel(np.uint32(got), cell))
            assert f"{int(g.view(np.uint32)):08x}" == gumbel
    for bits, gumbel in VECTORS["gumbel"]:
        g = np.float32(cpu._gumbel(np.uint32(int(bits, 16)), cell))
        assert f"{int(g.view(np.uint32)):08x}" == gumbel


def test_extreme_hashes_stay_finite():
    bits = np.array([0, 1, 2**30 - 1, 2**30, 2**31, 2**32 - 1], dtype=np.uint32)
    g = noise.gumbel_from_bits(bits)
    assert np.isfinite(g).all()
    assert g.max() <= noise.GUMBEL_MAX
    assert g.min() >= noise.GUMBEL_MIN
    assert np.isneginf(np.float32(-np.inf) + g).all()
    with np.errstate(divide="ignore"):  # negative control: the usual formula on a rounded uniform
        u = bits.astype(np.float32) / np.float32(2**32)
        assert not np.isfinite(-np.log(-np.log(u))).all()


def test_accuracy_and_monotonicity():
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    bits[:1000] = np.arange(1000)  # the winning tail
    u = (bits.astype(np.float64) + 0.5) / 2**32
    exact = -np.log(-np.log1p(-u))
    assert np.abs(noise.gumbel_from_bits(bits) - exact).max() < 2e-6
    tail = noise.gumbel_from_bits(np.arange(1000, dtype=np.uint32))
    assert (np.diff(tail) < 0).all()  # neighbouring integers stay apart: 32-bit resolution where it decides


def _correlation(a, b):
    return float(np.corrcoef(a, b)[0, 1])


def test_positions_seeds_ids_and_streams_are_uncorrelated():
    ids = np.arange(151936)
    base = noise.gumbel_noise(42, 100, ids)
    limit = 4.5 / math.sqrt(len(ids))
    others = {
        "next position": noise.gumbel_noise(42, 101, ids),
        "far position": noise.gumbel_noise(42, 100 + 2**31, ids),
        "next seed": noise.gumbel_noise(43, 100, ids),
        "seed + 2**32": noise.gumbel_noise(42 + 2**32, 100, ids),
        "draft stream": noise.gumbel_noise(42, 100, ids, noise.DRAFT),
        "acceptance stream": noise.gumbel_noise(42, 100, ids, noise.ACCEPT),
        "ids 1024 apart": np.roll(base, 1024),
        "next id": np.roll(base, 1),
    }
    for name, other in others.items():
        assert abs(_correlation(base, other)) < limit, name
    # negative control: seed + position as one number repeats noise along the diagonal
    added = lambda seed, position: noise.gumbel_noise(seed + position, 0, ids)
    assert _correlation(added(42, 101), added(43, 100)) > 0.99


def test_noise_depends_on_the_id_alone():
    ids = np.arange(50000)
    whole = noise.noise_bits(7, 9, ids)
    some = np.array([49999, 3, 4096, 17000])
    assert (noise.noise_bits(7, 9, some) == whole[some]).all()


def test_choice_seeds():
    children = [seeds.choice_seed(42, i) for i in range(10_000)]
    assert children[0] == 42
    assert len(set(children)) == len(children)
    assert all(0 <= s <= seeds.SEED_MAX for s in children)
    assert not set(children[1:]) & {seeds.choice_seed(43, i) for i in range(10_000)}
    # negative control: seed + i makes choice 1 of seed 42 equal choice 0 of seed 43
    assert 42 + 1 == 43 + 0


def test_prompt_seed_separates_prompts():
    assert seeds.prompt_seed(42, [1, 2, 3]) != seeds.prompt_seed(42, [1, 2, 4])
    assert seeds.prompt_seed(42, [1, 2, 3]) == seeds.prompt_seed(42, (1, 2, 3))
    assert seeds.prompt_seed(42, [1, 2, 3]) != seeds.prompt_seed(43, [1, 2, 3])


@pytest.mark.parametrize("bad", [-1, 2**63, "7", 1.5, True])
def test_bad_seeds_name_the_field(bad):
    with pytest.raises(ValueError, match=r"sampling_seed: got .* accepts an integer from 0"):
        seeds.check_seed(bad, "sampling_seed")
