"""With the switch off, the host is what it is without the plugin: functions, operators, registries, configuration.

Two fresh processes take the same command line to the finished configuration and import the worker; in one the
plugin is installed and off, in the other it cannot be found.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ALLOWED = {
    "vllm.engine.arg_utils:EngineArgs.__init__",
    "vllm.engine.arg_utils:AsyncEngineArgs.__init__",
    "vllm.engine.arg_utils:EngineArgs.add_cli_args",
    "vllm.engine.arg_utils:EngineArgs.from_cli_args",
    "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    "vllm.v1.worker.worker_base:WorkerBase.__init__",
}
"""What the switch itself wraps: each passes straight through when it is off."""

SNAPSHOT = """
import importlib, sys, types
sys.path.insert(0, {here!r})
import compositions
if {hide}:
    compositions.hide_plugin()
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm import AsyncEngineArgs
from vllm.v1.worker.worker_base import WorkerBase
parser = make_arg_parser(FlexibleArgumentParser())
args = parser.parse_args(["--model", {model!r}, "--max-model-len", "512"{more}])
config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
for name in ("vllm.v1.worker.cpu_worker", "vllm.v1.worker.gpu_model_runner", "vllm.v1.engine.core",
             "vllm.v1.engine.async_llm", "vllm.v1.engine.llm_engine", "vllm.entrypoints.llm",
             "vllm.model_executor.models.llama", "vllm.v1.attention.backends.cpu_attn",
             "vllm.entrypoints.openai.chat_completion.protocol", "vllm.entrypoints.openai.completion.protocol"):
    importlib.import_module(name)
try:
    WorkerBase(config, 0, 0, "x")
except TypeError:
    pass

def place(value):
    code = getattr(value, "__code__", None)
    return None if code is None else [code.co_filename.rpartition("site-packages/")[2], code.co_firstlineno]

def functions(owner, prefix):
    for name, value in list(vars(owner).items()):
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, types.FunctionType):
            yield prefix + name, place(value)
        elif isinstance(value, type) and isinstance(owner, types.ModuleType) and value.__module__ == owner.__name__:
            yield from functions(value, prefix + name + ".")
        elif isinstance(owner, types.ModuleType) and isinstance(value, type):
            yield prefix + name, [value.__module__, value.__qualname__]

found = {{}}
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] == "vllm" and type(module) is types.ModuleType:
        found.update(functions(module, name + ":"))
import torch
from vllm.model_executor.custom_op import op_registry, op_registry_oot
from vllm.v1.attention.backends import registry
operators = sorted(
    schema.name for schema in torch._C._jit_get_all_schemas() if not schema.name.startswith(("aten::", "prim"))
)
result = {{
    "functions": found,
    "oot": {{name: repr(cls) for name, cls in op_registry_oot.items()}},
    "registry": {{name: repr(cls) for name, cls in op_registry.items()}},
    "backends": {{backend.name: backend.get_path() for backend in registry.AttentionBackendEnum if backend.value}},
    "operators": operators,
    "hash": config.compute_hash(),
    "config": repr(config).replace(config.instance_id or "\\0", ""),
    "environment": sorted(n for n in __import__("os").environ if n.startswith("DET_PLUGIN")),
    "modules": sorted(name for name in sys.modules if name.partition(".")[0] == "det_plugin"),
}}
"""


@pytest.fixture(scope="module")
def snapshots(bare, model_path):
    def take(hide=False, more=""):
        code = SNAPSHOT.format(
            here=str(Path(__file__).parent), model=str(model_path), hide=hide, more=more, worker=True
        )
        answer = bare.code(code, stop=False)
        assert answer.get("result") is not None, answer.text()
        return answer["result"]

    return {
        "hidden": take(hide=True),
        "absent": take(),
        "false": take(more=', "--no-enable-deterministic-inference"'),
        "section": take(more=""", "--additional-config", '{"det_plugin": false}'"""),
        "on": take(more=', "--enable-deterministic-inference"'),
    }


def changed(a, b):
    return {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}


def test_the_snapshot_sees_much(snapshots):
    """Thousands of functions, and no trace of the plugin where it is hidden."""
    assert len(snapshots["hidden"]["functions"]) > 5000
    assert snapshots["hidden"]["modules"] == []
    assert snapshots["absent"]["modules"]


@pytest.mark.parametrize("name", ["absent", "false", "section"])
def test_only_the_switch_itself_is_there(snapshots, name):
    off, hidden = snapshots[name], snapshots["hidden"]
    wrapped = changed(off["functions"], hidden["functions"])
    assert wrapped == ALLOWED
    for part in ("oot", "registry", "backends", "operators", "environment"):
        assert off[part] == hidden[part], part
    numeric = ("seeds", "_cpu", "_cuda", "sampler", "audit", "guards", "det_plugin.ops", "det_plugin.sampling")
    assert not [module for module in off["modules"] if any(part in module for part in numeric)]


@pytest.mark.parametrize("name", ["absent", "false"])
def test_the_configuration_is_the_same(snapshots, name):
    assert snapshots[name]["hash"] == snapshots["hidden"]["hash"]
    assert snapshots[name]["config"] == snapshots["hidden"]["config"]


def test_switched_on_it_does_change(snapshots):
    """The control: the same snapshot sees the switch."""
    on, hidden = snapshots["on"], snapshots["hidden"]
    assert changed(on["functions"], hidden["functions"]) - ALLOWED
    assert set(on["oot"]) - set(hidden["oot"])
    assert on["operators"] != hidden["operators"]
    assert on["hash"] != hidden["hash"]
