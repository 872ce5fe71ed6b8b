"""Fail closed: refuse, before weights load, every part of a configuration that is not proven."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from det_plugin.capabilities import CPU_BACKENDS, CUDA_BACKENDS, require
from det_plugin.config import DetConfig
from det_plugin.errors import ConfigError, UnsupportedError

WORKERS = {
    "cpu": ("auto", "vllm.v1.worker.cpu_worker.CPUWorker"),
    "cuda": ("auto", "vllm.v1.worker.gpu_worker.Worker"),
}
BACKENDS = {"cpu": CPU_BACKENDS, "cuda": CUDA_BACKENDS}
AUTOTUNE = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")
CPU_BLOCK = 32
"""The host's CPU attention takes KV blocks of multiples of this."""

EXECUTORS = (None, "mp", "uni")
DTYPES = ("torch.bfloat16", "torch.float16", "torch.float32")


def platform_name() -> str:
    """``"cpu"`` or ``"cuda"``.

    Raises:
        UnsupportedError: any other platform, or a GPU older than compute capability 8.0.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "cpu"
    if current_platform.is_cuda():
        capability = current_platform.get_device_capability()
        if capability is not None and capability.major < 8:
            raise UnsupportedError(
                f"a GPU of compute capability {capability.major}.{capability.minor}",
                "its matrix units have no bfloat16 products with fp32 accumulation",
                "use a GPU of compute capability 8.0 or newer",
            )
        return "cuda"
    raise UnsupportedError(
        f"platform {current_platform.device_name}",
        "no operator is certified there",
        "use an NVIDIA GPU or a CPU",
    )


def features_in_use(vllm_config: Any, config: DetConfig, platform: str) -> Iterator[tuple[str, str]]:
    """(feature, how the user wrote it) for each optional feature that the configuration switches on."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    if config.tp_invariant:
        yield "tp_invariant", "tp_invariant: true"
    if vllm_config.speculative_config is not None:
        yield "speculative decoding", f"speculative decoding ({vllm_config.speculative_config.method})"
    if vllm_config.lora_config is not None:
        yield "LoRA", "--enable-lora"
    if model.quantization is not None:
        yield "quantization", f"quantization {model.quantization!r}"
    if cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        yield "quantized KV cache", f"--kv-cache-dtype {cache.cache_dtype}"
    if vllm_config.kv_transfer_config is not None or vllm_config.ec_transfer_config is not None:
        yield "KV transfer", "KV or encoder-cache transfer"
    if model.runner_type != "generate":
        yield "pooling", f"--runner {model.runner_type}"
    if model.is_multimodal_model and not getattr(model.multimodal_config, "language_model_only", False):
        yield "multimodal", f"multimodal model {model.architectures[0]}"
    if model.is_encoder_decoder:
        yield "encoder-decoder", f"encoder-decoder model {model.architectures[0]}"
    if model.is_moe:
        yield "mixture of experts", f"mixture-of-experts model {model.architectures[0]}"
    if model.use_mla:
        yield "MLA", f"MLA model {model.architectures[0]}"
    if model.is_hybrid or model.is_attention_free or model.has_inner_state:
        yield (
            "state-space layers",
            f"model {model.architectures[0]} with state-space or linear-attention layers",
        )
    if model.is_diffusion or getattr(vllm_config, "diffusion_config", None) is not None:
        yield "diffusion", "diffusion decoding"
    if getattr(vllm_config, "watermark_config", None) is not None:
        yield "watermark", "watermarking"
    if model.use_fp64_gumbel:
        yield "fp64 Gumbel noise", "--use-fp64-gumbel"
    if model.enable_trace_replay:
        yield "trace replay", "--enable-trace-replay"
    if getattr(parallel, "enable_batch_sharded_sampling", None):
        yield "batch-sharded sampling", "--enable-batch-sharded-sampling"
    if model.return_sampling_mask:
        yield "sampling mask", "--return-sampling-mask"
    if platform == "cuda" and os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "").strip().lower() in ("1", "true"):
        yield "FlashInfer sampler", "VLLM_USE_FLASHINFER_SAMPLER=1"
    if model.enable_prompt_embeds:
        yield "prompt embeddings", "--enable-prompt-embeds"
    if model.enable_sleep_mode:
        yield "sleep mode", "--enable-sleep-mode"
    if parallel.data_parallel_size > 1:
        yield "data parallel", f"--data-parallel-size {parallel.data_parallel_size}"
    if parallel.pipeline_parallel_size > 1:
        yield "pipeline parallel", f"--pipeline-parallel-size {parallel.pipeline_parallel_size}"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            yield "context parallel", f"--{name.replace('_', '-')} {getattr(parallel, name)}"
    if parallel.tensor_parallel_size > 1:
        yield "tensor parallel", f"--tensor-parallel-size {parallel.tensor_parallel_size}"
    offload = vllm_config.offload_config
    if getattr(offload.uva, "cpu_offload_gb", 0) or getattr(offload.prefetch, "offload_group_size", 0):
        yield "weight offloading", "--cpu-offload-gb or --offload-group-size"
    inductor = vllm_config.compilation_config.inductor_compile_config or {}
    for name in AUTOTUNE:
        if inductor.get(name):
            yield "max-autotune", f"inductor_compile_config.{name}"
    if vllm_config.compilation_config.compile_sizes:
        yield "compile sizes", f"compile_sizes {vllm_config.compilation_config.compile_sizes}"
    if vllm_config.weight_transfer_config is not None:
        yield "weight transfer", "--weight-transfer-config"
    if parallel.enable_dbo or parallel.ubatch_size > 1:
        yield "dual batch overlap", "--enable-dbo or --ubatch-size"
    if cache.kv_sharing_fast_prefill:
        yield "KV-sharing fast prefill", "--kv-sharing-fast-prefill"
    if model.using_transformers_backend():
        yield "Transformers modeling backend", f"model code of Transformers ({model.architectures[0]})"
    if parallel.worker_cls not in WORKERS[platform]:
        yield "custom worker class", f"--worker-cls {parallel.worker_cls}"
    executor = parallel.distributed_executor_backend
    if executor not in EXECUTORS:
        yield "custom executor", f"--distributed-executor-backend {getattr(executor, '__name__', executor)}"
    if parallel.nnodes > 1:
        yield "several nodes", f"--nnodes {parallel.nnodes}"
    if vllm_config.compilation_config.mode is not None and vllm_config.compilation_config.mode.name != "NONE":
        yield "torch.compile", "torch.compile"
    graphs = vllm_config.compilation_config.cudagraph_mode
    if platform == "cuda" and graphs is not None and graphs.name != "NONE":
        yield "CUDA graph", f"CUDA graphs ({graphs.name})"
    v2 = bool(vllm_config.use_v2_model_runner)
    if platform == "cpu" and v2:
        yield "V2 model runner", "the V2 model runner on CPU"
    if platform == "cuda" and not v2:
        yield "V1 model runner", "the V1 model runner on CUDA"


def check_backend_name(name: Any, platform: str) -> None:
    """Refuse an ``--attention-backend`` that does not exist.

    Raises:
        ConfigError: naming the backends that are certified on ``platform``.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if isinstance(name, str) and name.lower() != "auto" and name.upper() not in AttentionBackendEnum.__members__:
        raise ConfigError(f"--attention-backend: got {name!r}, accepts {' or '.join(BACKENDS[platform])} here")


def check_front_end(platform: str) -> None:
    """Refuse a front end in which the seed rules cannot be installed.

    Raises:
        UnsupportedError: the Rust front end was asked for.
    """
    on = os.environ.get("VLLM_USE_RUST_FRONTEND", "").strip().lower() not in ("", "0", "false")
    if on or os.environ.get("VLLM_RUST_FRONTEND_PATH"):
        require(platform, "*", "Rust front end", "VLLM_USE_RUST_FRONTEND or VLLM_RUST_FRONTEND_PATH")


def backend_name(vllm_config: Any, platform: str) -> str:
    """The attention backend that will run.

    Raises:
        UnsupportedError: the chosen backend is not one of the platform's certified ones.
    """
    chosen = vllm_config.attention_config.backend
    allowed = BACKENDS[platform]
    for kind, backend in vllm_config.attention_config.backend_per_kind.items():
        if backend is not chosen:
            raise UnsupportedError(
                f"attention_config.backend_per_kind {kind}: {backend.name}",
                "only one attention backend at a time is certified",
                "leave backend_per_kind out",
            )
    if chosen is None:
        return "CPU_ATTN" if platform == "cpu" else "FLASH_ATTN"
    if chosen.name not in allowed:
        raise UnsupportedError(
            f"--attention-backend {chosen.name} on {platform}",
            "it is not certified there",
            f"use one of {', '.join(allowed)}, or leave the option out",
        )
    return chosen.name


def check(vllm_config: Any, config: DetConfig) -> tuple[str, str]:
    """Refuse what is not proven.

    Returns:
        (platform, attention backend).

    Raises:
        UnsupportedError: naming the first unproven part and what to change.
    """
    platform = platform_name()
    backend = backend_name(vllm_config, platform)
    dtype = str(vllm_config.model_config.dtype)
    if dtype not in DTYPES:
        raise UnsupportedError(f"dtype {dtype}", "its products are not certified", f"use one of {', '.join(DTYPES)}")
    require(platform, backend, "attention backend", f"--attention-backend {backend} on {platform}")
    block_size = vllm_config.cache_config.block_size
    if platform == "cpu" and block_size is not None and block_size % CPU_BLOCK:
        raise ConfigError(f"--block-size: got {block_size}, accepts a multiple of {CPU_BLOCK} on the CPU")
    for feature, spelled in features_in_use(vllm_config, config, platform):
        require(platform, backend, feature, spelled)
    return platform, backend
