"""The test modes against a fake server: a deterministic one passes, every kind of broken one is found."""

from __future__ import annotations

import json

import pytest
from fake_vllm import FakeVllm
from hypothesis import given
from hypothesis import strategies as st

from det_plugin.verify import ALL_MODES, VerificationResult, VerifyOptions, run_verification
from det_plugin.verify.modes import waves

SMALL = {
    "base_url": "http://fake",
    "batch_sizes": [1, 2, 5],
    "n_trials": 2,
    "max_new_tokens": 12,
    "prefix_lengths": [1, 40, 90],
    "long_prompt_tokens": 220,
    "temperatures": [0.0, 0.8],
}


def run(fake, **changes) -> tuple[VerificationResult, list[str]]:
    lines: list[str] = []
    result = run_verification(VerifyOptions(**{**SMALL, **changes}), echo=lines.append, transport=fake.transport)
    return result, lines


@pytest.mark.parametrize("stream", [False, True])
def test_deterministic_server_is_the_same_in_every_mode(stream):
    fake = FakeVllm()
    result, lines = run(fake, stream=stream, top_logprobs=3)
    assert result.error == ""
    assert [(m.mode, m.temperature) for m in result.modes] == [(m, t) for m in ALL_MODES for t in (0.0, 0.8)]
    assert {m.status for m in result.modes} == {"same"}
    assert result.exit_code == 0
    assert {m.unique for m in result.modes} == {1}
    assert all(m.total >= 2 and m.output_tokens > 0 for m in result.modes)
    assert "  Total samples: 6, Unique samples: 1" in lines
    assert lines[-1].startswith("SAME: 10 runs (10 same)")
    assert all(m.kl == 0.0 for m in result.modes if m.mode == "p_vs_d")
    assert fake.aborted, "mixed must make requests leave"


@pytest.mark.parametrize(
    ("fault", "mode", "cause"),
    [
        ("batch", "single", "numerics"),
        ("batch", "mixed", "numerics"),
        ("batch_token", "single", "sampling"),
        ("batch_inputs", "single", "inputs"),
        ("cache", "prefix", "numerics"),
        ("cache", "radix_cache", "numerics"),
        ("decode_cache", "radix_cache", "numerics"),
        ("phase", "p_vs_d", "numerics"),
        ("long", "mixed", "numerics"),
    ],
)
def test_each_fault_is_found_and_named(fault, mode, cause):
    result, lines = run(FakeVllm(fault), test_modes=[mode], temperatures=[0.0])
    (found,) = result.modes
    assert found.status == "different"
    assert result.exit_code == 1
    assert found.unique > 1
    divergence = found.first_divergence
    assert divergence.cause == cause
    if cause == "sampling":
        assert divergence.index == 3
        assert divergence.token_ids[0] != divergence.token_ids[1]
        assert divergence.tokens[0] == f"<{divergence.token_ids[0]}>"
    if cause == "numerics":
        assert divergence.logprobs[0] != divergence.logprobs[1]
    assert any("first divergence at" in line and cause in line for line in lines)
    assert lines[-1].startswith("DIFFERENT")


def test_a_fault_of_the_long_prompt_is_invisible_to_single():
    result, _ = run(FakeVllm("long"), test_modes=["single"], temperatures=[0.0])
    assert result.exit_code == 0


def test_every_sample_is_compared_not_only_the_first_of_a_trial():
    result, _ = run(FakeVllm(), test_modes=["single"], temperatures=[0.0], batch_sizes=[1, 4, 9])
    (group,) = result.modes[0].groups
    assert group.total == 1 + 1 + 2 + 5
    assert group.tokens_compared == 12 * (group.total - 1)


@pytest.mark.parametrize("mode", ["prefix", "radix_cache"])
def test_without_cached_tokens_the_cache_modes_are_not_tested(mode):
    result, lines = run(FakeVllm(details=False), test_modes=["single", mode], temperatures=[0.0])
    assert [m.status for m in result.modes] == ["same", "not_tested"]
    assert "--enable-prompt-tokens-details" in result.modes[1].reason
    assert result.exit_code == 2
    assert any("NOT TESTED" in line for line in lines)


@pytest.mark.parametrize("mode", ["prefix", "radix_cache"])
def test_a_server_that_caches_nothing_is_not_tested(mode):
    result, _ = run(FakeVllm(caching=False), test_modes=[mode], temperatures=[0.0])
    assert result.exit_code == 2
    assert "--enable-prefix-caching" in result.modes[0].reason


@pytest.mark.parametrize("mode", ["prefix", "radix_cache"])
def test_a_miss_that_cannot_be_had_is_not_tested(mode):
    result, _ = run(FakeVllm(leaky=True), test_modes=[mode], temperatures=[0.0, 0.0])
    assert result.modes[1].status == "not_tested"
    assert "fresh cache_salt took" in result.modes[1].reason
    assert result.exit_code == 2


def test_hits_and_misses_are_counted():
    result, _ = run(FakeVllm(), test_modes=["radix_cache"], temperatures=[0.0])
    groups = result.modes[0].groups
    assert len(groups) == 4
    assert {(g.cache_hits, g.cache_misses) for g in groups} == {(1, 1)}
    assert {g.label.split(",")[0] for g in groups} == {"cache filled by prefill", "cache filled by decode"}


@given(st.integers(1, 200), st.integers(1, 20))
def test_waves_cover_every_trial_once_and_some_run_alone(trials, width):
    found = list(waves(trials, width))
    assert [i for wave in found for i in wave] == list(range(trials))
    assert len(found[0]) == 1
    assert max(map(len, found)) <= width


def test_degenerate_answers_prove_nothing():
    result, _ = run(FakeVllm("constant"), test_modes=["single"], temperatures=[0.0])
    assert result.modes[0].status == "not_tested"
    assert "degenerate" in result.modes[0].reason


def test_prefixes_are_cut_to_the_context():
    result, _ = run(FakeVllm(max_model_len=100), test_modes=["prefix", "mixed"], temperatures=[0.0])
    assert result.exit_code == 0
    assert result.modes[0].facts["prefix_lengths"] == [1, 40, 75]


def test_a_context_without_room_for_the_cache_is_not_tested():
    result, _ = run(FakeVllm(max_model_len=60), test_modes=["radix_cache"], temperatures=[0.0])
    assert result.exit_code == 2
    assert "no room" in result.modes[0].reason


def test_same_seed_same_requests():
    def prompts(seed):
        fake = FakeVllm()
        run(fake, test_modes=["single"], temperatures=[0.0], rng_seed=seed)
        return sorted(json.dumps(body["prompt"]) for body in fake.bodies)

    assert prompts(3) == prompts(3)
    assert prompts(3) != prompts(4)


def test_seed_is_sent_only_with_a_temperature_and_can_be_left_out():
    fake = FakeVllm()
    run(fake, test_modes=["single"], temperatures=[0.8], batch_sizes=[1])
    assert any(body.get("seed") == 42 for body in fake.bodies)
    fake = FakeVllm()
    run(fake, test_modes=["single"], temperatures=[0.8], batch_sizes=[1], sampling_seed=None)
    assert not any("seed" in body for body in fake.bodies)


def test_neighbours_of_mixed_sample_differently_and_a_long_prompt_joins():
    fake = FakeVllm()
    result, _ = run(fake, test_modes=["mixed"], temperatures=[0.0], n_trials=7)
    assert result.modes[0].facts["joined_in_mid_decode"] == 7
    assert result.modes[0].facts["left_in_mid_decode"] == 7
    for name in ("top_k", "top_p", "min_p", "frequency_penalty", "repetition_penalty", "seed"):
        assert any(name in body for body in fake.bodies), name
    assert any(len(body["prompt"]) >= 220 for body in fake.bodies if isinstance(body["prompt"], list))


# --- servers that fail ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fail_after", [0, 3, 9])
def test_http_500_is_one_clear_line(fail_after):
    result, lines = run(FakeVllm(fail_after=fail_after))
    assert result.exit_code == 2
    assert "\n" not in result.error
    assert "HTTP 500" in result.error
    assert "engine core died see the log" in result.error
    assert lines[-1] == f"not tested: {result.error}"


def test_a_failure_after_a_difference_is_still_not_tested():
    result, _ = run(FakeVllm("batch", fail_after=16), temperatures=[0.0])
    assert result.modes[0].status == "different"
    assert result.exit_code == 2


def test_garbage_is_one_clear_line():
    result, _ = run(FakeVllm(garbage=True))
    assert result.exit_code == 2
    assert "not JSON" in result.error
    assert "\n" not in result.error


def test_unknown_model_names_the_served_ones():
    result, _ = run(FakeVllm(), model="other")
    assert result.exit_code == 2
    assert "'other'" in result.error
    assert "fake" in result.error
