"""One test per published failure (rows 13 to 20, 22, 23): a row's token and logprobs are its own."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from det_plugin.config import DetConfig  # noqa: E402
from det_plugin.host.vllm import sampler_v1  # noqa: E402
from det_plugin.host.vllm import seeds as host_seeds  # noqa: E402
from det_plugin.sampling import cpu, cpu_logprobs, noise, reference  # noqa: E402
from det_plugin.sampling.reference import RowParams  # noqa: E402
from det_plugin.sampling.seeds import choice_seed, prompt_seed  # noqa: E402

VOCAB = 5000
RNG = np.random.default_rng(3)
LOGITS = (RNG.standard_normal((256, VOCAB)) * 3).astype(np.float32)
OWN = RowParams(temperature=0.8, seed=42, position=33)
NEIGHBOURS = [
    RowParams(temperature=0.0),
    RowParams(seed=42, position=5),
    RowParams(top_k=1),
    RowParams(top_p=0.1),
    RowParams(min_p=0.2),
    RowParams(temperature=5.0, top_k=40, top_p=0.9),
]


def sample(rows, logits):
    names = ("temperature", "seed", "position", "top_k", "top_p", "min_p")
    columns = ([getattr(r, name) for r in rows] for name in names)
    return cpu.sample(np.ascontiguousarray(logits), cpu.BatchParams(*columns))


def generator_order_sample(rows, logits):
    """Negative control: noise from one generator in batch order, as unseeded stock sampling draws it."""
    generator = torch.Generator().manual_seed(0)
    noise_ = torch.empty(len(rows), VOCAB).exponential_(generator=generator).numpy()
    return np.array(
        [int(np.argmax(np.exp(x - x.max()) / q)) for x, q in zip(logits.astype(np.float64), noise_, strict=True)]
    )


def rank_noise_sample(row, logits, pool):
    """Negative control: noise keyed by the rank in a sorted pool instead of by the id."""
    order = np.argsort(-logits, kind="stable")[:pool]
    ranks = np.arange(len(order)) if pool < len(logits) else np.argsort(order)
    score = logits[order] * reference.inverse_temperature(row.temperature)
    return int(order[np.argmax(score + noise.gumbel_noise(row.seed, row.position, ranks))])


@pytest.mark.parametrize("own", [OWN, OWN._replace(top_p=0.95), OWN._replace(top_k=50), OWN._replace(min_p=0.05)])
@pytest.mark.parametrize("size", [1, 2, 64, 65, 256])
def test_row_13_14_batchmates_and_batch_size(own, size):
    alone = sample([own], LOGITS[:1])[0]
    for place in {0, size // 2, size - 1}:
        rows = [NEIGHBOURS[i % len(NEIGHBOURS)] for i in range(size)]
        logits = LOGITS[:size].copy()
        rows[place], logits[[place, 0]] = own, logits[[0, place]]
        assert sample(rows, logits)[place] == alone


def test_row_13_14_negative_controls():
    tokens = {int(generator_order_sample([OWN] * n, LOGITS[[0] * n])[-1]) for n in (1, 2, 64, 65)}
    assert len(tokens) > 1
    x = LOGITS[0]
    rows = [OWN._replace(position=p) for p in range(40)]
    # a neighbour that forces sorting would change the row
    assert any(rank_noise_sample(r, x, VOCAB) != rank_noise_sample(r, x, 4000) for r in rows)


def test_row_14_a_wider_top_k_never_changes_a_token_that_both_keep():
    for position in range(40):
        free = sample([OWN._replace(position=position)], LOGITS[:1])[0]
        for k in (1, 5, 50, 4999):
            row = OWN._replace(position=position, top_k=k)
            if reference.kept_tokens(LOGITS[0], row)[free]:
                assert sample([row], LOGITS[:1])[0] == free


def test_row_15_min_p_with_a_seed():
    row = OWN._replace(min_p=0.1)
    assert sample([row] * 3, LOGITS[[0, 0, 0]]).tolist() == [reference.sample_reference(LOGITS[0], row)] * 3


def test_row_16_n_choices_differ_and_do_not_depend_on_n():
    def choices(n, steps=12):
        own = [OWN._replace(seed=choice_seed(7, i), temperature=1.0) for i in range(n)]
        rows = [[r._replace(position=p) for p in range(steps)] for r in own]
        return [tuple(sample(r, LOGITS[:steps]).tolist()) for r in rows]

    sixteen = choices(16)
    assert len(set(sixteen)) == 16
    assert choices(4) == sixteen[:4]
    assert choices(1)[0] == sixteen[0]
    # negative control: the same parameters for every choice give one answer
    same = [tuple(sample([OWN._replace(position=p) for p in range(12)], LOGITS[:12]).tolist()) for _ in range(4)]
    assert len(set(same)) == 1


def test_row_17_prompt_scope_gives_each_prompt_its_own_noise():
    a, b = prompt_seed(42, [1, 2, 3]), prompt_seed(42, [4, 5, 6])
    ids = np.arange(VOCAB)
    shared = noise.gumbel_noise(42, 9, ids)
    assert abs(np.corrcoef(noise.gumbel_noise(a, 9, ids), noise.gumbel_noise(b, 9, ids))[0, 1]) < 0.07
    assert (shared == noise.gumbel_noise(42, 9, ids)).all()  # the default: equal seeds share noise


def test_row_18_a_masked_token_is_never_sampled():
    rows = [OWN._replace(seed=s, temperature=t) for s in range(100) for t in (0.1, 5.0)]
    logits = np.full((len(rows), VOCAB), -np.inf, np.float32)
    allowed = RNG.integers(0, VOCAB, len(rows))
    logits[np.arange(len(rows)), allowed] = -50.0
    assert (sample(rows, logits) == allowed).all()


def fake_runner(*seeds_given):
    requests = {
        f"r{i}": SimpleNamespace(sampling_params=SimpleNamespace(seed=s, temperature=1.0))
        for i, s in enumerate(seeds_given)
    }
    return SimpleNamespace(requests=requests, input_batch=SimpleNamespace(req_ids=list(requests)))


def params(seed=None, **extra):
    return SimpleNamespace(seed=seed, extra_args=extra or None, min_p=0.0, top_k=0)


def test_row_19_the_seed_counts_beside_unseeded_neighbours(monkeypatch):
    monkeypatch.setattr(sampler_v1, "_config", DetConfig())
    assert sampler_v1.row_seeds(fake_runner(5, None, 7)).tolist() == [5, 42, 7]


@pytest.mark.parametrize(
    ("given", "config", "want"),
    [
        (params(), DetConfig(), 42),
        (params(), DetConfig(default_seed=9), 9),
        (params(5), DetConfig(), 5),
        (params(sampling_seed=6), DetConfig(), 6),
        (params(6, sampling_seed=6), DetConfig(), 6),
        (params(0), DetConfig(), 0),
        (params(5), DetConfig(noise_scope="prompt"), prompt_seed(5, [1, 2])),
        (params(5, noise_scope="prompt"), DetConfig(), prompt_seed(5, [1, 2])),
        (params(5, noise_scope="seed"), DetConfig(noise_scope="prompt"), 5),
    ],
)
def test_row_19_20_the_resolved_seed_is_a_function_of_the_request(given, config, want):
    host_seeds.resolve(given, [1, 2], "request", config)
    assert given.seed == want


def test_a_random_default_seed_is_drawn_for_sampled_requests_alone():
    def resolved(given, temperature):
        given.temperature = temperature
        host_seeds.resolve(given, [1, 2], "request", DetConfig(default_seed="random"))
        return given.seed

    drawn = {resolved(params(), 0.8) for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= seed < 2**63 for seed in drawn)
    assert resolved(params(5), 0.8) == resolved(params(sampling_seed=5), 0.8) == 5
    assert resolved(params(), 0.0) == 0  # draws no noise: nothing to record


def test_row_22_top_logprobs_do_not_depend_on_a_neighbour_that_asks_for_more():
    x = (np.round(LOGITS[:8] * 4) / 4).astype(np.float32)  # many ties
    lse = cpu_logprobs.logsumexp(x)
    ids, values = cpu_logprobs.top_logprobs(x, lse, 20)
    for k in (1, 5, 20, 300, VOCAB):
        more_ids, more_values = cpu_logprobs.top_logprobs(x, lse, k)
        n = min(k, 20)
        assert np.array_equal(more_ids[:, :n], ids[:, :n])
        assert np.array_equal(more_values[:, :n], values[:, :n])
    for row in range(8):
        assert ids[row].tolist() == sorted(range(VOCAB), key=lambda i, r=row: (-x[r, i], i))[:20]
    # negative control: torch.topk orders ties as its algorithm happens to
    stock = {tuple(torch.topk(torch.from_numpy(x[:1]), k).indices[0, :5].tolist()) for k in (5, 20, 300, VOCAB)}
    assert len(stock) > 1 or next(iter(stock)) != tuple(ids[0, :5].tolist())


def test_row_23_decode_and_prefill_logprobs_are_equal():
    tokens = sample([OWN._replace(position=p) for p in range(16)], LOGITS[:16])[:, None]
    decode = np.concatenate(
        [
            cpu_logprobs.token_logprobs(LOGITS[i : i + 1], cpu_logprobs.logsumexp(LOGITS[i : i + 1]), tokens[i : i + 1])
            for i in range(16)
        ]
    )
    prefill = np.take_along_axis(cpu_logprobs.log_softmax(LOGITS[:16]), tokens, axis=1)
    assert decode.tobytes() == prefill.tobytes()
    exact = np.take_along_axis(torch.from_numpy(LOGITS[:16]).double().log_softmax(-1).numpy(), tokens, axis=1)
    assert np.abs(decode - exact).max() < 2e-6


def test_resume_from_prompt_plus_partial_answer():
    def generate(start, count):
        return [int(sample([OWN._replace(position=p)], LOGITS[p : p + 1])[0]) for p in range(start, start + count)]

    whole = generate(10, 64)
    for cut in range(64):
        assert generate(10 + cut, 64 - cut) == whole[cut:]
