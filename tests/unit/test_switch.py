"""The switch's own functions; what they do to the host is tested end to end (tests/e2e/test_switch_cli.py)."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from det_plugin import ConfigError, UnsupportedError
from det_plugin.host.vllm import refusal, switch


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"attention_backend": "triton"}, {"attention_backend": "TRITON_ATTN"}),
        ({"attention_backend": "FA3"}, {"attention_backend": "FLASH_ATTN"}),
        ({"attention_backend": "FlashInfer"}, {"attention_backend": "FLASHINFER"}),
        ({"attention_backend": "CPU_ATTN"}, {"attention_backend": "CPU_ATTN"}),
        ({"attention_backend": None}, {}),
        (
            {"attention_config": {"backend": "fa3", "flash_attn_version": 3}},
            {"attention_config": {"backend": "FLASH_ATTN", "flash_attn_version": 3}},
        ),
        ({"attention_config": {}}, {}),
        ({}, {}),
    ],
    ids=str,
)
def test_backend_aliases(given, found):
    before = dict(given)
    assert switch._without_aliases(given) == found
    assert given == before


def test_errors_of_the_host_keep_their_type_and_gain_a_line():
    with pytest.raises(ValueError, match="two  lines") as caught, switch.explained(True):
        raise ValueError("two  lines\n   of text")
    assert caught.value.__det_plugin__ == "two lines of text"


def test_no_line_when_off_nor_for_programming_errors_nor_for_our_own():
    for on, error in ((False, ValueError("x")), (True, TypeError("x")), (True, ConfigError("x"))):
        with pytest.raises(type(error)) as caught, switch.explained(on):
            raise error
        assert not hasattr(caught.value, "__det_plugin__")


def test_pydantic_errors_lose_their_decoration():
    import pydantic

    class Config(pydantic.BaseModel):
        size: int

        @pydantic.field_validator("size")
        @classmethod
        def _positive(cls, value):
            raise ValueError("must be positive")

    with pytest.raises(ValueError, match="size") as caught, switch.explained(True):
        Config(size=-1)
    assert caught.value.__det_plugin__ == "Config.size: must be positive"


HOOK = """
import sys
from det_plugin import {kind}
from det_plugin.host.vllm import switch
switch._explain_refusals()
switch._explain_refusals()
def run():
    with switch.explained({on}):
        {statement}
run()
"""


def stderr_of(statement: str, *, on: bool = True, kind: str = "ConfigError") -> tuple[int, str]:
    code = HOOK.format(statement=statement, on=on, kind=kind)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "statement",
    [
        "raise ConfigError('x: got 1, accepts 2')",
        "raise ValueError('x: got 1, accepts 2')",
        "raise OSError('x: got 1, accepts 2')",
    ],
)
def test_a_refusal_is_one_line_and_not_success(statement):
    assert stderr_of(statement) == (1, "error: x: got 1, accepts 2\n")


def test_a_wrapped_refusal_is_found():
    status, text = stderr_of(
        "\n        try:\n            raise ConfigError('the reason')\n"
        "        except ConfigError as error:\n            raise RuntimeError('engine') from error"
    )
    assert (status, text) == (1, "error: the reason\n")


@pytest.mark.parametrize(("statement", "on"), [("raise ValueError('host')", False), ("raise TypeError('bug')", True)])
def test_other_errors_keep_their_stack_trace(statement, on):
    status, text = stderr_of(statement, on=on)
    assert status == 1
    assert "Traceback" in text


def test_a_workers_reason_is_printed_last(tmp_path, monkeypatch):
    path = tmp_path / "reason"
    monkeypatch.setenv(refusal.FILE_ENV, str(path))
    with pytest.raises(UnsupportedError), refusal.told():
        raise UnsupportedError("a layer", "nobody certified it", "another model")
    assert "nobody certified it" in refusal.read()
    status, text = stderr_of("raise TypeError('Engine core initialization failed')")
    assert status == 1
    assert text.splitlines()[-1].startswith("error: deterministic inference does not support a layer")


def test_only_refusals_are_written_down(tmp_path, monkeypatch):
    monkeypatch.setenv(refusal.FILE_ENV, str(tmp_path / "reason"))
    with pytest.raises(ZeroDivisionError), refusal.told():
        raise ZeroDivisionError
    assert refusal.read() == ""
    monkeypatch.delenv(refusal.FILE_ENV)
    assert refusal.read() == ""


def test_the_file_is_named_once_and_removed():
    code = (
        "import os\nfrom det_plugin.host.vllm import refusal\nrefusal.prepare()\n"
        "name = os.environ[refusal.FILE_ENV]\nrefusal.prepare()\nassert os.environ[refusal.FILE_ENV] == name\n"
        "assert not os.path.exists(name), 'a process that is killed would leave it'\n"
        "try:\n"
        "    with refusal.told(): raise refusal.DetPluginError('no')\n"
        "except refusal.DetPluginError: pass\n"
        "if os.fork() == 0: raise SystemExit\nos.wait()\n"
        "assert refusal.read() == 'no' and os.stat(name).st_mode & 0o777 == 0o600\nprint(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    import os

    assert not os.path.exists(done.stdout.strip())


def test_a_reason_is_not_written_through_somebody_elses_link(tmp_path, monkeypatch):
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "reason").symlink_to(target)
    monkeypatch.setenv(refusal.FILE_ENV, str(tmp_path / "reason"))
    with pytest.raises(UnsupportedError), refusal.told():
        raise UnsupportedError("a layer", "nobody certified it", "another model")
    assert target.read_text() == "mine"


def test_a_module_that_is_half_imported(monkeypatch):
    """Classes taken while the module still runs are left alone; the first use after it installs the switch."""
    installed = []
    monkeypatch.setattr(switch, "install", lambda: installed.append(True))
    module = types.ModuleType("half")
    module.__spec__ = types.SimpleNamespace(_initializing=True)
    monkeypatch.setitem(sys.modules, switch.ARG_UTILS, module)
    switch.install_on_import()
    module.EngineArgs = module.AsyncEngineArgs = object
    assert module.EngineArgs is object
    assert not installed
    module.__spec__._initializing = False
    assert module.other is None if hasattr(module, "other") else not installed
    assert module.AsyncEngineArgs is object
    assert installed == [True]
    assert type(module) is types.ModuleType


def test_sections():
    make = types.SimpleNamespace
    assert switch.section_of(make(additional_config={"det_plugin": {"default_seed": 3}})).default_seed == 3
    for additional in ({}, None, {"det_plugin": False}, {"det_plugin": {"enable": False}}, object()):
        assert switch.section_of(make(additional_config=additional)) is None


def test_engines_of_one_process_keep_their_own_settings():
    """A stock engine, and two deterministic ones with other default seeds, behind one front end."""
    pytest.importorskip("vllm", reason="the host is not installed")
    from copy import copy

    from vllm.sampling_params import SamplingParams

    from det_plugin.host.vllm import seeds
    from det_plugin.sampling.seeds import choice_seed

    make = types.SimpleNamespace

    def original(self, request_id, prompt, params):
        return make(sampling_params=copy(params), prompt_token_ids=[1, 2])

    process_inputs = seeds._process_inputs(original)
    child = seeds._child_params(lambda self, index: "the host's own")
    given = SamplingParams(n=2, temperature=1.0)
    for additional, seed in (
        ({}, None),
        ({"det_plugin": {}}, 42),
        ({"det_plugin": {"default_seed": 7}}, 7),
        ({"det_plugin": False}, None),
    ):
        engine = make(vllm_config=make(additional_config=additional))
        found = process_inputs(engine, "request", "prompt", given).sampling_params
        assert found.seed == seed
        assert given.seed is None
        parent = make(sampling_params=found)
        if seed is None:
            assert child(parent, 1) == "the host's own"
        else:
            assert child(parent, 1).seed == choice_seed(seed, 1)
