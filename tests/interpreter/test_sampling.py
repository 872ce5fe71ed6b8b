"""The sampler's Triton kernels in the interpreter, bit for bit against numpy.

Run in a process of their own with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import json
from importlib.resources import files

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from det_plugin.sampling import _kernels, cpu_logprobs, gpu, gpu_logprobs, noise, reference
from det_plugin.sampling.reference import RowParams

VECTORS = json.loads(files("det_plugin.sampling").joinpath("test_vectors.json").read_text())


def sample(logits, rows, dtype=torch.float32, index=None, **options):
    """Rows through the kernels; ``index`` maps rows to entries of the request arrays."""
    column = lambda values, kind: torch.tensor(values, dtype=kind)
    index = range(len(rows)) if index is None else index
    return gpu.sample(
        torch.from_numpy(logits).to(dtype),
        column(list(index), torch.int32),
        column([rows[i].position - 1 for i in index], torch.int64),
        column([r.temperature for r in rows], torch.float32),
        column([r.seed for r in rows], torch.int64),
        column([r.top_k for r in rows], torch.int32),
        column([r.top_p for r in rows], torch.float32),
        column([float(reference.log_min_p(r.min_p)) for r in rows], torch.float32),
        **options,
    ).tolist()


@triton.jit
def _noise_kernel(bits_ptr, gumbel_ptr, seed_ptr, position_ptr, STREAM: tl.constexpr):
    lane = tl.arange(0, 1024)
    seed = tl.load(seed_ptr)
    position = tl.load(position_ptr)
    w0, w1, w2, w3 = _kernels.philox_words(lane, position, tl.full((), STREAM, tl.int64), seed)
    tl.store(bits_ptr + lane, w0.to(tl.int32, bitcast=True))
    tl.store(bits_ptr + 1024 + lane, w1.to(tl.int32, bitcast=True))
    tl.store(bits_ptr + 2048 + lane, w2.to(tl.int32, bitcast=True))
    tl.store(bits_ptr + 3072 + lane, w3.to(tl.int32, bitcast=True))
    tl.store(gumbel_ptr + lane, _kernels.gumbel(w0))
    tl.store(gumbel_ptr + 1024 + lane, _kernels.gumbel(w1))
    tl.store(gumbel_ptr + 2048 + lane, _kernels.gumbel(w2))
    tl.store(gumbel_ptr + 3072 + lane, _kernels.gumbel(w3))


@pytest.mark.parametrize("case", VECTORS["noise"], ids=lambda c: f"{c['seed']}-{c['position']}-{c['stream']}")
def test_vector_file(case):
    bits, gumbel = torch.empty(4096, dtype=torch.int32), torch.empty(4096)
    seed, position = torch.tensor([case["seed"]]), torch.tensor([case["position"]])
    _noise_kernel[(1,)](bits, gumbel, seed, position, STREAM=case["stream"])
    for token, want_bits, want_gumbel in zip(VECTORS["ids"], case["bits"], case["gumbel"], strict=True):
        if token < 4096:
            assert f"{int(bits[token]) & 0xFFFFFFFF:08x}" == want_bits
            assert f"{int(gumbel[token : token + 1].view(torch.int32)) & 0xFFFFFFFF:08x}" == want_gumbel


def cases(seed, count):
    rng = np.random.default_rng(seed)
    for number in range(count):
        vocab = int(rng.choice([100, 4096, 5000, 9000]))
        x = (rng.standard_normal((6, vocab)) * rng.choice([0.3, 1, 5, 30])).astype(np.float32)
        dtype = torch.float32 if number % 3 else torch.bfloat16
        if number % 2:
            x = np.round(x * 2) / 2
        if number % 4 == 1:
            x[rng.random(x.shape) < 0.9] = -np.inf
        if number % 5 == 4:
            x[2] = -np.inf
        x = torch.from_numpy(x).to(dtype).float().numpy()
        rows = [
            RowParams(
                float(rng.choice([0, 0.1, 0.8, 1, 5])),
                int(rng.choice([0, 1, 3, 50, 800, vocab, vocab + 5])),
                float(rng.choice([1, 0.95, 0.5, 0.1, 1e-6])),
                float(rng.choice([0, 0, 0.05, 0.5, 1.0])),
                int(rng.integers(0, 2**63)),
                int(rng.integers(1, 5000)),
            )
            for _ in range(6)
        ]
        yield x, rows, dtype


def test_sample_equals_the_specification():
    for x, rows, dtype in cases(1, 8):
        assert sample(x, rows, dtype) == [reference.sample_reference(x[i], rows[i]) for i in range(6)]


def test_long_lists_and_rejected_tokens():
    """top_k beyond the candidate list, ties at the limit, and nuclei so small that first draws are rejected."""
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((4, 5000)) * 0.5).astype(np.float32)
    x[1] = np.round(x[1] * 4) / 4
    rows = [
        RowParams(top_k=800, top_p=0.2, seed=5, position=9),
        RowParams(top_k=300, seed=5, position=9),
        RowParams(top_p=0.05, seed=6, position=9),
        RowParams(min_p=0.5, seed=7, position=9),
    ]
    for dtype in (torch.float32, torch.bfloat16):
        y = torch.from_numpy(x).to(dtype).float().numpy()
        assert sample(y, rows, dtype) == [reference.sample_reference(y[i], rows[i]) for i in range(4)]


def test_rows_alone_and_launch_options():
    x, rows, _ = next(iter(cases(3, 1)))
    rows = [r._replace(temperature=0.8) for r in rows]
    whole = sample(x, rows)
    for i in (0, 3, 5):
        assert sample(x[i : i + 1], rows, index=[i]) == [whole[i]]
    order = [4, 1, 0]
    assert sample(x[order], rows, index=order) == [whole[i] for i in order]
    free = [r._replace(top_k=0, top_p=1.0, min_p=0.0) for r in rows]
    assert sample(x, free, filtered=False) == sample(x, free)
    narrow = [r._replace(top_k=0) for r in rows]
    assert sample(x, narrow, with_top_k=False) == sample(x, narrow)


def test_the_interpreter_notices_a_wrong_position():
    x, rows, _ = next(iter(cases(4, 1)))
    rows = [r._replace(temperature=5.0, top_k=0, top_p=1.0, min_p=0.0) for r in rows]
    assert sample(x, rows) != sample(x, [r._replace(position=r.position + 1) for r in rows])


def test_logprobs_equal_the_cpu():
    rng = np.random.default_rng(5)
    x = np.round(rng.standard_normal((5, 5000)).astype(np.float32) * 8) / 4
    x[3, 100:] = -np.inf
    tokens = np.array([0, 7, 4999, 3, 11])
    logits = torch.from_numpy(x)
    ids = gpu_logprobs.top_ids(logits, 20)
    lse = cpu_logprobs.logsumexp(x)
    for row in range(5):
        assert ids[row].tolist() == sorted(range(5000), key=lambda i, r=row: (-x[r, i], i))[:20]
    assert torch.equal(gpu_logprobs.top_ids(logits, 7), ids[:, :7])
    columns = torch.cat([torch.from_numpy(tokens)[:, None], ids], 1)
    values, ranks = gpu_logprobs.scores(logits, torch.from_numpy(tokens), columns)
    assert np.array_equal(values.numpy(), cpu_logprobs.token_logprobs(x, lse, columns.numpy()))
    assert ranks.tolist() == cpu_logprobs.token_ranks(x, lse, tokens).tolist()


def test_noise_module_is_the_source_of_the_constants():
    assert _kernels.M0.value == noise.PHILOX_M0
    assert _kernels.L6.value == noise.LN_COEFFS[6]


def test_wrong_logits_are_refused():
    with pytest.raises(ValueError, match="logits: expected"):
        sample(np.zeros((2, 4), np.float32), [RowParams(position=1)] * 2, dtype=torch.float64)
