"""The compiled path of the CPU products: the bytes of the Python path, or no answer."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from det_plugin.evidence.certificates import Certificate
from det_plugin.ops import linear_cpu, linear_cpu_fast, native
from det_plugin.ops.linear_cpu import InvariantLinear

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="needs a C++ compiler to build the compiled path"
)

SETUP = r"""
import logging, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from det_plugin.evidence.certificates import Certificate, first_difference
from det_plugin.ops import linear_cpu, linear_cpu_fast, native
from det_plugin.ops.linear_cpu import InvariantLinear, LinearKernel

logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(levelname)s %(message)s")
FOLDER, build = Path(sys.argv[1]), native.build
native.build = lambda source, key: build(source, key, FOLDER)

def same(a, b):
    return first_difference(a, b) is None

def served(linear, index, x, bias=None):
    '''Whether the compiled path answers; if so, with the Python path's bytes and layout.'''
    got, want = linear_cpu_fast.fast(x, bias, index), linear(x, bias)
    if got is None:
        return False
    assert same(got, want), (x.shape, bias is not None)
    assert got.stride() == want.stride() and not got.data_ptr() % 64
    return True
"""

STAND_IN = (
    SETUP
    + r"""
library = torch.library.Library("_C", "DEF")
library.define("onednn_mm(Tensor! c, Tensor a, Tensor? bias, Tensor handler_tensor) -> ()")
weights, calls = [], []

def product(out, x, bias, handler):
    assert x.is_contiguous() and not x.data_ptr() % 64 and len(out) == len(x)
    calls.append(len(x))
    y = x.double() @ weights[int(handler)].double().T
    if len(x) == 1:
        y = y * (1 + 2**-6)  # another order at one row, as of vendor code
    out.copy_(y if bias is None else y + bias.double())

library.impl("onednn_mm", product, "CPU")

class Packed:
    def __init__(self, weight):
        weights.append(weight)
        self.onednn_handler = torch.tensor(len(weights) - 1)

    def __call__(self, x, bias, out):
        torch.ops._C.onednn_mm(out, x, bias, self.onednn_handler)

def linear_of(n, k, rows, dtype=torch.float32):
    certificate = Certificate("linear_cpu", "k", "rows=16", tuple(f"rows={r}" for r in rows), {}, (1,))
    run = Packed(torch.randn(n, k).to(dtype))
    return InvariantLinear(n, k, dtype, "stand-in", run, certificate)

torch.manual_seed(0)
"""
)


def run(script, folder, **environment):
    return subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        capture_output=True, text=True, check=False, timeout=300, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Built once for the whole module."""
    return tmp_path_factory.mktemp("native")


def passes(folder, body, setup=STAND_IN):
    done = run(setup + textwrap.dedent(body) + "\nprint('ok')", folder)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    assert done.stdout.strip().splitlines()[-1] == "ok", done.stdout
    return done.stdout


@needs_compiler
def test_serves_certified_row_counts_and_only_those(folder):
    out = passes(
        folder,
        """
        certified = [*range(2, 33), 40, 100, 512]
        for dtype in (torch.float32, torch.bfloat16):
            linear = linear_of(96, 64, certified, dtype)
            index = linear_cpu_fast.keep(linear)
            assert index is not None
            bias = torch.randn(96).to(dtype)
            for rows in (*range(41), 100, 512, 600, 2000):
                for each in (None, bias):
                    x = torch.randn(rows, 64).to(dtype)
                    calls.clear()
                    answer = linear_cpu_fast.fast(x, each, index)
                    assert (answer is not None) == (rows == 1 or rows in certified), rows
                    assert calls == ([] if answer is None else [max(rows, 2)]), (rows, calls)
                    served(linear, index, x, each)
        """,
    )
    assert "ERROR" not in out


@needs_compiler
def test_one_row_is_padded_to_two_only_where_two_are_the_next_certified(folder):
    passes(
        folder,
        """
        x = torch.randn(1, 64)
        odd = torch.randn(65)[1:].view(1, 64)
        assert odd.data_ptr() % 64
        for certified, expected in (([2, 16], [2]), ([3, 16], []), ([1, 2, 16], [1]), ([16], [])):
            linear = linear_of(96, 64, certified)
            index = linear_cpu_fast.keep(linear)
            assert index is not None
            calls.clear()
            linear_cpu_fast.fast(x, None, index)
            assert calls == expected, (certified, calls)
            assert served(linear, index, odd) == (certified[0] == 2)
        """,
    )


@needs_compiler
def test_other_inputs_are_left_to_python(folder):
    passes(
        folder,
        """
        linear = linear_of(96, 64, range(2, 33))
        index = linear_cpu_fast.keep(linear)
        assert served(linear, index, torch.randn(4, 64))
        fallen = {
            "three dimensions": torch.randn(2, 4, 64),
            "one dimension": torch.randn(64),
            "columns apart": torch.randn(4, 128)[:, ::2],
            "rows apart": torch.randn(4, 128)[:, :64],
            "one row, columns apart": torch.randn(1, 128)[:, ::2],
            "off the cache line": torch.randn(4 * 64 + 1)[1:].view(4, 64),
            "no rows": torch.randn(0, 64),
        }
        for name, x in fallen.items():
            assert not served(linear, index, x), name
        handle = linear_cpu.register_handle(linear, index)
        for name, x in fallen.items():
            assert same(torch.ops.det_plugin.cpu_linear(x, None, handle, 96), linear(x)), name
        for x in (torch.randn(4, 64).double(), torch.randn(4, 63), torch.randn(4, 64).bfloat16()):
            assert linear_cpu_fast.fast(x, None, index) is None
            for call in (linear, lambda x: torch.ops.det_plugin.cpu_linear(x, None, handle, 96)):
                try:
                    call(x)
                except ValueError as error:
                    assert "expected" in str(error)
                else:
                    raise SystemExit("a wrong input passed")
        for wrong in (-1, index + 1):
            try:
                linear_cpu_fast.fast(torch.randn(4, 64), None, wrong)
            except RuntimeError as error:
                assert f"no product is kept as {wrong}" in str(error)
            else:
                raise SystemExit("an index of nothing passed")
        """,
    )


@needs_compiler
def test_the_operator_of_compiled_graphs(folder):
    passes(
        folder,
        """
        before = linear_of(96, 64, range(2, 33))
        early = linear_cpu.register_handle(before)
        x, bias = torch.randn(4, 64), torch.randn(96)
        operator = torch.ops.det_plugin.cpu_linear
        want = operator(x, bias, early, 96)
        assert same(want, before(x, bias))
        linear = linear_of(96, 64, range(2, 33))
        handle = linear_cpu.register_handle(linear, linear_cpu_fast.keep(linear))
        asked = []
        original = InvariantLinear.__call__
        InvariantLinear.__call__ = lambda *a: asked.append(1) or original(*a)
        got = operator(x, bias, handle, 96)
        assert not asked, "went through Python"
        assert same(got, linear(x, bias))
        assert same(operator(x, bias, early, 96), want), "a handle from before the switch"
        graph = torch.compile(lambda x, b: operator(x, b, handle, 96) * 1.0, backend="eager", fullgraph=True)
        for each in (None, bias):
            assert same(graph(x, each), linear(x, each))
            assert same(graph(torch.cat([x] * 20), each), linear(torch.cat([x] * 20), each))
        """,
    )


@needs_compiler
def test_layers_of_one_shape_share_compiled_graphs(folder):
    """One per row count class (one shape, then any), not one per layer."""
    passes(
        folder,
        """
        from torch._dynamo.testing import CompileCounter
        from det_plugin.host.vllm import linear_cpu as host

        apply = host._straight(None)

        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.cpu_linear = host.BoundLinear(linear_of(96, 64, range(2, 33)))

            def forward(self, x):
                return apply(None, self, x, None)

        layers, counter = [Layer() for _ in range(6)], CompileCounter()
        assert len({layer.cpu_linear.kept for layer in layers}) == 6
        compiled = torch.compile(lambda layer, x: layer(x) * 1.0, backend=counter, fullgraph=True)
        for layer in layers:
            for rows in (4, 20, 40):
                x = torch.randn(rows, 64)
                assert same(compiled(layer, x), layer.cpu_linear.linear(x))
        assert counter.frame_count == 2, counter.frame_count
        """,
    )


@needs_compiler
def test_the_proof_catches_a_wrong_fast_path(folder):
    """Negative control: a row count that isn't certified, and another weight's handler."""
    out = passes(
        folder,
        """
        def tampered(change):
            keep = torch.ops.det_plugin._cpu_linear_keep
            class Space:
                _cpu_linear_keep = staticmethod(lambda *a: keep(*change(*a)))
            original, torch.ops.det_plugin = torch.ops.det_plugin, Space
            try:
                return linear_cpu_fast.keep(linear_of(96, 64, range(2, 33)))
            finally:
                torch.ops.det_plugin = original

        assert linear_cpu_fast.keep(linear_of(96, 64, range(2, 33))) is not None
        assert tampered(lambda *a: a) is not None
        print("tampering")
        assert tampered(lambda h, n, k, dtype, rows, twice: (h, n, k, dtype, [1, *rows], False)) is None
        assert tampered(lambda h, *rest: (h - 1, *rest)) is None
        """,
    )
    before, _, after = out.partition("tampering")
    assert "ERROR" not in before
    assert after.count("the compiled path differs at 1 rows") == 2
    assert "N=96 K=64 torch.float32" in after


@needs_compiler
def test_what_stays_with_python(folder):
    """Widened weights and other kernels; the stand-in sees no call of the compiled path."""
    passes(
        folder,
        """
        from det_plugin.hooks import hookimpl, plugin_manager

        class Even(Packed):
            '''Steady at every row count.'''
            def __call__(self, x, bias, out):
                y = (x.double() @ weights[int(self.onednn_handler)].double().T)
                out.copy_(y if bias is None else y + bias.double())

        class Extension:
            @staticmethod
            @hookimpl(tryfirst=True)
            def det_plugin_cpu_linear_kernels():
                return [LinearKernel("stand-in", Even)]

        plugin_manager().register(Extension())
        for shape in ((64, 64), (96, 32)):
            linear = linear_cpu.prepare_linear(torch.randn(*shape))
            assert linear.run.onednn_handler is not None
        calls.clear()
        for shape in ((63, 64), (64, 33), (7, 13), (65, 96)):
            linear = linear_cpu.prepare_linear(torch.randn(*shape))
            assert linear.kernel == "stand-in"
            assert linear_cpu_fast.keep(linear) is None, shape
        unpacked = linear_cpu._prepare_torch(torch.randn(64, 64))
        plain = InvariantLinear(64, 64, torch.float32, "torch", unpacked, linear.certificate)
        assert linear_cpu_fast.keep(plain) is None
        assert not calls
        """,
    )


@needs_compiler
def test_without_the_hosts_product_the_weight_stays(folder):
    out = passes(
        folder,
        """
        class Packed:
            onednn_handler = torch.tensor(0)
            def __call__(self, x, bias, out):
                out.zero_()
        certificate = Certificate("linear_cpu", "k", "rows=16", ("rows=2", "rows=16"), {}, (1,))
        assert linear_cpu_fast.keep(InvariantLinear(64, 64, torch.float32, "x", Packed(), certificate)) is None
        """,
        setup=SETUP,
    )
    assert "not on the compiled path" in out
    assert "_C::onednn_mm" in out


@needs_compiler
def test_the_hosts_own_product(folder):
    """The packed product of the installed engine, certified here, on both paths."""
    pytest.importorskip("vllm")
    out = passes(
        folder,
        """
        from vllm import _custom_ops as ops
        if not ops._supports_onednn:
            print("no oneDNN")
            print("ok")
            raise SystemExit
        from det_plugin.host.vllm import linear_cpu as host
        from det_plugin.hooks import plugin_manager
        plugin_manager().register(host._Kernels())
        ask = host._straight(None)
        generator = torch.Generator().manual_seed(3)
        for n, k, dtype in ((96, 64, torch.bfloat16), (576, 576, torch.bfloat16), (64, 96, torch.float32)):
            weight = torch.randn(n, k, generator=generator).to(dtype)
            linear = linear_cpu.prepare_linear(weight, with_bias=True)
            if linear.kernel != "onednn_packed":
                continue
            bound = host.BoundLinear(linear)
            assert bound.kept is not None
            layer = type("Layer", (), {"cpu_linear": bound})()
            biases = (None, torch.randn(n, generator=generator).to(dtype))
            answered = 0
            for rows in (*range(1, 41), 100, 512):
                x = torch.randn(rows, k, generator=generator).to(dtype)
                strided = torch.randn(rows, 2 * k, generator=generator).to(dtype)
                for bias in biases:
                    answered += served(linear, bound.kept, x, bias)
                    for t in (x, strided[:, k:], strided[:, ::2], x.view(1, rows, k)):
                        want = linear(t, bias)
                        assert same(bound(t, None, bias), want)
                        assert same(ask(None, layer, t, bias), want)
                        assert same(torch.ops.det_plugin.cpu_linear(t, bias, bound.handle, n), want)
            print(n, k, linear.padded_rows(1), answered)
            assert answered > 20
            odd = host.BoundLinear(linear_cpu.prepare_linear(weight[: n - 1]))
            assert odd.kept is None
            assert same(odd(x, None, None), odd.linear(x))
        """,
        setup=SETUP,
    )
    if out.split()[0] == "no":
        pytest.skip("the installed engine has no oneDNN product")
    assert out.count("\n") > 1, "no shape ran the host's kernel"


@needs_compiler
def test_several_processes_build_at_once(tmp_path):
    """Each gets the library; nothing but it is left."""
    script = SETUP + "print(linear_cpu_fast.activate())"
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: run(script, tmp_path), range(3)))
    assert [d.stdout.strip() for d in done] == ["True"] * 3, [d.stderr[-500:] for d in done]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".sha256", ".so"]


def test_only_one_of_several_compiles(tmp_path):
    """Those that come second wait, and take the first one's library."""
    log, compiler = tmp_path / "log", tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho run >> {log}\nsleep 1\nwhile [ "$1" != -o ]; do shift; done\necho x > "$2"\n')
    compiler.chmod(0o755)
    folder = tmp_path / "libraries"
    script = (
        "import sys\nfrom pathlib import Path\nfrom det_plugin.ops import linear_cpu_fast, native\n"
        "print(native.build(linear_cpu_fast.SOURCE, 'CPU', Path(sys.argv[1])))"
    )
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: run(script, folder, CXX=str(compiler)), range(3)))
    assert len({d.stdout for d in done}) == 1, done
    assert done[0].stdout.strip().endswith(".so"), done
    assert log.read_text().split() == ["run"]


@pytest.fixture
def fresh(monkeypatch):
    """As if nobody had asked for the compiled path in this process."""
    monkeypatch.setattr(linear_cpu_fast, "_tried", False)
    monkeypatch.setattr(linear_cpu_fast, "fast", None)


class PackedStandIn:
    onednn_handler = torch.tensor(0)

    def __call__(self, x, bias, out):
        out.copy_(x * 2 if bias is None else x * 2 + bias)


def test_no_compiler_is_said_once_and_python_goes_on(monkeypatch, tmp_path, caplog, fresh):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # a library in the user's own cache would need no compiler
    certificate = Certificate("linear_cpu", "k", "rows=16", ("rows=2", "rows=16"), {}, (1,))
    linear = InvariantLinear(32, 32, torch.float32, "x", PackedStandIn(), certificate)
    with caplog.at_level(logging.WARNING):
        assert [linear_cpu_fast.keep(linear) for _ in range(3)] == [None] * 3
    assert not linear_cpu_fast.active()
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1
    assert "products cost more processor time: no C++ compiler" in said[0]
    x = torch.randn(3, 32)
    handle = linear_cpu.register_handle(linear)
    assert torch.equal(torch.ops.det_plugin.cpu_linear(x, None, handle, 32), x * 2)


def test_a_library_that_does_not_load_leaves_the_operator_to_python(monkeypatch, tmp_path, caplog, fresh):
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    monkeypatch.setattr(native, "build", lambda source, key: broken)
    with caplog.at_level(logging.WARNING):
        assert not linear_cpu_fast.activate()
    assert "products cost more processor time" in caplog.text
    certificate = Certificate("linear_cpu", "k", "rows=16", ("rows=2", "rows=16"), {}, (1,))
    linear = InvariantLinear(32, 32, torch.float32, "x", PackedStandIn(), certificate)
    x = torch.randn(3, 32)
    assert torch.equal(torch.ops.det_plugin.cpu_linear(x, None, linear_cpu.register_handle(linear), 32), x * 2)
