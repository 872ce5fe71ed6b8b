"""Start-ups that are refused: before weights load, status not zero, one line that names what to change."""

from __future__ import annotations

import json

import engine_kit as kit
import pytest

FLAG = kit.FLAG


def assert_refused(answer, *expected):
    """One line beginning with ``error:``, no stack trace, nothing loaded."""
    assert answer["config"] is None, f"accepted: {answer['config']}"
    assert answer["rc"] not in (0, None), answer.text()
    assert "Traceback" not in answer["err"], answer.text()
    assert "error:" in answer.last_line, answer.text()
    for text in expected:
        assert text in answer.last_line, answer.text()
    assert "Loading weights" not in answer["out"]


NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3})
CONNECTOR = json.dumps({"kv_connector": "ExampleConnector", "kv_role": "kv_both"})
UNPROVEN = {
    "speculative decoding": (["--speculative-config", NGRAM], "ngram", "without --speculative-config"),
    "LoRA": (["--enable-lora"], "--enable-lora", "merge the adapter"),
    "quantization": (["--quantization", "fp8"], "fp8", "unquantized checkpoint"),
    "fp8 KV cache": (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8", "--kv-cache-dtype auto"),
    "fp8_e5m2 KV cache": (["--kv-cache-dtype", "fp8_e5m2"], "fp8_e5m2", "--kv-cache-dtype auto"),
    "pooling": (["--runner", "pooling"], "--runner pooling", "--runner generate"),
    "embedding": (["--convert", "embed"], "pooling", "--runner generate"),
    "data parallel": (["--data-parallel-size", "2"], "--data-parallel-size 2", "--data-parallel-size 1"),
    "pipeline parallel": (["--pipeline-parallel-size", "2"], "pipeline", "--pipeline-parallel-size 1"),
    "KV transfer": (["--kv-transfer-config", CONNECTOR], "transfer", "without --kv-transfer-config"),
    "KV offloading": (["--kv-offloading-size", "1"], "transfer", "without"),
    "prompt embeddings": (["--enable-prompt-embeds"], "--enable-prompt-embeds", "without --enable-prompt-embeds"),
    "weight offloading": (["--cpu-offload-gb", "1"], "--cpu-offload-gb", "without --cpu-offload-gb"),
    "weight transfer": (["--weight-transfer-config", '{"backend": "nccl"}'], "--weight-transfer-config", "without"),
    "Transformers code": (["--model-impl", "transformers"], "Transformers", "leave --model-impl out"),
    "fast prefill": (["--kv-sharing-fast-prefill"], "--kv-sharing-fast-prefill", "without"),
    "fp64 noise": (["--use-fp64-gumbel"], "--use-fp64-gumbel", "start without --use-fp64-gumbel"),
    "worker class": (["--worker-cls", "a.b.C"], "--worker-cls a.b.C", "leave --worker-cls out"),
    "executor": (
        ["--distributed-executor-backend", "external_launcher"],
        "external_launcher",
        "--distributed-executor-backend mp",
    ),
    "max-autotune": (
        ["--compilation-config", '{"inductor_compile_config": {"max_autotune": true}}'],
        "max_autotune",
        "leave it out",
    ),
    "coordinate descent": (
        ["--compilation-config", '{"inductor_compile_config": {"coordinate_descent_tuning": true}}'],
        "coordinate_descent_tuning",
        "leave it out",
    ),
    "no custom ops": (["--compilation-config", '{"custom_ops": ["none"]}'], "custom_ops", "leave the option out"),
    "without one custom op": (
        ["--compilation-config", '{"custom_ops": ["all", "-rms_norm"]}'],
        "-rms_norm",
        "leave the option out",
    ),
    "tp_invariant": (
        ["--additional-config", '{"det_plugin": {"tp_invariant": true}}'],
        "tp_invariant",
        "leave tp_invariant false",
    ),
    "unknown backend": (["--attention-backend", "nonsense"], "--attention-backend", "'nonsense'", "CPU_ATTN"),
    "GPU backend by alias": (["--attention-backend", "triton"], "TRITON_ATTN", "CPU_ATTN"),
    "GPU backend": (["--attention-backend", "FLASHINFER"], "FLASHINFER", "CPU_ATTN"),
    "GPU backend in a section": (["--attention-config", '{"backend": "FLASH_ATTN"}'], "FLASH_ATTN", "CPU_ATTN"),
    "block size": (["--block-size", "48"], "--block-size: got 48", "multiple of 32"),
}


@pytest.mark.parametrize("name", UNPROVEN)
def test_unproven_feature(probe, model_path, name):
    options, *expected = UNPROVEN[name]
    assert_refused(probe.cli("serve", str(model_path), FLAG, *options), *expected)


@pytest.mark.parametrize("name", ["LoRA", "quantization", "fp8 KV cache"])
def test_unproven_feature_from_python(probe, model_path, name):
    keywords = {
        "LoRA": "enable_lora=True",
        "quantization": "quantization='fp8'",
        "fp8 KV cache": "kv_cache_dtype='fp8'",
    }
    answer = probe.code(
        "from vllm import LLM\nfrom det_plugin import UnsupportedError\n"
        f"try:\n    LLM({str(model_path)!r}, enable_deterministic_inference=True, {keywords[name]})\n"
        "except UnsupportedError as error:\n    result = str(error)\n"
    )
    assert "deterministic inference does not support" in (answer.get("result") or ""), answer.text()


def test_allowed_without_the_switch(probe, model_path):
    """The guards act only where the switch is on."""
    answer = probe.cli("serve", str(model_path), "--enable-lora", "--kv-cache-dtype", "fp8")
    assert answer["config"] is not None, answer.text()


@pytest.mark.parametrize(
    "name", ["/nowhere/model", "./not-here", "surely/not-a-model", "notamodel"], ids=lambda n: n.replace("/", "|")
)
@pytest.mark.parametrize("module", [None, "vllm.entrypoints.openai.api_server"])
def test_model_that_does_not_exist(probe, name, module):
    argv = ("serve", name) if module is None else ("--model", name)
    assert_refused(probe.cli(*argv, FLAG, module=module), f"model: got {name!r}", "config.json")


def test_model_folder_without_configuration(probe, tmp_path):
    assert_refused(probe.cli("serve", str(tmp_path), FLAG), str(tmp_path), "config.json")


def test_model_configuration_that_is_not_json(probe, tmp_path):
    (tmp_path / "config.json").write_text("{ not json")
    assert_refused(probe.cli("serve", str(tmp_path), FLAG), "JSON")


MALFORMED = {
    "not JSON": ('{"det_plugin": }', "--additional-config"),
    "not an object": ("[1]", "additional_config: got list [1], accepts an object"),
    "a number": ("7", "additional_config: got int 7, accepts an object"),
    "a list": ('{"det_plugin": [1]}', "additional_config['det_plugin']: got list [1]"),
    "null": ('{"det_plugin": null}', "additional_config['det_plugin']: got NoneType None"),
    "unknown field": ('{"det_plugin": {"default_sed": 3}}', "default_sed: got 3", "known fields", "default_seed"),
    "negative seed": ('{"det_plugin": {"default_seed": -1}}', "default_seed: got -1", "accepts an integer from 0"),
    "large seed": ('{"det_plugin": {"default_seed": 9223372036854775808}}', "default_seed: got 9223372036854775808"),
    "fractional seed": ('{"det_plugin": {"default_seed": 1.5}}', "default_seed: got 1.5"),
    "boolean seed": ('{"det_plugin": {"default_seed": true}}', "default_seed: got True"),
    "word for a seed": ('{"det_plugin": {"default_seed": "rnd"}}', "default_seed: got 'rnd'", "'random'"),
    "word for a boolean": ('{"det_plugin": {"enable": "yes"}}', "enable: got 'yes'"),
    "unknown scope": ('{"det_plugin": {"noise_scope": "row"}}', "noise_scope: got 'row'", "'seed' or 'prompt'"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_additional_config(probe, model_path, name):
    value, *expected = MALFORMED[name]
    assert_refused(probe.cli("serve", str(model_path), FLAG, "--additional-config", value), *expected)


@pytest.mark.parametrize("name", [n for n in MALFORMED if n not in ("not an object", "a number")])
def test_malformed_section_without_the_flag(probe, model_path, name):
    value, *expected = MALFORMED[name]
    assert_refused(probe.cli("serve", str(model_path), "--additional-config", value), *expected)


CONFLICTS = {
    "flag and variable": ([FLAG], "0"),
    "no flag and variable": (["--no-enable-deterministic-inference"], "1"),
    "flag and section": ([FLAG, "--additional-config", '{"det_plugin": false}'], None),
    "no flag and section": (
        ["--no-enable-deterministic-inference", "--additional-config", '{"det_plugin": {"default_seed": 1}}'],
        None,
    ),
    "section and variable": (["--additional-config", '{"det_plugin": true}'], "off"),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_conflicting_switches(probe, model_path, name):
    options, variable = CONFLICTS[name]
    answer = probe.cli("serve", str(model_path), *options, DET_PLUGIN_ENABLE=variable)
    assert_refused(answer, "conflicting switches", "drop one of them")


def test_variable_that_is_neither(probe, model_path):
    answer = probe.cli("serve", str(model_path), DET_PLUGIN_ENABLE="maybe")
    assert_refused(answer, "DET_PLUGIN_ENABLE: got 'maybe'", "'1'", "'0'")


def test_rust_front_end(probe, model_path, tmp_path):
    """It would pass the seed rules by."""
    binary = tmp_path / "vllm-rs"
    binary.touch()
    answer = probe.cli("serve", str(model_path), FLAG, VLLM_USE_RUST_FRONTEND="1", VLLM_RUST_FRONTEND_PATH=str(binary))
    assert_refused(answer, "VLLM_USE_RUST_FRONTEND", "unset")


def test_host_of_another_version(probe, model_path):
    answer = probe.code(
        "import vllm.version\nvllm.version.__version__ = '0.33.1'\n"
        "from vllm import EngineArgs\nfrom det_plugin import HostError\n"
        f"try:\n    EngineArgs({str(model_path)!r}, enable_deterministic_inference=True).create_engine_config()\n"
        "except HostError as error:\n    result = str(error)\n"
    )
    assert "vLLM 0.33.1 is installed" in (answer.get("result") or ""), answer.text()
    assert ">=0.32,<0.33" in answer["result"]
