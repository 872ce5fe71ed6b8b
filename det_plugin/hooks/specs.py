"""What can be extended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from det_plugin.capabilities import Capability
    from det_plugin.ops.linear_cpu import LinearKernel

hookspec = pluggy.HookspecMarker("det_plugin")


@hookspec
def det_plugin_capabilities() -> list[Capability]:  # type: ignore[empty-body]
    """Rows for the capability matrix; a later registration overrides an earlier row of the same key.

    Example: ``return [Capability("cpu", "*", "lora", supported=True)]``
    """


@hookspec
def det_plugin_cpu_linear_kernels() -> list[LinearKernel]:  # type: ignore[empty-body]
    """Matrix-product kernels for the CPU, best first; each is certified before it runs."""


@hookspec
def det_plugin_certificate_checks(device: str) -> list[Any]:  # type: ignore[empty-body]
    """Further checks to run at start-up on ``device`` (``"cpu"`` or ``"cuda"``).

    Each is a callable without arguments that raises ``CertificateError`` when its operator fails.
    """
