"""What the engine tests share: the probe process, exact comparison of answers, and random compositions."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FLAG = "--enable-deterministic-inference"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "TOKENIZERS_PARALLELISM": "false",
}
SWITCHES = ("DET_PLUGIN_ENABLE", "VLLM_BATCH_INVARIANT", "DET_PLUGIN_REFUSAL_FILE", "VLLM_PLUGINS")


CORES = frozenset(os.sched_getaffinity(0))
"""All cores that the tests may use."""

TWO_RANKS = "|".join(map(str, sorted(CORES)[:2]))
"""``VLLM_CPU_OMP_THREADS_BIND`` of an engine of two ranks."""


def take_share_of_cores() -> None:
    """Keep this process, and what it starts, on cores of its own, when pytest-xdist runs several.

    The processes of an engine wait for each other in busy loops, and its threads at the end of every operation: on
    shared cores, two engines would slow each other down far more than twice.
    """
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    if share := sorted(CORES)[number::count]:
        os.sched_setaffinity(0, share)


@contextlib.contextmanager
def all_cores() -> Iterator[None]:
    """What is started inside may use all cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, CORES)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without any switch of the plugin."""
    inherited = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    return {**inherited, **ENVIRONMENT, **extra}


class Answer(dict):
    """What one child of the probe gave: ``rc``, ``out``, ``err``, ``config``, ``result``."""

    @property
    def last_line(self) -> str:
        lines = [line for line in self["err"].splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def text(self) -> str:
        return f"status {self['rc']}\n{self['out'][-3000:]}\n{self['err'][-6000:]}"


class EngineError(Exception):
    """An engine of a test did not come up, or died."""


class Probe:
    """A process that has imported vLLM once and forks a child for each request; see ``probe_server.py``."""

    def __init__(self, cwd: Path, *, bare: bool = False) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "probe_server.py"), *(["--bare"] if bare else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=cwd,
            env=environment(),
        )

    def _ask(self, request: dict[str, Any]) -> Answer:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the probe ended with status {self._process.wait()}"
        return Answer(json.loads(line))

    def cli(self, *argv: str, module: str | None = None, **env: str | None) -> Answer:
        """``vllm ARGV`` (or ``python -m MODULE ARGV``) up to the finished configuration."""
        return self._ask({"argv": list(argv), "env": env, **({"module": module} if module else {})})

    def code(self, code: str, *, stop: bool = True, **env: str | None) -> Answer:
        """Python code; its global ``result`` comes back."""
        return self._ask({"code": code, "env": env, "stop": stop})

    def serve(self, job: dict[str, Any], folder: Path, **env: str | None) -> dict[str, Any]:
        """Run ``compositions.serve(job)`` in a child with an engine of its own.

        The child's log is written to ``folder/engine.log``.

        Raises:
            EngineError: the engine did not start or died; the message holds the child's output.
        """
        path = folder / "job.json"
        path.write_text(json.dumps(job))
        code = (
            f"import json, sys\nsys.path.insert(0, {str(HERE)!r})\nimport compositions\n"
            f"result = compositions.serve(json.load(open({str(path)!r})))\n"
        )
        answer = self.code(code, stop=False, **env)
        (folder / "engine.log").write_text(answer["out"] + answer["err"])
        if answer.get("result") is None:
            raise EngineError(answer.text())
        return answer["result"]

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(30)
        if self._process.stdout is not None:
            self._process.stdout.close()


TINY_VOCABULARY = 4096


def make_tiny_model(folder: Path, tokenizer_from: Path, *, seed: int = 0) -> Path:
    """A random Llama of 3 layers whose heads split over two ranks; weights that don't repeat one token.

    Matrices N(0, 1/fan_in), norms 1, untied head scaled by 3.
    """
    import shutil

    import torch
    from safetensors.torch import save_file

    hidden, inner, layers, heads, kv_heads, dim, vocabulary = 256, 640, 3, 4, 2, 64, TINY_VOCABULARY
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * scale * columns**-0.5).to(torch.bfloat16)

    tensors = {
        "model.embed_tokens.weight": torch.randn(vocabulary, hidden, generator=generator).to(torch.bfloat16),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "lm_head.weight": matrix(vocabulary, hidden, 3.0),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes = {
            "self_attn.q_proj": (heads * dim, hidden),
            "self_attn.k_proj": (kv_heads * dim, hidden),
            "self_attn.v_proj": (kv_heads * dim, hidden),
            "self_attn.o_proj": (hidden, heads * dim),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        tensors.update({f"{prefix}.{name}.weight": matrix(*shape) for name, shape in shapes.items()})
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (tokenizer_from / name).exists():
            shutil.copy(tokenizer_from / name, folder / name)
    return folder


def make_encoder(model: Path) -> Any:
    """Text to token ids, by the model's own tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda text: tokenizer.encode(text).ids


def differences(
    compositions: list[dict[str, Any]], answers: list[list[Any]], alone: list[Any]
) -> tuple[int, list[str]]:
    """Number of answers compared with the request run alone, and a line for each that differs."""
    compared, lines = 0, []
    for number, (composition, found) in enumerate(zip(compositions, answers, strict=True)):
        for place, (member, answer) in enumerate(zip(composition["members"], found, strict=True)):
            if answer is None:
                continue
            compared += 1
            if answer != alone[member["request"]]:
                lines.append(
                    f"composition {composition.get('index', number)}, member {place} (request {member['request']}): "
                    + where(alone[member["request"]], answer)
                )
    return compared, lines


def where(expected: list[Any], got: list[Any]) -> str:
    """The first place at which two exact answers part."""
    if expected[0] != got[0]:
        return "prompt logprobs"
    for want, have in zip(expected[1:], got[1:], strict=True):
        for index, (a, b) in enumerate(zip(want[1], have[1], strict=False)):
            if a != b:
                return f"choice {want[0]}: token {index}: {a} became {b}"
            if want[2][index] != have[2][index]:
                return f"choice {want[0]}: logprobs of token {index}: {want[2][index]} became {have[2][index]}"
    return f"{expected[1:]} became {got[1:]}"
