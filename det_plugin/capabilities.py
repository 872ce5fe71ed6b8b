"""The capability matrix: what is proven on which platform, and what is refused, why, and what to use instead.

Nothing outside the matrix runs: a feature without a row is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from det_plugin.errors import UnsupportedError
from det_plugin.hooks.manager import hookimpl


@dataclass(frozen=True)
class Capability:
    """One row of the matrix.

    Attributes:
        platform: ``"cpu"`` or ``"cuda"``.
        backend: attention backend, vLLM's name, or ``"*"``.
        feature: feature's name as guards spell it.
        supported: whether it may run.
        reason: why it is refused.
        instead: what to change.
    """

    platform: str
    backend: str
    feature: str
    supported: bool
    reason: str = ""
    instead: str = ""


CPU_BACKENDS = ("CPU_ATTN",)
CUDA_BACKENDS = ("TRITON_ATTN", "FLASH_ATTN", "FLASHINFER")

_BOTH_SUPPORTED = (
    "dense decoder",
    "chunked prefill",
    "prefix caching",
    "preemption",
    "async scheduling",
    "attention backend",
    "eager",
    "sampling",
    "logprobs",
    "structured outputs",
)

_REFUSED: dict[str, tuple[str, str]] = {
    "speculative decoding": (
        "draft verification is not proven to give the target model's own tokens bit for bit",
        "start without --speculative-config",
    ),
    "LoRA": (
        "its shrink and expand products are not certified",
        "merge the adapter into the model's weights and start without --enable-lora",
    ),
    "quantization": (
        "quantized matrix products are not certified",
        "use an unquantized checkpoint (bfloat16, float16 or float32)",
    ),
    "quantized KV cache": (
        "keys and values read back from a quantized cache differ from those of the prefill that wrote them",
        "use --kv-cache-dtype auto",
    ),
    "KV transfer": (
        "blocks that another engine wrote may come from an engine that is not deterministic",
        "start without --kv-transfer-config",
    ),
    "pooling": ("pooling reductions are not certified", "serve a generative model with --runner generate"),
    "multimodal": (
        "the vision and audio encoders are not certified",
        "use a text-only checkpoint, or --language-model-only",
    ),
    "mixture of experts": ("expert products are not certified", "use a dense model"),
    "MLA": ("multi-head latent attention is not certified", "use a model with standard attention"),
    "state-space layers": (
        "recurrent-state kernels are not certified",
        "use a model whose layers are all attention layers",
    ),
    "encoder-decoder": ("cross attention is not certified", "use a decoder-only model"),
    "prompt embeddings": ("requests by embedding are not proven", "start without --enable-prompt-embeds"),
    "data parallel": (
        "padding between data-parallel ranks is not proven",
        "start one server per replica, with --data-parallel-size 1",
    ),
    "pipeline parallel": ("it is not proven", "use --pipeline-parallel-size 1"),
    "context parallel": (
        "attention partial results are merged in an order that depends on the ranks",
        "use --decode-context-parallel-size 1",
    ),
    "max-autotune": (
        "the compiler picks code by measured time",
        "leave it out of --compilation-config",
    ),
    "V2 model runner": (
        "its CPU sampler is not proven",
        "set VLLM_USE_V2_MODEL_RUNNER=0",
    ),
    "V1 model runner": (
        "its CUDA sampler is not proven",
        "unset VLLM_USE_V2_MODEL_RUNNER",
    ),
    "watermark": ("the watermark's own sampler is not proven", "start without a watermark configuration"),
    "fp64 Gumbel noise": (
        "noise is specified in fp32 with 32 random bits",
        "start without --use-fp64-gumbel",
    ),
    "trace replay": (
        "it replaces the sampled token after sampling, and is not proven",
        "start without --enable-trace-replay",
    ),
    "batch-sharded sampling": (
        "sampling each rank's share of the batch is not proven",
        "start without --enable-batch-sharded-sampling",
    ),
    "sampling mask": ("the returned masks are not proven", "start without --return-sampling-mask"),
    "FlashInfer sampler": (
        "it draws from a global generator, so it is never used",
        "unset VLLM_USE_FLASHINFER_SAMPLER, or set it to 0",
    ),
    "diffusion": ("diffusion decoding is not proven", "use an autoregressive model"),
    "tp_invariant": (
        "sharing one order between tensor-parallel sizes is not built yet",
        "leave tp_invariant false; results are then stated per tensor-parallel size in the fingerprint",
    ),
    "sleep mode": ("weights reloaded after sleep are not re-certified", "start without --enable-sleep-mode"),
    "weight transfer": (
        "weights replaced while the engine runs are not certified again",
        "start without --weight-transfer-config",
    ),
    "compile sizes": (
        "code compiled for single row counts is chosen by the batch",
        "leave compile_sizes out of --compilation-config",
    ),
    "dual batch overlap": (
        "splitting a step in two is not proven",
        "start without --enable-dbo and --ubatch-size",
    ),
    "KV-sharing fast prefill": ("it is not proven", "start without --kv-sharing-fast-prefill"),
    "Transformers modeling backend": (
        "norms and other reductions in it are plain PyTorch",
        "use a model that vLLM implements itself, and leave --model-impl out",
    ),
    "custom worker class": ("only vLLM's own workers were read", "leave --worker-cls out"),
    "custom executor": (
        "only vLLM's own multiprocessing executor is proven",
        "use --distributed-executor-backend mp, or leave it out",
    ),
    "several nodes": ("collectives between machines are not proven", "use --nnodes 1"),
    "Rust front end": (
        "requests would not pass the seed rules and the request checks",
        "unset VLLM_USE_RUST_FRONTEND and VLLM_RUST_FRONTEND_PATH",
    ),
    "weight offloading": (
        "weights held in another memory go through other kernels",
        "start without --cpu-offload-gb and --offload-group-size",
    ),
}


@hookimpl
def det_plugin_capabilities() -> list[Capability]:
    """The built-in rows."""
    rows = [
        Capability(platform, backend, feature, supported=True)
        for platform, backends in (("cpu", CPU_BACKENDS), ("cuda", CUDA_BACKENDS))
        for backend in backends
        for feature in _BOTH_SUPPORTED
    ]
    rows += [
        Capability(platform, "*", feature, supported=False, reason=reason, instead=instead)
        for platform in ("cpu", "cuda")
        for feature, (reason, instead) in _REFUSED.items()
    ]
    rows += [
        Capability("cpu", "*", "tensor parallel", supported=True),
        Capability(
            "cuda",
            "*",
            "tensor parallel",
            supported=False,
            reason="the all-reduce's order is not certified yet",
            instead="use --tensor-parallel-size 1",
        ),
        *(Capability(platform, "*", "torch.compile", supported=True) for platform in ("cpu", "cuda")),
        Capability("cuda", "*", "CUDA graph", supported=True),
    ]
    return rows


def matrix() -> dict[tuple[str, str, str], Capability]:
    """All rows, keyed by (platform, backend, feature)."""
    from det_plugin.hooks.manager import plugin_manager

    rows: dict[tuple[str, str, str], Capability] = {}
    for contribution in reversed(plugin_manager().hook.det_plugin_capabilities()):
        for row in contribution:
            rows[(row.platform, row.backend, row.feature)] = row
    return rows


def lookup(platform: str, backend: str, feature: str) -> Capability:
    """The row that applies; a missing row is a refusal."""
    rows = matrix()
    for key in ((platform, backend, feature), (platform, "*", feature)):
        if key in rows:
            return rows[key]
    return Capability(
        platform,
        backend,
        feature,
        supported=False,
        reason=f"it is not proven on {platform} with {backend}",
        instead="leave it off",
    )


def require(platform: str, backend: str, feature: str, spelled: str | None = None) -> None:
    """Refuse a feature that is not proven.

    Args:
        platform, backend, feature: the row.
        spelled: what the user wrote, for the message.

    Raises:
        UnsupportedError: with the row's reason and what to change.
    """
    row = lookup(platform, backend, feature)
    if not row.supported:
        raise UnsupportedError(spelled or feature, row.reason, row.instead)
