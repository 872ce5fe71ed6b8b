"""The real model in one process: a request's tokens and logprobs against the same request run alone.

Every comparison that must hold for the deterministic engine is shown to fail on the stock engine.
"""

from __future__ import annotations

import compositions
import engine_kit as kit
import pytest

POOL = 16
SEED = 1
EAGER = {"enforce_eager": True}
ON = {"enable_deterministic_inference": True}
CHUNK = {"max_num_batched_tokens": 2048}
TINY_CHUNK = {"max_num_batched_tokens": 16, "max_num_seqs": 16}
NO_CACHE = {"enable_prefix_caching": False}


class Engines:
    """Runs compositions of one pool on engines of given settings, each engine in a process of its own."""

    def __init__(self, probe, model_path, folder, seed=SEED, size=POOL):
        self.probe, self.model, self.folder = probe, str(model_path), folder
        self.pool = compositions.make_pool(seed, kit.make_encoder(model_path), size)
        self.alone = [compositions.alone(i) for i in range(size)]

    def run(self, work, *settings, probe=None, **job):
        engine = {"model": self.model}
        for setting in settings:
            engine.update(setting)
        pool = self.pool if engine.get("enable_deterministic_inference") else compositions.greedy_pool(self.pool)
        job.update(engine=engine, pool=pool, compositions=work)
        return (probe or self.probe).serve(job, self.folder)


@pytest.fixture(scope="module")
def engines(probe, tmp_path_factory, model_path):
    return Engines(probe, model_path, tmp_path_factory.mktemp("jobs"))


BATCHES = compositions.batches(SEED, POOL, (1, 2, 5, 13, 24))


@pytest.fixture(scope="module")
def det(engines):
    """Alone, then batches, on one deterministic engine without prefix caching."""
    return engines.run(engines.alone + BATCHES, EAGER, ON, CHUNK, NO_CACHE)["answers"]


@pytest.fixture(scope="module")
def stock(engines):
    """The same prompts, greedy, on the stock engine."""
    return engines.run(engines.alone + BATCHES, EAGER, CHUNK, NO_CACHE)["answers"]


def first(answers):
    return [found[0] for found in answers[:POOL]]


def assert_same(work, answers, alone, at_least=1):
    compared, lines = kit.differences(work, answers, alone)
    assert compared >= at_least
    assert not lines, f"{len(lines)} of {compared} answers differ from the request run alone:\n" + "\n".join(lines)


def assert_differs(work, answers, alone):
    compared, lines = kit.differences(work, answers, alone)
    print(f"control: {len(lines)} of {compared} answers differ")
    assert lines, f"the stock engine gave {compared} equal answers: this test cannot fail"


def test_the_pool_can_show_a_difference(det):
    """Answers of many distinct tokens, greedy and sampled."""
    tokens = {token for answer in first(det) for choice in answer[1:] for token in choice[1]}
    assert len(tokens) > 100


def test_batches(engines, det):
    assert_same(BATCHES, det[POOL:], first(det), at_least=40)


def test_batches_control(engines, stock):
    assert_differs(BATCHES, stock[POOL:], first(stock))


FEW = compositions.batches(SEED, 6, (13,))


def on_two_threads(engines, *settings):
    """Answers to a few requests in a batch and alone."""
    found = engines.run(engines.alone[:6] + FEW, EAGER, CHUNK, NO_CACHE, *settings, threads=2, cores=sorted(kit.CORES))
    assert found["threads"] == 2
    return found["answers"][6:], [answer[0] for answer in found["answers"][:6]]


def test_batches_on_two_threads(engines):
    """With several threads, other element-wise code runs (``ops/pointwise_cpu.py``)."""
    assert_same(FEW, *on_two_threads(engines, ON), at_least=13)


def test_batches_on_two_threads_control(engines):
    assert_differs(FEW, *on_two_threads(engines))


MIXED = [compositions.make_composition(SEED, i, POOL) for i in range(8)]
CHUNKS = [compositions.make_composition(SEED, 100 + i, POOL, most=6) for i in range(2)]


def test_preemption_prefix_hits_and_aborts(engines, det):
    """Chunks of 100 tokens, a cache of 800 tokens, arrivals at different steps, neighbours aborted."""
    settings = (EAGER, ON, {"max_num_batched_tokens": 100, "max_num_seqs": 24}, compositions.SMALL)
    found = engines.run(MIXED, *settings)
    assert_same(MIXED, found["answers"], first(det), at_least=30)
    assert found["preemptions"] > 0, "nothing was preempted: preemption was not tested"
    assert found["hits"] > 0, "the prefix cache was never hit: it was not tested"
    assert any(member["abort"] is not None for work in MIXED for member in work["members"])


def test_preemption_control(engines, stock):
    settings = (EAGER, {"max_num_batched_tokens": 100, "max_num_seqs": 24}, compositions.SMALL)
    assert_differs(MIXED[:3], engines.run(MIXED[:3], *settings)["answers"], first(stock))


def test_chunks_of_16(engines, det):
    found = engines.run(engines.alone + CHUNKS, EAGER, ON, TINY_CHUNK)
    assert_same(engines.alone + CHUNKS, found["answers"], first(det))


def test_chunks_control(engines, stock):
    work = engines.alone[:8]
    assert_differs(work, engines.run(work, EAGER, TINY_CHUNK)["answers"], first(stock))


def warm(work):
    return [{**composition, "cold": False} for composition in work]


def test_prefix_cache_hit(engines, det):
    """Every request twice: the second time its prompt, and what decoding wrote, is in the cache."""
    work = warm(engines.alone) * 2
    found = engines.run(work, EAGER, ON, CHUNK)
    assert found["hits"] > 200, "the prefix cache was not hit: it was not tested"
    assert_same(work, found["answers"], first(det))


def test_prefix_cache_control(engines, stock):
    work = warm(engines.alone[:8]) * 2
    assert_differs(work, engines.run(work, EAGER, CHUNK)["answers"], first(stock))


def test_compiled_equals_eager(engines, det):
    """The compiled engine gives the eager engine's bits, in batches too.  (Its control is among the soak tests.)"""
    work = engines.alone + BATCHES[-2:]
    found = engines.run(work, ON, CHUNK, {"max_num_batched_tokens": 256}, {"compilation_config": {"mode": 3}})
    assert found["compilation"] != "NONE"
    assert_same(work, found["answers"], first(det))


def test_switched_off_equals_not_installed(engines, stock, bare):
    """An engine without the switch answers as in a process where the plugin cannot be found."""
    hidden = engines.run(engines.alone, EAGER, CHUNK, NO_CACHE, probe=bare, hide_plugin=True)
    assert not hidden["plugin_loaded"]
    assert [found[0] for found in hidden["answers"]] == first(stock)
