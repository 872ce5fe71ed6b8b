"""Two CPU ranks: a request's answer does not depend on its batch; the stock engine's does."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LENGTHS = (3, 700, 1200, 1500)
CHILD = """
import json, random, sys
from vllm import LLM, SamplingParams

LENGTHS = json.loads(sys.argv[3])


def answer(output):
    choice = output.outputs[0]
    return [list(choice.token_ids), [[(t, v.logprob.hex()) for t, v in s.items()] for s in choice.logprobs]]


if __name__ == "__main__":
    on = {"enable_deterministic_inference": True} if sys.argv[1] == "on" else {}
    llm = LLM(sys.argv[2], max_model_len=2048, enforce_eager=True, skip_tokenizer_init=True,
              tensor_parallel_size=2, **on)
    rng = random.Random(0)
    draw = lambda n: [rng.randrange(100, 4000) for _ in range(n)]
    watched = [draw(n) for n in LENGTHS]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    ask = lambda prompts: llm.generate([{"prompt_token_ids": p} for p in prompts], greedy, use_tqdm=False)
    alone = [answer(ask([p])[0]) for p in watched]
    llm.reset_prefix_cache()
    different = compared = 0
    for _ in range(3):
        batch = watched + [draw(rng.choice((1, 30, 900))) for _ in range(9)]
        rng.shuffle(batch)
        for prompt, output in zip(batch, ask(batch)):
            if prompt in watched:
                compared += 1
                different += answer(output) != alone[watched.index(prompt)]
    print("RESULT", json.dumps({"compared": compared, "different": different,
                                "distinct": [len(set(a[0])) for a in alone]}), flush=True)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose heads divide by two (the real one has nine)."""
    spec = importlib.util.spec_from_file_location("engine_check", HERE.parent / "gpu" / "engine_check.py")
    assert spec is not None
    assert spec.loader is not None
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    check.MODELS["llama-small"] = ("LlamaForCausalLM", 512, 1024, 4, 8, 2, 64, 8192)
    return check.write_model("llama-small", tmp_path_factory.mktemp("model"))


def run(model: Path, folder: Path, switch: str) -> dict:
    script = folder / "child.py"
    script.write_text(CHILD)
    done = subprocess.run(
        [sys.executable, str(script), switch, str(model), json.dumps(LENGTHS)],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=folder,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1", "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert found, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(found[-1].removeprefix("RESULT "))


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_two_ranks(model, tmp_path):
    """Batches of mixed lengths give every watched request its own answer, bit for bit."""
    found = run(model, tmp_path, "on")
    assert min(found["distinct"]) >= 8
    assert found["compared"] == 12
    assert found["different"] == 0


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_two_ranks_control(model, tmp_path):
    """The stock engine fails the same comparison."""
    assert run(model, tmp_path, "off")["different"] > 0
