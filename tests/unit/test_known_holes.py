"""Failures published about other systems: the table in docs/known_holes.md, and tests that no other file holds."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import compositions
import engine_check
import pytest

from det_plugin import capabilities

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "known_holes.md"
BACKENDS = {"cpu": capabilities.CPU_BACKENDS, "cuda": capabilities.CUDA_BACKENDS}


def table(text: str) -> dict[int, list[str]]:
    """Row number to cells."""
    cells = [[c.strip() for c in line.strip().strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {int(row[0]): row[1:] for row in cells if row[0].isdigit()}


def named_tests(cell: str) -> list[tuple[str, str]]:
    """(path, function) of each `path::name`; a parameter in brackets is left out."""
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)(?:\[[^`]*\])?`", cell)


def refusals(cell: str) -> list[tuple[str, str]]:
    """(platform, feature) of each "refused: `feature`", or "refused on cuda: `feature`"."""
    found = []
    for where, features in re.findall(r"refused(?: on (cpu|cuda))?: ((?:`[^`]+`(?:, )?)+)", cell):
        for feature in re.findall(r"`([^`]+)`", features):
            found += [(platform, feature) for platform in ([where] if where else ["cpu", "cuda"])]
    return found


@cache
def functions(path: str) -> frozenset[str]:
    """Functions at the top of a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def faults(text: str) -> list[str]:
    """What is wrong with a table."""
    rows, found = table(text), []
    if sorted(rows) != list(range(1, 35)):
        found.append(f"rows {sorted(rows)}, expected 1 to 34")
    for number, cells in rows.items():
        if len(cells) != 4:
            found.append(f"row {number}: {len(cells)} cells after the number, expected 4")
            continue
        tests = named_tests(cells[3])
        if not tests:
            found.append(f"row {number}: names no test")
        if len(tests) != cells[3].count("tests/"):
            found.append(f"row {number}: a test is not written as `path::name`")
        for path, name in tests:
            if not (ROOT / path).is_file() or name not in functions(path):
                found.append(f"row {number}: {path}::{name} does not exist")
            elif not name.startswith("test_") and not path.startswith("tests/gpu/"):
                found.append(f"row {number}: {path}::{name} is not a test")
        if "refused" in cells[2] and not refusals(cells[2]):
            found.append(f"row {number}: a refusal is not written as refused: `feature`")
        for platform, feature in refusals(cells[2]):
            known = {f for _, _, f in capabilities.matrix()}
            for backend in BACKENDS[platform]:
                if feature not in known or capabilities.lookup(platform, backend, feature).supported:
                    found.append(f"row {number}: {feature} is not refused on {platform} with {backend}")
    return found


def test_the_table_names_tests_that_exist_and_features_that_are_refused():
    assert not faults(TABLE.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("| 7 |", "| 70 |", "expected 1 to 34"),
        ("test_chunks_of_16`", "test_chunks_of_15`", "test_chunks_of_15 does not exist"),
        ("refused: `LoRA`", "refused: `prefix caching`", "prefix caching is not refused on cpu"),
        ("refused: `LoRA`", "refused: `telepathy`", "telepathy is not refused"),
        ("refused: `LoRA`", "refused, always", "not written as refused"),
        ("`tests/", "tests/", "not written as `path::name`"),
    ],
)
def test_a_wrong_table_is_noticed(old, new, said):
    text = TABLE.read_text(encoding="utf-8")
    assert old in text
    assert any(said in fault for fault in faults(text.replace(old, new)))


# --- rows 4 and 6: compiled code ---------------------------------------------------------------------------------

ROW_COUNTS = (1, 2, 3, 7, 8, 16, 17, 33, 64, 100, 255, 256, 257, 300)


@pytest.fixture(scope="module")
def layer():
    """A norm as the CUDA host builds it, then a linear operator; and the same in plain PyTorch."""
    torch = pytest.importorskip("torch")
    from det_plugin.host.vllm import norm_cuda
    from det_plugin.ops import _custom_ops, linear_cpu

    assert _custom_ops.NAMESPACE
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(4)
    draw = lambda *shape: torch.randn(*shape, generator=generator)

    class Base(torch.nn.Module):
        variance_epsilon = 1e-6

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(draw(256))

    norm = norm_cuda._make(Base, 0.0)()
    weight = draw(48, 256) / 16
    handle = linear_cpu.register_handle(linear_cpu.prepare_linear(weight))

    def ours(x, residual):
        y, total = norm(x, residual)
        return torch.ops.det_plugin.cpu_linear(y * 2.0, None, handle, 48), total

    def plain(x, residual):
        total = x + residual
        y = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.weight.data
        return torch.nn.functional.linear(y * 2.0, weight), total

    yield ours, plain, draw(300, 256), draw(300, 256)
    torch.set_num_threads(before)


def compiled(function, x, residual, first, backend="inductor"):
    """Bytes of the rows at every row count, by code that was compiled at ``first`` rows."""
    import torch

    torch._dynamo.reset()
    run = torch.compile(function, dynamic=True, fullgraph=True, backend=backend)
    with torch.no_grad():
        run(x[:first], residual[:first])
        return {m: [t.numpy().tobytes() for t in run(x[:m], residual[:m])] for m in ROW_COUNTS}


def cut(answers, rows):
    """The first ``rows`` rows' bytes of an answer of 300 rows."""
    return [whole[: len(whole) // 300 * rows] for whole in answers]


def eager(function, x, residual):
    import torch

    with torch.no_grad():
        return [t.numpy().tobytes() for t in function(x, residual)]


@pytest.mark.parametrize("first", [1, 256])
def test_rows_4_6_compiled_code_gives_the_eager_bits_at_every_row_count(layer, first):
    ours, _, x, residual = layer
    whole = eager(ours, x, residual)
    for rows, answer in compiled(ours, x, residual, first).items():
        assert answer == cut(whole, rows), rows


def test_rows_4_6_control(layer):
    """Plain PyTorch: the compiler writes its own norm, and the product follows the row count."""
    _, plain, x, residual = layer
    whole = eager(plain, x, residual)
    assert any(answer != cut(whole, rows) for rows, answer in compiled(plain, x, residual, 256).items())


def test_row_4_the_compiler_sees_one_opaque_operator(layer):
    ours, plain, x, residual = layer
    seen: list[str] = []

    def look(graph, _inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    compiled(ours, x, residual, 2, look)
    assert any("fused_add_rms_norm" in name for name in seen)
    assert not [name for name in seen if "mean" in name or "rsqrt" in name or name == "pow"]
    seen.clear()
    compiled(plain, x, residual, 2, look)
    assert [name for name in seen if "mean" in name or "rsqrt" in name]


# --- row 5: a library update changes the product ------------------------------------------------------------------


@pytest.mark.parametrize("package", ["torch", "triton", "nvidia-cublas", "nvidia-cublas-cu12", "vllm"])
def test_row_5_a_library_update_makes_certificates_invalid(monkeypatch, package):
    pytest.importorskip("torch")
    from det_plugin.evidence import fingerprint as module

    before = module.fingerprint_digest(module.fingerprint("cpu"))
    assert module.fingerprint_digest(module.fingerprint("cpu")) == before
    installed = module.package_version
    monkeypatch.setattr(module, "package_version", lambda name: "999" if name == package else installed(name))
    assert module.fingerprint_digest(module.fingerprint("cpu")) != before


# --- rows 7, 8, 11, 12: what the GPU check compares ---------------------------------------------------------------


def test_rows_7_8_11_12_the_gpu_plan_crosses_every_schedule():
    """Eager and compiled, async scheduling on and off, several chunk sizes, a cache that preempts, and a control."""
    ours = [engine.split(",") for engine in engine_check.ENGINES["full"] if engine.startswith("det,")]
    assert {engine[2] for engine in ours} == {"eager", "compile"}
    assert {"async=0" in engine for engine in ours} == {True, False}
    assert len({engine[3] for engine in ours}) >= 3
    assert any("kvtokens" in option for engine in ours for option in engine)
    assert any(engine.startswith("{control},") for engine in engine_check.ENGINES["full"])


def test_rows_7_8_engines_are_compared_with_each_other():

    def engine(name, token):
        return {"engine": name, "alone": [{"ids": [1, token], "lp": [["a"], ["b"]]}], "checks": {}}

    rows = [engine("det,B,eager,64,async=0", 2), engine("det,B,compile,512", 2), engine("stock,B,eager,64", 3)]
    engine_check.compare_engines(rows)
    assert rows[1]["checks"]["another engine"]["mismatches"] == 0
    assert not rows[2]["checks"]
    rows[1] = engine("det,B,compile,512", 5)
    engine_check.compare_engines(rows)
    assert rows[1]["checks"]["another engine"]["mismatches"] == 1


# --- rows 13, 14, 15, 19, 22: through the class that the CPU host runs --------------------------------------------


@pytest.fixture(scope="module")
def host_sampler():
    pytest.importorskip("vllm", reason="the sampler is a subclass of the host's")
    from det_plugin.host.vllm import sampler_v1

    return sampler_v1.make_sampler_class()()


def test_rows_13_14_15_19_the_hosts_sampler_takes_each_row_alone(host_sampler):
    """Rows of every kind in batches of 64 and 65, against each alone; the batch's largest k for all would differ."""
    import numpy as np
    import torch
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor

    vocabulary, count = 3000, 65
    kinds = [  # temperature, top_k, top_p, min_p
        (0.0, vocabulary, 1.0, 0.0),
        (0.8, vocabulary, 1.0, 0.0),
        (1.0, 3, 1.0, 0.0),
        (1.0, vocabulary, 0.1, 0.0),
        (1.0, 40, 0.9, 0.0),
        (1.0, vocabulary, 1.0, 0.3),
        (5.0, 1, 1.0, 0.0),
    ]
    temperature, top_k, top_p, min_p = zip(*(kinds[i % len(kinds)] for i in range(count)), strict=True)
    logits = torch.from_numpy((np.random.default_rng(9).standard_normal((count, vocabulary)) * 2).astype(np.float32))
    seeds = np.array([42 if i % 3 else 1000 + i for i in range(count)], dtype=np.int64)
    positions = np.arange(count, dtype=np.int64) * 7 + 5

    def sample(rows, k=top_k):
        column = lambda values, dtype=torch.float32: torch.tensor([values[i] for i in rows], dtype=dtype)
        processor = object.__new__(MinPLogitsProcessor)
        processor.min_p_cpu = column(min_p).numpy()
        processor.min_p_count = int((processor.min_p_cpu > 0).sum())
        host_sampler.det_seeds, host_sampler.det_positions = seeds[rows], positions[rows]
        limited = any(k[i] < vocabulary for i in rows)
        metadata = SimpleNamespace(
            all_greedy=all(temperature[i] == 0 for i in rows),
            temperature=column(temperature),
            top_k=column(k, torch.int32) if limited else None,
            top_p=column(top_p) if any(top_p[i] < 1 for i in rows) else None,
            logitsprocs=SimpleNamespace(argmax_invariant=[processor]),
        )
        return host_sampler.sample(logits[rows].clone(), metadata)[0].tolist()

    alone = [sample([i])[0] for i in range(count)]
    assert len(set(alone)) > count // 2
    for size in (64, 65):
        rows = np.random.default_rng(size).permutation(count)[:size].tolist()
        assert sample(rows) == [alone[i] for i in rows]
    assert sample(list(range(count)), [vocabulary] * count) != alone


def test_row_22_logprob_token_ids_leave_the_neighbours_alone(host_sampler):
    """Rows of the V1 sampler: one asks for ids, its neighbours for their top five."""
    import numpy as np
    import torch

    scores = (np.random.default_rng(8).standard_normal((4, 3000)) * 3).astype(np.float32)
    sampled = np.array([5, 6, 7, 8])
    exact = torch.from_numpy(scores).double().log_softmax(-1).numpy()

    def ask(rows, wanted, top):
        metadata = SimpleNamespace(logprob_token_ids=wanted, max_num_logprobs=top)
        found = host_sampler._scores(scores[rows], sampled[rows], metadata, False)
        return [t.numpy() for t in (found.logprob_token_ids, found.logprobs, found.selected_token_ranks)]

    chosen = [2999, 0, 17, 17, 4, 9, 1]
    ids, values, ranks = ask([0, 1, 2, 3], {1: chosen}, 5)
    for row in (0, 2, 3):
        own_ids, own_values, own_ranks = ask([row], None, 5)
        assert ids[row, :6].tobytes() == own_ids[0].tobytes()
        assert values[row, :6].tobytes() == own_values[0].tobytes()
        assert ranks[row] == own_ranks[0]
    alone_ids, alone_values, _ = ask([1], {0: chosen}, 0)
    assert ids[1, :8].tolist() == [6, *chosen] == alone_ids[0].tolist()
    assert values[1, :8].tobytes() == alone_values[0].tobytes()
    assert np.abs(values[1, :8] - exact[1, [6, *chosen]]).max() < 4e-6
    few = ask([0, 1], {1: [3, 4]}, 5)  # fewer ids than the neighbours' top five: the rest is marked as empty
    assert few[0][1].tolist() == [6, 3, 4, 0, 0, 0]
    assert np.isneginf(few[1][1, 3:]).all()


# --- row 34: a flush that fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize("flushed", [True, False])
def test_row_34_a_cache_that_was_not_emptied_ends_the_test(monkeypatch, flushed):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(TokensPrompt=dict))
    idle = SimpleNamespace(has_unfinished_requests=lambda: False)
    llm = SimpleNamespace(llm_engine=idle, reset_prefix_cache=lambda: flushed)
    work = {"members": [], "cold": True}
    if flushed:
        assert compositions.run_composition(llm, [], work) == []
    else:
        with pytest.raises(RuntimeError, match="was not emptied"):
            compositions.run_composition(llm, [], work)
    assert compositions.run_composition(llm, [], {**work, "cold": False}) == []


def test_a_control_that_finds_nothing_is_reported():
    row = lambda backend, ran, found: {
        "backend": backend,
        "negative_control_comparisons": ran,
        "negative_control_mismatches": found,
    }
    rows = [row("A", 5, 0), row("A", 4, 1), row("B", 9, 0), row("B", 0, 0), row("C", 0, 0)]
    assert engine_check.silent_controls(rows) == ["B"]
