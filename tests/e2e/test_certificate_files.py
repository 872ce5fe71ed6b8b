"""Certificates on disk: damaged ones are noticed, rebuilt and told; missing ones are refused where required."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import compositions
import engine_kit as kit
import pytest

ON = {"enable_deterministic_inference": True, "enforce_eager": True, "max_num_batched_tokens": 512}


@pytest.fixture(scope="module")
def tiny_model(model_path, tmp_path_factory):
    return kit.make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama", model_path)


class Runner:
    """Engines of the tiny model with a certificate folder of their own."""

    def __init__(self, probe, model, folder):
        self.probe, self.model, self.folder = probe, model, folder
        self.store = folder / "certificates"
        self.pool = compositions.make_pool(2, kit.make_encoder(model), 6, kit.TINY_VOCABULARY)

    def run(self, **engine):
        work = [compositions.alone(i) for i in range(len(self.pool))]
        job = {"engine": {"model": str(self.model), **ON, **engine}, "pool": self.pool, "compositions": work}
        found = self.probe.serve(job, self.folder, DET_PLUGIN_CERTIFICATES=str(self.store))
        return found["answers"], (self.folder / "engine.log").read_text()

    def files(self):
        return sorted(path for path in self.store.rglob("*.json") if path.name != "fingerprint.json")


@pytest.fixture(scope="module")
def runner(probe, tiny_model, tmp_path_factory):
    found = Runner(probe, tiny_model, tmp_path_factory.mktemp("jobs"))
    found.expected, found.first_log = found.run()
    return found


def truncate(path):
    path.write_text(path.read_text()[: path.stat().st_size // 2])


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    place = data.index(b'"accepted"') + 20
    data[place] ^= 1
    path.write_bytes(bytes(data))


def empty(path):
    path.write_bytes(b"")


def binary(path):
    path.write_bytes(bytes(range(256)))


def add_a_schedule(path):
    """A certificate that somebody edited: its checksum tells."""
    document = json.loads(path.read_text())
    document["certificate"]["accepted"].append("rows=999")
    path.write_text(json.dumps(document))


def test_a_first_start_says_what_it_certifies_in_the_hosts_format(runner):
    lines = [line for line in runner.first_log.splitlines() if "schedules, to be kept in" in line]
    assert {"linear_cpu", "attention_cpu"} <= {word for line in lines for word in line.split()}
    assert all("INFO" in line and "[certificates.py:" in line for line in lines)
    _, second = runner.run()
    assert "certifying" not in second


@pytest.mark.parametrize("damage", [truncate, flip_a_byte, empty, binary, add_a_schedule], ids=lambda f: f.__name__)
def test_a_damaged_certificate_is_rebuilt_and_told(runner, damage):
    kinds = {path.parent.name: path for path in runner.files()}
    assert set(kinds) == {"linear_cpu", "attention_cpu"}
    for path in kinds.values():
        damage(path)
    answers, log = runner.run()
    for path in kinds.values():
        assert f"certificate {path} is" in log
        assert json.loads(path.read_text())["certificate"]["accepted"]
    assert "it will be rebuilt" in log
    assert answers == runner.expected


def test_good_certificates_are_read_in_silence(runner):
    before = {path: path.stat().st_mtime_ns for path in runner.files()}
    answers, log = runner.run()
    assert "rebuilt" not in log
    assert {path: path.stat().st_mtime_ns for path in runner.files()} == before
    assert answers == runner.expected


def test_other_numeric_settings_are_another_fingerprint(runner):
    """Certificates made under one instruction set don't serve another."""
    work = [compositions.alone(0)]
    job = {"engine": {"model": str(runner.model), **ON}, "pool": runner.pool, "compositions": work}
    env = {"DET_PLUGIN_CERTIFICATES": str(runner.store), "ONEDNN_MAX_CPU_ISA": "AVX2"}
    before = {path.parent.parent.name for path in runner.files()}
    runner.probe.serve(job, runner.folder, **env)
    assert len({path.parent.parent.name for path in runner.files()}) == len(before) + 1


def test_dtypes(runner):
    """float32 and float16 run, with certificates of their own, and repeat."""
    for dtype in ("float32", "float16"):
        first, _ = runner.run(dtype=dtype)
        assert runner.run(dtype=dtype, max_num_batched_tokens=16, max_num_seqs=16)[0] == first
        assert first != runner.expected


def certify(model, folder):
    return subprocess.run(
        [sys.executable, "-m", "det_plugin.cli", "certify", str(model)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env=kit.environment(DET_PLUGIN_CERTIFICATES=str(folder)),
    )


@pytest.mark.timeout(600)
def test_certify_says_where_the_workers_certificates_are(tiny_model, tmp_path):
    """Those of a server's worker, whose thread count is another than the command's; one not kept is no success."""
    done = certify(tiny_model, tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    [made] = tmp_path.glob("*")
    number = len(list(made.glob("*/*.json")))
    assert f"certificates in {made}: {number}, {number} of them made now" in done.stdout
    assert number >= 4
    assert "refused:" not in done.stdout
    shutil.rmtree(made / "attention_cpu")
    (made / "attention_cpu").write_text("")  # not even root makes a file in it
    done = certify(tiny_model, tmp_path)
    assert done.returncode == 2, (done.stdout + done.stderr)[-3000:]
    assert "set DET_PLUGIN_CERTIFICATES to a folder that can be written" in done.stdout + done.stderr
    assert f"certificates in {made}: {number - 1}, 0 of them made now" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("error: the certificate of attention_cpu ")


@pytest.mark.timeout(300)
def test_a_required_certificate_that_is_missing(tiny_model, tmp_path):
    """The whole command: it ends by itself, not with success, and the last line says what to do."""
    section = json.dumps({"det_plugin": {"certificates": "require"}})
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model)]
    command += ["--enforce-eager", "--max-model-len", "512", "--additional-config", section, "--port", "0"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env=kit.environment(DET_PLUGIN_CERTIFICATES=str(tmp_path)),
    )
    text = done.stdout + done.stderr
    assert done.returncode != 0, text[-3000:]
    last = [line for line in done.stderr.splitlines() if line.strip()][-1]
    assert last.startswith("error: certificate of linear_cpu"), text[-3000:]
    assert "det-plugin certify" in last
