"""``det-plugin doctor`` and ``det-plugin certify``: what runs here, and making its certificates ahead of time."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from det_plugin.errors import DetPluginError, HostError
from det_plugin.evidence.certificates import Certificate, CertificateStore


def report() -> dict[str, Any]:
    """What would run on this machine, as a JSON-able dictionary.

    Raises:
        HostError: vLLM is not installed, or outside the supported range.
        UnsupportedError: the platform is not one that anything is certified on.
        ConfigError: the certificate folder is none.
    """
    try:
        from det_plugin.host.vllm import guards, patching, store
        from det_plugin.host.vllm.patching import host_version
    except ImportError as error:
        raise HostError(f"vLLM can't be imported: {error}") from error
    from importlib.metadata import entry_points

    from det_plugin.capabilities import matrix

    try:
        version = host_version()
    except ImportError as error:
        raise HostError(f"vLLM is not installed beside det_plugin: {error}") from error
    patching.check_host_version()
    platform = guards.platform_name()
    certificates = store.certificate_store(platform)
    hidden = os.environ.get("VLLM_PLUGINS")
    return {
        "host": f"vLLM {version} (supported: {patching.SUPPORTED})",
        "platform": platform,
        "loaded by the host": hidden is None or "det_plugin" in hidden.split(","),
        "entry points": sorted(
            f"{e.group}: {e.value}"
            for group in ("vllm.general_plugins", "vllm.platform_plugins")
            for e in entry_points(group=group)
            if e.name == "det_plugin"
        ),
        "fingerprint": {"digest": certificates.digest, **store.facts(platform)},
        "certificate folder": str(certificates.folder),
        "other fingerprints": {
            p.name: sum(file.parent.name != "tuning" for file in p.glob("*/*.json"))
            for p in sorted(certificates.folder.parent.glob("*"))
            if p.is_dir() and p.name != certificates.digest
        },
        "certificates": _rows(certificates.all()),
        "capabilities": [
            {
                "backend": row.backend,
                "feature": row.feature,
                "supported": row.supported,
                "reason": row.reason,
                "instead": row.instead,
            }
            for row in matrix().values()
            if row.platform == platform
        ],
    }


def _console() -> Any:
    """A terminal that prints folder names as they are."""
    from rich.console import Console

    return Console(soft_wrap=True, markup=False, emoji=False)


def _print(found: dict[str, Any]) -> None:
    console = _console()
    console.print(f"{found['host']} on {found['platform']}", style="bold")
    if not found["loaded by the host"]:
        console.print("VLLM_PLUGINS is set without det_plugin: vLLM will not load it", style="yellow")
    if not found["entry points"]:
        console.print("the package is importable but not installed: vLLM will not load it", style="yellow")
    for key, value in found["fingerprint"].items():
        if value is not None:
            console.print(f"  {key}: {value}")
    console.print(f"certificates in {found['certificate folder']}")
    others = found["other fingerprints"]
    if not found["certificates"]:
        console.print("  none under this process's own fingerprint: made at the first start of a model, or by")
        console.print("  `det-plugin certify MODEL`")
    if others:
        console.print(
            f"  {len(others)} other fingerprint(s) beside it (other versions, thread counts or kernels; an engine's "
            "worker may bind fewer threads than this process has):"
        )
        for name, count in list(others.items())[:8]:
            console.print(f"    {name}: {count} certificates")
    _print_certificates(console, found["certificates"])
    supported = Counter(r["feature"] for r in found["capabilities"] if r["supported"])
    console.print(f"runs: {', '.join(sorted(supported))}")
    for row in sorted(found["capabilities"], key=lambda r: str(r["feature"])):
        if not row["supported"]:
            console.print(f"refused: {row['feature']}: {row['reason']}. Instead: {row['instead']}.")


def _print_certificates(console: Any, certificates: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table()
    for title in ("operator", "key", "canonical", "certified", "struck out"):
        table.add_column(title, overflow="fold")
    for c in certificates:
        named = ", ".join(list(c["struck out"])[:4]) + (" …" if len(c["struck out"]) > 4 else "")
        table.add_row(c["operator"], c["key"], c["canonical"], str(len(c["accepted"])), named or "-")
    if certificates:
        console.print(table)


def _rows(certificates: list[Certificate]) -> list[dict[str, Any]]:
    return [
        {
            "operator": c.operator,
            "key": c.key,
            "canonical": c.canonical,
            "accepted": list(c.accepted),
            "struck out": {name: str(why) for name, why in c.struck_out.items()},
            "created": c.created,
        }
        for c in certificates
    ]


def main(args: list[str]) -> int:
    """Print what runs; exit code 0, or 2 when nothing could."""
    parser = argparse.ArgumentParser(prog="det-plugin doctor", description=main.__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(args)
    try:
        found = report()
    except DetPluginError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(found, indent=1, default=str))
    else:
        _print(found)
    return 0


def certify_main(model: str) -> int:
    """Start the model once, so that every operator it uses is certified; print what is there then.

    Returns:
        0; 2 when the model can't be served, or a certificate could not be kept.
    """
    from det_plugin.host.vllm import store

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    try:
        from vllm import LLM
    except ImportError as error:
        print(f"error: vLLM is not installed beside det_plugin: {error}", file=sys.stderr)
        return 2
    begun = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="det-plugin-certify-") as temporary:
        report = Path(temporary) / "folders"
        os.environ[store.REPORT_ENV] = str(report)
        try:
            LLM(
                model,
                max_model_len=1024,
                enforce_eager=True,
                enable_deterministic_inference=True,
            )
        except DetPluginError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        finally:
            del os.environ[store.REPORT_ENV]
        text = report.read_text(encoding="utf-8") if report.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    console = _console()
    total = 0
    for folder in map(Path, dict.fromkeys(line["folder"] for line in lines if "folder" in line)):
        found = CertificateStore(folder.name, folder.parent).all()
        made = sum(str(c.created) >= begun for c in found)
        total += len(found)
        console.print(f"certificates in {folder}: {len(found)}, {made} of them made now")
        _print_certificates(console, _rows(found))
    unkept = {line["unkept"]: line["why"] for line in lines if "unkept" in line}
    for name, why in unkept.items():
        print(f"error: the certificate of {name} could not be kept: {why}", file=sys.stderr)
    if not total and not unkept:
        print("error: the model was served without certificates", file=sys.stderr)
    return 0 if total and not unkept else 2
