"""Two CPU ranks: a request's answer does not depend on its batch; the stock engine's does."""

from __future__ import annotations

import random

import compositions
import engine_check
import engine_kit as kit
import pytest

LENGTHS = (3, 700, 1200, 1350, 1500, 1800)
NEIGHBOURS = (1, 30, 900)
BATCHES, OTHERS = 3, 9
TWO_RANKS = {"tensor_parallel_size": 2, "max_model_len": 2048, "max_num_batched_tokens": 2048, "enforce_eager": True}


def greedy(rng: random.Random, length: int) -> dict:
    params = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "logprobs": 2}
    return {"prompt": [rng.randrange(100, 4000) for _ in range(length)], "params": params}


def together(rng: random.Random, size: int) -> dict:
    """All watched requests and as many others, in random order."""
    members = [*range(len(LENGTHS)), *rng.sample(range(len(LENGTHS), size), OTHERS)]
    rng.shuffle(members)
    return {"members": [{"request": m, "arrival": 0, "abort": None} for m in members], "cold": False}


RNG = random.Random(0)
POOL = [greedy(RNG, n) for n in (*LENGTHS, *(RNG.choice(NEIGHBOURS) for _ in range(BATCHES * OTHERS)))]
ALONE = [compositions.alone(i) for i in range(len(LENGTHS))]
WORK = [{**together(RNG, len(POOL)), "cold": batch == 0} for batch in range(BATCHES)]


@pytest.fixture(scope="module")
def run(probe, tmp_path_factory):
    """Answers of the watched requests alone, and those in batches that differ, of an engine of a random model whose
    heads divide by two (the real one has nine)."""
    if len(kit.CORES) < 2:
        pytest.skip("two ranks need two cores")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(engine_check.MODELS, "llama-small", ("LlamaForCausalLM", 512, 1024, 4, 8, 2, 64, 8192))
        model = engine_check.write_model("llama-small", tmp_path_factory.mktemp("models"))

    def run(*, on: bool):
        engine = {"model": str(model), "enable_deterministic_inference": on, **TWO_RANKS}
        job = {"engine": engine, "pool": POOL, "compositions": ALONE + WORK, "cores": sorted(kit.CORES)}
        answers = probe.serve(job, tmp_path_factory.mktemp("job"), VLLM_CPU_OMP_THREADS_BIND=kit.TWO_RANKS)["answers"]
        alone = [found[0] for found in answers[: len(ALONE)]]
        watched = [
            (member["request"], answer)
            for composition, found in zip(WORK, answers[len(ALONE) :], strict=True)
            for member, answer in zip(composition["members"], found, strict=True)
            if member["request"] < len(LENGTHS)
        ]
        assert len(watched) == BATCHES * len(LENGTHS)
        return alone, [kit.where(alone[request], answer) for request, answer in watched if answer != alone[request]]

    return run


def test_two_ranks(run):
    """Batches of mixed lengths give every watched request its own answer, bit for bit."""
    alone, different = run(on=True)
    assert min(len(set(answer[1][1])) for answer in alone) >= 8
    assert not different


def test_two_ranks_control(run):
    """The stock engine fails the same comparison."""
    _, different = run(on=False)
    print(f"control: {len(different)} of {BATCHES * len(LENGTHS)} answers differ")
    assert different, "the stock engine gave equal answers: this test cannot fail"
