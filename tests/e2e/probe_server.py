"""Runs command lines up to the point where an engine would start; a process of its own, fed over stdin.

One line of JSON per request: ``{"argv": [...], "env": {...}, "code": "..."}``; one line of JSON per answer:
``{"rc", "out", "err", "config"}``.  vLLM is imported once, then every request runs in a forked child, so that a
command line costs about a second instead of ten.  ``argv`` runs as ``vllm ARGV`` (or the module named by
``module``); ``code`` runs instead of it, and its global ``result`` comes back.  A child ends with status 0 and
its finished configuration as soon as one is complete, so that engines, workers and weights are never reached,
unless the request says ``"stop": false``.  Started with ``--bare``, what vLLM depends on is imported, vLLM isn't.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path

BARE = (
    *("torch", "torch._dynamo", "torch._inductor.lowering", "torch._inductor.select_algorithm"),
    *("transformers", "transformers.models", "transformers.processing_utils", "transformers.generation"),
    *("accelerate", "cv2", "fastapi", "openai.types.chat", "pydantic", "uvicorn", "wrapt", "xgrammar"),
)
FULL = (
    *("vllm.entrypoints.openai.api_server", "vllm.entrypoints.llm"),
    *("vllm.v1.worker.cpu_worker", "vllm.v1.executor.multiproc_executor"),
)


def config_of(vllm_config, engine_args) -> dict:
    """What tests look at."""
    backend = vllm_config.attention_config.backend
    return {
        "additional_config": vllm_config.additional_config,
        "custom_ops": list(vllm_config.compilation_config.custom_ops),
        "attention_backend": None if backend is None else backend.name,
        "class": type(engine_args).__name__,
        "seeds": "det_plugin.host.vllm.seeds" in sys.modules,
        "activation": "det_plugin.host.vllm.activation" in sys.modules,
    }


def stop_at_config(report) -> None:
    from vllm.engine.arg_utils import EngineArgs

    finish = EngineArgs.create_engine_config

    def create_engine_config(self, *args, **kwargs):
        report["config"] = config_of(finish(self, *args, **kwargs), self)
        leave(report, 0)

    EngineArgs.create_engine_config = create_engine_config


def leave(report, status: int) -> None:
    report["rc"] = status
    sys.stdout.flush()
    sys.stderr.flush()
    with open(report.pop("file"), "w") as file:
        json.dump(report, file, default=repr)
    os._exit(status)


def child(request: dict, files: list[str]) -> None:
    for number, path in zip((1, 2), files, strict=False):
        descriptor = os.open(path, os.O_WRONLY)
        os.dup2(descriptor, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0)
    report: dict = {"file": files[2], "config": None}
    for name, value in request.get("env", {}).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    status = 0
    scope: dict = {"__name__": "__main__"}
    try:
        if request.get("stop", True):
            stop_at_config(report)
        if request.get("code"):
            exec(compile(request["code"], "<request>", "exec"), scope)
        else:
            sys.argv = ["vllm", *request["argv"]]
            runpy.run_module(request.get("module", "vllm.entrypoints.cli.main"), run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    report["result"] = scope.get("result")
    leave(report, status)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print must not mix with answers
    for name in BARE if "--bare" in sys.argv else (*BARE, *FULL):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a child that collects would visit, and so copy, all that was imported
    for line in sys.stdin:
        files = []
        for _ in range(3):
            handle, path = tempfile.mkstemp()
            os.close(handle)
            files.append(path)
        pid = os.fork()
        if pid == 0:
            try:
                child(json.loads(line), files)
            except BaseException:
                traceback.print_exc()
                os._exit(70)
        _, status = os.waitpid(pid, 0)
        out, err, text = (Path(path).read_text(errors="replace") for path in files)
        answer = {"rc": os.waitstatus_to_exitcode(status), **(json.loads(text) if text else {})}
        print(json.dumps({**answer, "out": out, "err": err}), file=answers, flush=True)
        for path in files:
            os.unlink(path)


if __name__ == "__main__":
    main()
