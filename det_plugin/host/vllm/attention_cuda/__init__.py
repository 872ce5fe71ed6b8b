"""The host's attention backends on CUDA, replaced by batch-invariant ones.

Replaces, by ``vllm.v1.attention.backends.registry.register_backend`` (read in 0.32.0), the classes behind
``TRITON_ATTN``, ``FLASH_ATTN`` and ``FLASHINFER``.  Nothing is imported from vLLM until :func:`register`.
"""

from __future__ import annotations

from det_plugin.attention import BACKENDS
from det_plugin.config import DetConfig
from det_plugin.errors import HostError, UnsupportedError

_PACKAGE = __name__
CLASSES = {
    "TRITON_ATTN": f"{_PACKAGE}.triton.InvariantTritonBackend",
    "FLASH_ATTN": f"{_PACKAGE}.fa3.InvariantFlashAttentionBackend",
    "FLASHINFER": f"{_PACKAGE}.flashinfer.InvariantFlashInferBackend",
}
"""The class that stands behind each of the host's names once :func:`register` has run."""


def register() -> None:
    """Put the invariant backends behind the host's own names.  Idempotent; call before a backend is selected.

    Raises:
        HostError: the host's registry lacks a name or a function that this relies on.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        raise HostError(f"vllm.v1.attention.backends.registry: {error}") from error
    for name, path in CLASSES.items():
        if name not in AttentionBackendEnum.__members__:
            raise HostError(f"vllm.v1.attention.backends.registry.AttentionBackendEnum has no {name}")
        register_backend(AttentionBackendEnum[name], path)


def install(config: DetConfig) -> None:
    """What activation calls in a worker process: :func:`register`."""
    register()


def host_name(name: str) -> str:
    """The host's name of a backend given by either name: ``fa3`` or ``FLASH_ATTN`` -> ``FLASH_ATTN``.

    Raises:
        UnsupportedError: a name that no invariant backend stands behind.
    """
    found = BACKENDS.get(name.lower(), name.upper())
    if found not in CLASSES:
        known = ", ".join([*BACKENDS, *CLASSES])
        raise UnsupportedError(
            f"attention backend {name}", f"invariant ones are {known}", "pass --attention-backend with one of these"
        )
    return found
