"""Entry points that vLLM loads.  Trivial on purpose: vLLM only logs an import error of a plugin module."""

from __future__ import annotations


def register() -> None:
    """``vllm.general_plugins``: add the switch; nothing else changes until an engine asks for it."""
    from det_plugin.host.vllm import switch

    switch.install()


def platform_probe() -> None:
    """``vllm.platform_plugins``: never a platform of its own, but the earliest hook there is.

    It runs on the first use of ``current_platform``, before ``EngineArgs`` is defined, so that
    ``LLM(..., enable_deterministic_inference=True)`` works with no further import.
    """
    from det_plugin.host.vllm import switch

    switch.install_on_import()
