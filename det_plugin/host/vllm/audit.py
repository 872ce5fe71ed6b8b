"""Look through a built model, before its weights load, for layers whose products nobody certified.

Wraps (vLLM 0.32.0) ``BaseModelLoader.create_model``.  It catches architectures on which the switch would
otherwise have no effect: a plain ``nn.Linear`` in model code, a convolution, a quantized layer, a state-space
mixer, an attention class of another family.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from det_plugin.errors import UnsupportedError
from det_plugin.host.vllm.patching import wrap

LOADER = "vllm.model_executor.model_loader.base_loader:BaseModelLoader"

ROWWISE = (
    "RMSNorm",
    "GemmaRMSNorm",
    "VocabParallelEmbedding",
    "ParallelLMHead",
    "Embedding",
    "LogitsProcessor",
)
"""Classes whose own parameters or buffers are used row by row by certified or element-wise code."""

PER_PLATFORM = {"cpu": ("DetRMSNorm",), "cuda": ("DetRMSNorm", "DetGemmaRMSNorm")}
NOT_ON = {"cpu": ("GemmaRMSNorm",), "cuda": ()}


def unproven(model: Any, platform: str) -> Iterator[tuple[str, str, str]]:
    """(module name, class name, why) for every module that owns parameters and is not known."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    known = (set(ROWWISE) | set(PER_PLATFORM[platform])) - set(NOT_ON[platform])
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, LinearBase):
            method = module.quant_method
            if not isinstance(method, UnquantizedLinearMethod):
                yield name, kind, f"its products go through {type(method).__name__}"
            continue
        if isinstance(module, Attention):
            continue
        own = [n for n, _ in module.named_parameters(recurse=False)]
        if own and kind not in known and not isinstance(module, RotaryEmbeddingBase):
            yield name, kind, f"it owns the parameters {', '.join(own)} and is not a certified layer"
        elif platform == "cpu" and (why := _uncertified_function(module, known)):
            yield name, kind, why


EXACT = ("ReLU", "Identity", "Hardtanh", "ReLU6")
"""Classes of ``torch.nn.modules.activation`` without rounding."""


def _uncertified_function(module: Any, known: set[str]) -> str | None:
    """Why an element-wise module may give other bits in compiled code, or at other row counts, on the CPU."""
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from det_plugin.host.vllm import pointwise_cpu

    kind = type(module)
    if kind.__module__ == "torch.nn.modules.activation" and kind.__name__ not in EXACT:
        return "compiled code and eager code round it differently"
    if kind.__name__ == "ApplyRotaryEmb":  # part of a rotary embedding, which forward_cpu passes by
        return None
    if kind.__module__.startswith("vllm.model_executor.layers.rotary_embedding"):
        if getattr(kind, "forward_cpu", None) is not RotaryEmbedding.forward_cpu or "forward" in vars(kind):
            return "this rotary embedding does not go through the host's CPU kernel"
        return None
    if isinstance(module, CustomOp) and kind.__name__ not in known | set(pointwise_cpu.CERTIFIED):
        return "its CPU code is not certified"
    return None


def check_model(model: Any, platform: str) -> None:
    """Refuse a model that holds an unproven layer.

    Raises:
        UnsupportedError: naming the first such module.
    """
    for name, kind, why in unproven(model, platform):
        raise UnsupportedError(
            f"layer {name or '(model)'} of class {kind} in {type(model).__name__}",
            why,
            "use a dense decoder-only model built from vLLM's linear, norm and attention layers",
        )


def install(platform: str) -> None:
    """Check every model that this process builds; idempotent."""

    def make(original: Any) -> Any:
        def create_model(self: Any, *args: Any, **kwargs: Any) -> Any:
            model = original(self, *args, **kwargs)
            check_model(model, platform)
            return model

        return create_model

    wrap(f"{LOADER}.create_model", make)
