"""The certificate store of this process's machine, model dtype and thread count."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from det_plugin.evidence.certificates import CertificateStore
from det_plugin.evidence.fingerprint import fingerprint, fingerprint_digest

NUMERIC_PREFIXES = ("ATEN_CPU_", "DNNL_", "KMP_DETERMINISTIC", "MKL_", "ONEDNN_", "OPENBLAS_", "TORCH_ALLOW_TF32")
"""Environment variables that steer which vendor code runs: certificates hold for one setting of them."""

NUMERIC_NAMES = ("VLLM_FLOAT32_MATMUL_PRECISION",)


REPORT_ENV = "DET_PLUGIN_STORE_REPORT"
"""Environment variable, set by ``det-plugin certify``, that names a file.  Each process with certificates appends
lines of JSON: ``{"folder"}`` they are in, and ``{"unkept", "why"}`` for one that can't be written.  (A worker's thread
count, and so its fingerprint, may differ from the front end's.)"""


def environment() -> dict[str, str]:
    """The variables of this process that vendor libraries choose kernels by."""
    return {
        f"env:{name}": value
        for name, value in sorted(os.environ.items())
        if name.startswith(NUMERIC_PREFIXES) or name in NUMERIC_NAMES
    }


def cpu_flags() -> str:
    """Digest of the processor's feature flags: a virtual machine may hide some of a known model's."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        if line.lower().startswith(("flags", "features")):
            words = " ".join(sorted(line.partition(":")[2].split()))
            return hashlib.sha256(words.encode()).hexdigest()[:16]
    return ""


@functools.cache
def facts(platform: str) -> dict[str, Any]:
    """The fingerprint of this process (cached: call it after threads are bound)."""
    from det_plugin.host.vllm.patching import host_version

    extra = {"host": f"vllm {host_version()}", **environment()}
    if platform == "cpu":
        extra["cpu_flags"] = cpu_flags()
    return fingerprint(platform, extra=extra)


@functools.cache
def certificate_store(platform: str) -> CertificateStore:
    """Certificates valid in this process."""
    found = facts(platform)
    store = CertificateStore(
        fingerprint_digest(found),
        facts=found,
        on_unkept=lambda c, error: _report(unkept=f"{c.operator} {c.key}", why=str(error)),
    )
    _report(folder=str(store.folder))
    return store


def _report(**line: str) -> None:
    if path := os.environ.get(REPORT_ENV):
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
