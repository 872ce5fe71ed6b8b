"""200 random compositions on the real model, each request against itself run alone: tokens and logprobs.

``make soak`` prints its seed; ``make soak SEED=n`` repeats it.  ``DET_PLUGIN_SOAK_ONLY=i,j`` runs only those
compositions, ``DET_PLUGIN_SOAK_COUNT=n`` another number of them.
"""

from __future__ import annotations

import os
import random

import compositions
import engine_kit as kit
import pytest

pytestmark = pytest.mark.soak


COUNT = int(os.environ.get("DET_PLUGIN_SOAK_COUNT", "200"))
POOL = 40
MODES = {"eager": {"enforce_eager": True}, "compiled": {"compilation_config": {"mode": 3}}}
CHUNKS = {16: {"max_num_seqs": 16}, 100: {"max_num_seqs": 24}, 512: {}, 2048: {}}
SHARE = {16: 15, 100: 25, 512: 30, 2048: 30}
"""Compositions in a hundred of each chunk size: the small ones take more steps."""


def assignment(count: int) -> dict[tuple[str, int], list[int]]:
    """Which engine runs which composition; every engine gets its share of every 200."""
    engines = [(mode, chunk) for mode in MODES for chunk in CHUNKS]
    order = [engine for engine in engines for _ in range(SHARE[engine[1]])]
    random.Random(7).shuffle(order)
    found: dict[tuple[str, int], list[int]] = {engine: [] for engine in engines}
    for index in range(count):
        found[order[index % len(order)]].append(index)
    return found


class Soak:
    def __init__(self, seed, probe, model_path, folder):
        self.seed, self.probe, self.model, self.folder = seed, probe, str(model_path), folder
        self.pool = compositions.make_pool(seed, kit.make_encoder(model_path), POOL)
        self.compared = self.preemptions = self.hits = self.aborted = self.compositions = 0
        work = [compositions.alone(i) for i in range(POOL)]
        found = self.run(work, {**MODES["eager"], "max_num_batched_tokens": 2048, "enable_prefix_caching": False})
        self.alone = [answers[0] for answers in found["answers"]]

    def run(self, work, engine, *, on=True):
        pool = self.pool if on else compositions.greedy_pool(self.pool)
        settings = {"model": self.model, "enable_deterministic_inference": on, **engine}
        return self.probe.serve({"engine": settings, "pool": pool, "compositions": work}, self.folder)


@pytest.fixture(scope="module")
def soak_seed(pytestconfig):
    given = pytestconfig.getoption("--hypothesis-seed", None) or os.environ.get("DET_PLUGIN_SOAK_SEED")
    seed = int(given) if given not in (None, "random") else random.SystemRandom().randrange(10**6)
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nsoak: seed {seed} (make soak SEED={seed} repeats this run)", flush=True)
    return seed


@pytest.fixture(scope="module")
def soak(soak_seed, probe, tmp_path_factory, model_path):
    return Soak(soak_seed, probe, model_path, tmp_path_factory.mktemp("jobs"))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("mode", MODES)
def test_compositions(soak, mode, chunk):
    """Random arrivals, neighbours and aborts on one engine: chunks of ``chunk`` tokens, a KV cache of 800."""
    chosen = assignment(COUNT)[mode, chunk]
    if only := os.environ.get("DET_PLUGIN_SOAK_ONLY"):
        chosen = [index for index in chosen if index in {int(i) for i in only.split(",")}]
    if not chosen:
        pytest.skip("no composition was chosen for this engine")
    work = [{**compositions.make_composition(soak.seed, index, POOL), "index": index} for index in chosen]
    engine = {**MODES[mode], **CHUNKS[chunk], **compositions.SMALL, "max_num_batched_tokens": chunk}
    found = soak.run(work, engine)
    assert (found["compilation"] == "NONE") is (mode == "eager")
    compared, lines = kit.differences(work, found["answers"], soak.alone)
    soak.compared += compared
    soak.compositions += len(work)
    soak.preemptions += found["preemptions"]
    soak.hits += found["hits"]
    soak.aborted += sum(member["abort"] is not None for composition in work for member in composition["members"])
    print(
        f"{mode}, chunks of {chunk}: {len(work)} compositions, {compared} answers, {found['preemptions']:.0f} "
        f"preemptions, {found['hits']:.0f} tokens from the prefix cache, {found['run_seconds']:.0f} s"
    )
    assert not lines, (
        f"seed {soak.seed}: {len(lines)} of {compared} answers differ from the request run alone "
        f"(make soak SEED={soak.seed} repeats it):\n" + "\n".join(lines)
    )


def test_everything_was_tested(soak):
    """Preemption, prefix hits and aborts did happen in the compositions before."""
    if COUNT < 100 or os.environ.get("DET_PLUGIN_SOAK_ONLY"):
        pytest.skip("only some compositions ran")
    print(
        f"soak: seed {soak.seed}, {soak.compositions} compositions, {soak.compared} answers identical, "
        f"{soak.preemptions:.0f} preemptions, {soak.hits:.0f} cached tokens, {soak.aborted} aborted requests"
    )
    assert soak.compositions == COUNT
    assert soak.preemptions > 20
    assert soak.hits > 1000
    assert soak.aborted > 20


@pytest.mark.timeout(900)
def test_control(soak):
    """The stock engine, compiled, fails the same comparison with its own eager answers."""
    work = [compositions.alone(i) for i in range(POOL)]
    plain = {**MODES["eager"], "max_num_batched_tokens": 2048, "enable_prefix_caching": False}
    alone = [answers[0] for answers in soak.run(work, plain, on=False)["answers"]]
    compiled = {**MODES["compiled"], "max_num_batched_tokens": 2048, "enable_prefix_caching": False}
    found = soak.run(work, compiled, on=False)
    assert found["compilation"] != "NONE"
    _, lines = kit.differences(work, found["answers"], alone)
    assert lines, "the stock engine's compiled answers equal its eager ones: this test cannot fail"
    work = [compositions.make_composition(soak.seed, index, POOL) for index in range(4)]
    found = soak.run(work, {**plain, **compositions.SMALL}, on=False)
    _, lines = kit.differences(work, found["answers"], alone)
    assert lines, "the stock engine's batched answers equal its own alone: this test cannot fail"
