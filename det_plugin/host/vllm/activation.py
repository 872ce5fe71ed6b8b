"""Installing deterministic inference in one process of an engine."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

from det_plugin.config import DetConfig
from det_plugin.errors import ConfigError, HostError
from det_plugin.host.vllm.patching import check_host_version

logger = logging.getLogger("vllm.det_plugin")

WORKER_MODULES = {
    "cpu": ("memory_cpu", "linear_cpu", "norm_cpu", "pointwise_cpu", "attention_cpu", "collectives_cpu", "sampler_v1"),
    "cuda": ("linear_cuda", "norm_cuda", "qk_norm_cuda", "attention_cuda", "sampler_v2"),
}
"""Modules of this package whose ``install(config)`` makes a worker deterministic, in order."""

FRONT_END_MODULES = ("seeds",)
"""Modules whose ``install(config)`` prepares the process that accepts requests."""

_active: DetConfig | None = None
_stock_worker_built = False


def prepare(engine_args: Any, config: DetConfig) -> None:
    """Adjust engine arguments before the host resolves them.

    Compiled and eager code share the host's opaque custom ops, so that they share bits.

    Raises:
        HostError: vLLM is outside the supported range.
    """
    check_host_version()
    from det_plugin.host.vllm import guards, logs

    logs.share()
    platform = guards.platform_name()
    guards.check_backend_name(engine_args.attention_backend, platform)
    guards.check_front_end(platform)
    custom_ops = engine_args.compilation_config.custom_ops
    for name in custom_ops:
        if name == "none" or name.startswith("-"):
            raise ConfigError(
                f"compilation_config.custom_ops: got {name!r}, deterministic inference needs 'all' "
                "(compiled and eager code then share their kernels); leave the option out"
            )
    if "all" not in custom_ops:
        custom_ops.append("all")
    if platform == "cpu" and engine_args.compilation_config.mode is None and not engine_args.enforce_eager:
        from vllm.config import CompilationMode

        engine_args.compilation_config.mode = CompilationMode.NONE
        logger.info(
            "deterministic inference on the CPU runs without torch.compile: every operator is an opaque kernel, so "
            "compiling adds dispatch and no speed; --compilation-config '{\"mode\": 3}' compiles all the same, "
            "with the same bits"
        )
    if platform == "cpu":
        # element-wise code outside those ops: compiled code then rounds wherever eager code does
        engine_args.compilation_config.inductor_compile_config["emulate_precision_casts"] = True


def activate_front_end(vllm_config: Any, config: DetConfig) -> None:
    """Check the finished configuration and prepare the process that accepts requests.

    Raises:
        UnsupportedError: some part of the configuration is not proven.
    """
    from det_plugin.host.vllm import guards

    platform, backend = guards.check(vllm_config, config)
    for name in FRONT_END_MODULES:
        importlib.import_module(f"det_plugin.host.vllm.{name}").install(config)
    logger.info(
        "deterministic inference is on: platform %s, attention %s, default seed %s, noise scope %s",
        platform,
        backend,
        config.default_seed,
        config.noise_scope,
    )


def activate_worker(vllm_config: Any, config: DetConfig | None) -> None:
    """Install the operators in a worker process, before its model is built; no-op when the plugin is off.

    Raises:
        HostError: this process already runs a worker of the other kind, or vLLM is unsupported.
        UnsupportedError: some part of the configuration is not proven.
    """
    global _active, _stock_worker_built
    if config is None:
        if _active is not None:
            raise HostError(
                "this process already runs a deterministic engine; start the stock engine in another process "
                "(VLLM_ENABLE_V1_MULTIPROCESSING=1 does that)"
            )
        _stock_worker_built = True
        return
    if _active is not None and _active != config:
        raise HostError(
            f"this process already runs a deterministic engine with {_active.as_section()}; "
            "start this one in another process"
        )
    if _stock_worker_built and _active is None:
        raise HostError(
            "this process already ran a stock engine; start the deterministic engine in another process "
            "(VLLM_ENABLE_V1_MULTIPROCESSING=1 does that)"
        )
    check_host_version()
    from det_plugin.host.vllm import audit, guards, logs

    logs.share()
    platform, _ = guards.check(vllm_config, config)
    os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
    audit.install(platform)
    for name in WORKER_MODULES[platform]:
        importlib.import_module(f"det_plugin.host.vllm.{name}").install(config)
    _active = config
