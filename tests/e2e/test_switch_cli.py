"""Every way to turn the switch, up to the finished configuration; engines are started elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import engine_kit as kit
import pytest

FLAG = kit.FLAG
DEFAULTS = {
    "enable": True,
    "default_seed": 42,
    "noise_scope": "seed",
    "tp_invariant": False,
    "certificates": "auto",
}


def assert_on(answer, **settings):
    assert answer["config"] is not None, answer.text()
    section = answer["config"]["additional_config"]["det_plugin"]
    assert section == {**DEFAULTS, **settings}
    assert answer["config"]["seeds"], "the front end's request checks are not installed"
    assert "all" in answer["config"]["custom_ops"]


def assert_off(answer):
    assert answer["config"] is not None, answer.text()
    config = answer["config"]
    assert config["additional_config"].get("det_plugin") in (None, {})
    assert not config["seeds"]
    assert not config["activation"], "activation is imported although the switch is off"
    assert config["custom_ops"] != ["all"]


def commands(model: str, folder: Path) -> dict[str, tuple[list[str], str | None]]:
    batch = folder / "batch.jsonl"
    batch.write_text("")
    return {
        "serve": (["serve", model], None),
        "api_server": (["--model", model], "vllm.entrypoints.openai.api_server"),
        "two API servers": (["serve", model, "--api-server-count", "2"], None),
        "headless": (["serve", model, "--headless"], None),
        "bench latency": (["bench", "latency", "--model", model], None),
        "bench throughput": (
            ["bench", "throughput", "--model", model, "--input-len", "8", "--output-len", "8", "--num-prompts", "1"],
            None,
        ),
        "bench startup": (["bench", "startup", "--model", model, "--help"], None),
        "run-batch": (["run-batch", "-i", str(batch), "-o", str(folder / "out"), "--model", model], None),
    }


NAMES = [
    "serve",
    "api_server",
    "two API servers",
    "headless",
    "bench latency",
    "bench throughput",
    "run-batch",
]


@pytest.mark.parametrize("name", NAMES)
def test_flag_on_the_command_line(probe, model_path, tmp_path, name):
    argv, module = commands(str(model_path), tmp_path)[name]
    assert_on(probe.cli(*argv, FLAG, module=module))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("off", [[], ["--no-enable-deterministic-inference"]], ids=["absent", "false"])
def test_flag_absent_or_false(probe, model_path, tmp_path, name, off):
    argv, module = commands(str(model_path), tmp_path)[name]
    assert_off(probe.cli(*argv, *off, module=module))


@pytest.mark.parametrize("name", NAMES)
def test_environment_variable(probe, model_path, tmp_path, name):
    argv, module = commands(str(model_path), tmp_path)[name]
    assert_on(probe.cli(*argv, module=module, DET_PLUGIN_ENABLE="1"))


@pytest.mark.parametrize(("value", "on"), [("true", True), ("YES", True), ("0", False), ("", False), ("off", False)])
def test_environment_variable_spellings(probe, model_path, value, on):
    answer = probe.cli("serve", str(model_path), DET_PLUGIN_ENABLE=value)
    (assert_on if on else assert_off)(answer)


@pytest.mark.parametrize("value", ["true", "false"])
@pytest.mark.parametrize("command", ["serve", "api_server"])
def test_config_file(probe, model_path, tmp_path, value, command):
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {model_path}\nenable-deterministic-inference: {value}\nmax-model-len: 512\n")
    if command == "serve":
        answer = probe.cli("serve", "--config", str(path))
    else:
        answer = probe.cli("--config", str(path), module="vllm.entrypoints.openai.api_server")
    (assert_on if value == "true" else assert_off)(answer)


def test_config_file_against_the_command_line(probe, model_path, tmp_path):
    """The command line wins over the file, as it does for the host's own options."""
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {model_path}\nenable-deterministic-inference: true\n")
    assert_off(probe.cli("serve", "--config", str(path), "--no-enable-deterministic-inference"))


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        (True, {}),
        ({}, {}),
        ({"default_seed": 7}, {"default_seed": 7}),
        ({"default_seed": "random", "noise_scope": "prompt"}, {"default_seed": "random", "noise_scope": "prompt"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("with_flag", [False, True])
def test_additional_config(probe, model_path, section, settings, with_flag):
    text = json.dumps({"other": [1], "det_plugin": section})
    answer = probe.cli("serve", str(model_path), "--additional-config", text, *([FLAG] if with_flag else []))
    assert_on(answer, **settings)
    assert answer["config"]["additional_config"]["other"] == [1]


def test_additional_config_dotted(probe, model_path):
    answer = probe.cli("serve", str(model_path), "--additional-config.det_plugin.default_seed", "7")
    assert_on(answer, default_seed=7)


@pytest.mark.parametrize("section", [False, {"enable": False}, {"enable": False, "default_seed": 3}], ids=str)
def test_additional_config_false(probe, model_path, section):
    answer = probe.cli("serve", str(model_path), "--additional-config", json.dumps({"det_plugin": section}))
    assert answer["config"] is not None, answer.text()
    assert not answer["config"]["seeds"]
    assert not answer["config"]["activation"]


@pytest.mark.parametrize("command", ["serve", "bench latency", "bench throughput", "run-batch"])
def test_help_lists_the_flag(probe, command):
    for option in ["--help=all", "--help=DeterministicInference", "--help=enable-deterministic-inference"]:
        answer = probe.cli(*command.split(), option)
        if "enable-deterministic-inference" not in answer["out"] and command != "serve":
            answer = probe.cli(*command.split(), "--help")
        assert answer["rc"] == 0, answer.text()
        assert FLAG in answer["out"], (option, answer.text())


def test_plain_serve_help_lists_the_group(probe):
    answer = probe.cli("serve", "--help")
    assert "DeterministicInference" in answer["out"]


PRINT_CONFIG = """
from vllm.engine.arg_utils import EngineArgs
_finish = EngineArgs.create_engine_config
class Done(SystemExit): pass
def create_engine_config(self, *args, **kwargs):
    global result
    import sys
    config = _finish(self, *args, **kwargs)
    result = {
        "additional_config": config.additional_config,
        "custom_ops": list(config.compilation_config.custom_ops),
        "seeds": "det_plugin.host.vllm.seeds" in sys.modules,
        "activation": "det_plugin.host.vllm.activation" in sys.modules,
    }
    raise Done(0)
EngineArgs.create_engine_config = create_engine_config
"""

ENTRANCES = {
    "LLM": "from vllm import LLM\nmake = lambda **kw: LLM(**kw)",
    "LLM module": "from vllm.entrypoints.llm import LLM\nmake = lambda **kw: LLM(**kw)",
    "AsyncEngineArgs": "from vllm import AsyncEngineArgs\n"
    "make = lambda **kw: AsyncEngineArgs(**kw).create_engine_config()",
    "EngineArgs": "from vllm import EngineArgs\nmake = lambda **kw: EngineArgs(**kw).create_engine_config()",
    "arg_utils AsyncEngineArgs": "from vllm.engine.arg_utils import AsyncEngineArgs\n"
    "make = lambda **kw: AsyncEngineArgs(**kw).create_engine_config()",
    "arg_utils module": "import vllm.engine.arg_utils as a\n"
    "make = lambda **kw: a.EngineArgs(**kw).create_engine_config()",
    "config first": "from vllm.config import VllmConfig\nfrom vllm.engine.arg_utils import EngineArgs\n"
    "make = lambda **kw: EngineArgs(**kw).create_engine_config()",
    "LLMEngine": "from vllm import EngineArgs, LLMEngine\n"
    "make = lambda **kw: LLMEngine.from_engine_args(EngineArgs(**kw))",
    "platform first": "from vllm.platforms import current_platform\ncurrent_platform.device_type\n"
    "from vllm import LLM\nmake = lambda **kw: LLM(**kw)",
}


@pytest.mark.parametrize(
    ("value", "entrance"),
    [*((value, entrance) for value in (True, False) for entrance in ENTRANCES), (None, "LLM"), (None, "EngineArgs")],
)
def test_python_keyword_in_a_fresh_interpreter(bare, model_path, entrance, value):
    """No import but vLLM's own, in whichever order: the keyword is known."""
    keyword = "" if value is None else f", enable_deterministic_inference={value}"
    code = f"{ENTRANCES[entrance]}\n"
    # taken before anything else is imported from vLLM, as a user's program would
    code += PRINT_CONFIG + f"\nmake(model={str(model_path)!r}{keyword})\n"
    answer = bare.code(code, stop=False)
    answer["config"] = answer.get("result")
    (assert_on if value else assert_off)(answer)


@pytest.mark.parametrize("value", [1, "true", "yes", 0.0])
def test_python_keyword_that_is_not_a_boolean(bare, model_path, value):
    answer = bare.code(
        f"from vllm import LLM\ntry:\n    LLM({str(model_path)!r}, enable_deterministic_inference={value!r})\n"
        "except ValueError as error:\n    result = str(error)\n",
        stop=False,
    )
    assert answer.get("result") == f"enable_deterministic_inference: got {value!r}, accepts True or False"


def test_a_copy_of_engine_arguments_keeps_the_switch(bare, model_path):
    code = (
        "import dataclasses, pickle\nfrom vllm import AsyncEngineArgs\n"
        f"args = AsyncEngineArgs({str(model_path)!r}, enable_deterministic_inference=True)\n"
        "again = [dataclasses.replace(args, max_model_len=77), pickle.loads(pickle.dumps(args))]\n"
        "result = [a.additional_config['det_plugin'] for a in again]\n"
    )
    assert bare.code(code, stop=False).get("result") == [DEFAULTS, DEFAULTS]


def fresh(*argv: str) -> subprocess.CompletedProcess[str]:
    """``python ARGV`` in an interpreter of its own, that nothing was imported into."""
    command = [sys.executable, *argv]
    return subprocess.run(command, env=kit.environment(), capture_output=True, text=True, timeout=120, check=False)


def test_a_fresh_interpreter_gives_the_same_configuration(bare, model_path):
    """The check of the probe: what its forked children find, a program of its own finds."""
    code = f"{ENTRANCES['LLM']}\n{PRINT_CONFIG}\nmake(model={str(model_path)!r}, enable_deterministic_inference=True)\n"
    ends = "\nimport atexit, json\natexit.register(lambda: print('RESULT', json.dumps(result)))\n"
    done = fresh("-c", f"result = None{ends}{code}")
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-4000:]
    found = json.loads(lines[-1])
    assert found == bare.code(code, stop=False).get("result")
    assert found["additional_config"]["det_plugin"] == DEFAULTS


def test_a_fresh_interpreter_refuses_in_the_same_words(probe, model_path):
    argv = ("serve", str(model_path), FLAG, "--enable-lora")
    done = fresh("-m", "vllm.entrypoints.cli.main", *argv)
    expected = probe.cli(*argv)
    assert done.returncode == expected["rc"] != 0, done.stderr[-4000:]
    assert done.stderr.splitlines()[-1] == expected.last_line
    assert "--enable-lora" in expected.last_line


def test_installing_twice_changes_nothing(bare):
    code = (
        "from vllm.engine.arg_utils import EngineArgs\n"
        "from det_plugin.host.vllm import switch\nfrom det_plugin.host.vllm.plugin import platform_probe, register\n"
        "switch.install()\nfirst = EngineArgs.__init__\n"
        "platform_probe()\nregister()\nregister()\nresult = EngineArgs.__init__ is first\n"
    )
    assert bare.code(code, stop=False).get("result") is True
