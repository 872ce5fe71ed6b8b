"""Every part of a host configuration that is not proven is refused, on both platforms."""

from __future__ import annotations

from types import SimpleNamespace as Stub

import pytest

from det_plugin import ConfigError, DetConfig, UnsupportedError

guards = pytest.importorskip("det_plugin.host.vllm.guards")
pytest.importorskip("vllm", reason="the guards look up the host's platform")


class Model(Stub):
    def using_transformers_backend(self):
        return self.transformers


def configuration(platform="cpu", **changes):
    """A configuration that is proven, with some values changed: ``part__name=value``."""
    worker = guards.WORKERS[platform][1]
    found = Stub(
        model_config=Model(
            dtype="torch.bfloat16",
            quantization=None,
            runner_type="generate",
            is_multimodal_model=False,
            multimodal_config=None,
            architectures=["LlamaForCausalLM"],
            is_encoder_decoder=False,
            is_moe=False,
            use_mla=False,
            is_hybrid=False,
            is_attention_free=False,
            has_inner_state=False,
            is_diffusion=False,
            enable_prompt_embeds=False,
            enable_sleep_mode=False,
            use_fp64_gumbel=False,
            enable_trace_replay=False,
            return_sampling_mask=False,
            transformers=False,
            enforce_eager=True,
        ),
        parallel_config=Stub(
            data_parallel_size=1,
            pipeline_parallel_size=1,
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            enable_dbo=False,
            ubatch_size=0,
            worker_cls=worker,
            distributed_executor_backend="mp",
            nnodes=1,
        ),
        cache_config=Stub(cache_dtype="auto", block_size=128, kv_sharing_fast_prefill=False),
        scheduler_config=Stub(async_scheduling=False),
        attention_config=Stub(backend=None, backend_per_kind={}),
        compilation_config=Stub(
            compile_sizes=None,
            inductor_compile_config={},
            mode=Stub(name="NONE"),
            cudagraph_mode=Stub(name="NONE"),
            custom_ops=["all"],
        ),
        offload_config=Stub(uva=Stub(cpu_offload_gb=0), prefetch=Stub(offload_group_size=0)),
        speculative_config=None,
        lora_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        weight_transfer_config=None,
        diffusion_config=None,
        watermark_config=None,
        use_v2_model_runner=platform == "cuda",
    )
    for name, value in changes.items():
        owner = found
        *path, last = name.split("__")
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return found


def in_use(platform="cpu", **changes):
    return {feature for feature, _ in guards.features_in_use(configuration(platform, **changes), DetConfig(), platform)}


def test_the_plain_configuration_uses_nothing_unproven():
    assert in_use("cpu") == set()


FEATURES = {
    "speculative decoding": {"speculative_config": Stub(method="ngram")},
    "LoRA": {"lora_config": object()},
    "quantization": {"model_config__quantization": "awq"},
    "quantized KV cache": {"cache_config__cache_dtype": "fp8"},
    "KV transfer": {"kv_transfer_config": object()},
    "pooling": {"model_config__runner_type": "pooling"},
    "multimodal": {"model_config__is_multimodal_model": True},
    "encoder-decoder": {"model_config__is_encoder_decoder": True},
    "mixture of experts": {"model_config__is_moe": True},
    "MLA": {"model_config__use_mla": True},
    "state-space layers": {"model_config__is_hybrid": True},
    "diffusion": {"model_config__is_diffusion": True},
    "watermark": {"watermark_config": object()},
    "fp64 Gumbel noise": {"model_config__use_fp64_gumbel": True},
    "trace replay": {"model_config__enable_trace_replay": True},
    "batch-sharded sampling": {"parallel_config__enable_batch_sharded_sampling": True},
    "sampling mask": {"model_config__return_sampling_mask": True},
    "prompt embeddings": {"model_config__enable_prompt_embeds": True},
    "sleep mode": {"model_config__enable_sleep_mode": True},
    "data parallel": {"parallel_config__data_parallel_size": 2},
    "pipeline parallel": {"parallel_config__pipeline_parallel_size": 2},
    "context parallel": {"parallel_config__decode_context_parallel_size": 2},
    "weight offloading": {"offload_config__uva__cpu_offload_gb": 1},
    "weight transfer": {"weight_transfer_config": object()},
    "compile sizes": {"compilation_config__compile_sizes": [1, 8]},
    "dual batch overlap": {"parallel_config__ubatch_size": 2},
    "KV-sharing fast prefill": {"cache_config__kv_sharing_fast_prefill": True},
    "Transformers modeling backend": {"model_config__transformers": True},
    "custom worker class": {"parallel_config__worker_cls": "my.Worker"},
    "custom executor": {"parallel_config__distributed_executor_backend": "ray"},
    "several nodes": {"parallel_config__nnodes": 2},
    "max-autotune": {"compilation_config__inductor_compile_config": {"max_autotune": True}},
}


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_is_seen_and_refused(monkeypatch, platform, feature):
    assert feature in in_use(platform, **FEATURES[feature])
    monkeypatch.setattr(guards, "platform_name", lambda: platform)
    with pytest.raises((UnsupportedError, ConfigError)):
        guards.check(configuration(platform, **FEATURES[feature]), DetConfig())


def test_the_other_model_runner():
    assert "V2 model runner" in in_use("cpu", use_v2_model_runner=True)
    assert "V1 model runner" in in_use("cuda", use_v2_model_runner=False)


def test_flashinfer_sampler(monkeypatch):
    """Never used; asking for it is refused, asking for its absence isn't."""
    for value, seen in (("1", True), ("0", False)):
        monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", value)
        assert ("FlashInfer sampler" in in_use("cuda")) == seen
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER")
    assert in_use("cuda") == set()


def test_attention_backends(monkeypatch):
    monkeypatch.setattr(guards, "platform_name", lambda: "cpu")
    assert guards.check(configuration(), DetConfig()) == ("cpu", "CPU_ATTN")
    for name in ("TRITON_ATTN", "FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "CUSTOM"):
        with pytest.raises(UnsupportedError, match=name):
            guards.check(configuration(attention_config__backend=Stub(name=name)), DetConfig())
    per_kind = {"sliding_window": Stub(name="TRITON_ATTN")}
    with pytest.raises(UnsupportedError, match="backend_per_kind"):
        guards.check(configuration(attention_config__backend_per_kind=per_kind), DetConfig())


@pytest.mark.parametrize("name", ["nonsense", "", "CPU-ATTN", "TRITON"])
def test_backend_names_that_do_not_exist(name):
    with pytest.raises(ConfigError, match="--attention-backend: got"):
        guards.check_backend_name(name, "cpu")


@pytest.mark.parametrize("name", [None, "auto", "CPU_ATTN", "cpu_attn", "FLASH_ATTN"])
def test_backend_names_that_exist(name):
    guards.check_backend_name(name, "cpu")


@pytest.mark.parametrize("dtype", ["torch.float64", "torch.float8_e4m3fn"])
def test_dtypes(monkeypatch, dtype):
    monkeypatch.setattr(guards, "platform_name", lambda: "cpu")
    with pytest.raises(UnsupportedError, match="dtype"):
        guards.check(configuration(model_config__dtype=dtype), DetConfig())


@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_block_sizes(monkeypatch, block_size):
    monkeypatch.setattr(guards, "platform_name", lambda: "cpu")
    with pytest.raises(ConfigError, match=f"--block-size: got {block_size}"):
        guards.check(configuration(cache_config__block_size=block_size), DetConfig())


@pytest.mark.parametrize("name", ["VLLM_USE_RUST_FRONTEND", "VLLM_RUST_FRONTEND_PATH"])
def test_rust_front_end(monkeypatch, name):
    monkeypatch.delenv("VLLM_USE_RUST_FRONTEND", raising=False)
    guards.check_front_end("cpu")
    monkeypatch.setenv(name, "1")
    with pytest.raises(UnsupportedError, match="RUST"):
        guards.check_front_end("cpu")
