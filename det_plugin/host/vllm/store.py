"""The certificate store of this process's machine, model dtype and thread count."""

from __future__ import annotations

import functools
from typing import Any

from det_plugin.evidence.certificates import CertificateStore
from det_plugin.evidence.fingerprint import fingerprint, fingerprint_digest


@functools.cache
def facts(platform: str) -> dict[str, Any]:
    """The fingerprint of this process (cached: call it after threads are bound)."""
    from det_plugin.host.vllm.patching import host_version

    return fingerprint(platform, extra={"host": f"vllm {host_version()}"})


@functools.cache
def certificate_store(platform: str) -> CertificateStore:
    """Certificates valid in this process."""
    found = facts(platform)
    return CertificateStore(fingerprint_digest(found), facts=found)
