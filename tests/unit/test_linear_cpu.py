"""The CPU linear: one order at every row count that may run, and wrong kernels struck out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from det_plugin.errors import CertificateError
from det_plugin.evidence.certificates import Certificate, CertificateStore, first_difference
from det_plugin.hooks import hookimpl, plugin_manager
from det_plugin.ops import linear_cpu
from det_plugin.ops.linear_cpu import InvariantLinear, LinearKernel, linear_reference, prepare_linear

DTYPES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
SHAPES = [(1, 1), (7, 13), (3, 31), (129, 257), (576, 96), (33, 1000)]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small products: threads would only wait for each other, long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def weight_of(n, k, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, k, generator=generator) * k**-0.5).to(dtype)


def same(a, b):
    return first_difference(a, b) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_keeps_its_bits_at_every_row_count(dtype, shape):
    n, k = shape
    with_bias = n % 2 == 1  # certificates take seconds: each shape once
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(700, k, generator=generator).to(dtype)
    bias = torch.randn(n, generator=generator).to(dtype) if with_bias else None
    linear = prepare_linear(weight_of(n, k, dtype), with_bias=with_bias)
    whole = linear(x, bias)
    for rows in (1, 2, 3, 15, 16, 17, 31, 33, 64, 100, 511, 512, 513, 699):
        for start in sorted({0, (700 - rows) // 2, 700 - rows}):
            assert same(linear(x[start : start + rows], bias), whole[start : start + rows]), (rows, start)
    reference = linear_reference(x, weight_of(n, k, dtype), bias)
    scale = 1 + reference.abs().max()
    assert ((whole.double() - reference).abs().max() / scale) < DTYPES[dtype]


def test_the_vendor_product_alone_does_not(record_property):
    """Negative control: plain ``F.linear`` gives some row other bits at some row count, for some shape and dtype."""
    found = []
    for dtype in DTYPES:
        for n, k in [*SHAPES, (960, 576), (1536, 576)]:
            weight, x = (
                weight_of(n, k, dtype),
                torch.randn(513, k, generator=torch.Generator().manual_seed(1)).to(dtype),
            )
            whole = torch.nn.functional.linear(x, weight)
            found += [
                (dtype, n, k, rows)
                for rows in (1, 2, 3, 16, 64, 100)
                if not same(torch.nn.functional.linear(x[:rows], weight), whole[:rows])
            ]
    record_property("differing", len(found))
    assert found, "the vendor's product kept one order everywhere: the test above proves nothing here"


def test_shapes_of_the_input():
    linear = prepare_linear(weight_of(5, 8, torch.float32))
    x = torch.randn(2, 3, 8)
    assert linear(x).shape == (2, 3, 5)
    assert same(linear(x).reshape(6, 5), linear(x.reshape(6, 8)))
    assert linear(x[:0]).shape == (0, 3, 5)
    assert linear(x[0, 0]).shape == (5,)
    wide = torch.randn(6, 16)
    assert same(linear(wide[:, ::2]), linear(wide[:, ::2].contiguous()))
    assert same(linear(wide[:, 8:]), linear(wide[:, 8:].contiguous()))


@pytest.mark.parametrize(
    ("x", "message"),
    [(torch.zeros(2, 7), "last dimension 7, expected K = 8"), (torch.zeros(2, 8).double(), "expected the weight's")],
)
def test_wrong_inputs(x, message):
    with pytest.raises(ValueError, match=message):
        prepare_linear(weight_of(5, 8, torch.float32))(x)


@pytest.mark.parametrize("weight", [torch.zeros(2, 3, 4), torch.zeros(3), torch.zeros(2, 3).double()])
def test_wrong_weights(weight):
    with pytest.raises(ValueError, match=r"expected \[N, K\] in bfloat16"):
        prepare_linear(weight)


def test_neighbours_do_not_matter():
    linear = prepare_linear(weight_of(65, 130, torch.bfloat16))
    x = torch.randn(40, 130).to(torch.bfloat16)
    alone = linear(x[17:18])
    for value in (float("nan"), float("inf"), 1e30, -0.0):
        neighbours = torch.full_like(x, value)
        neighbours[17] = x[17]
        assert same(linear(neighbours)[17:18], alone)


# --- wrong schedules --------------------------------------------------------------------------------------------


@pytest.fixture
def kernels():
    """Registers kernels, ahead of the built-in ones, through the plugin's own hook."""
    manager, added = plugin_manager(), []

    def add(*offered: LinearKernel):
        class Extension:
            @staticmethod
            @hookimpl(tryfirst=True)
            def det_plugin_cpu_linear_kernels():
                return list(offered)

        extension = Extension()
        manager.register(extension)
        added.append(extension)

    yield add
    for extension in added:
        manager.unregister(extension)


def splitting(limit: int) -> LinearKernel:
    """Cuts K in two where there are at most ``limit`` rows, as vendor libraries do to fill a machine."""

    def prepare(weight):
        half = weight.shape[1] // 2

        def run(x, bias, out):
            wide, w = x.float(), weight.float()
            if len(x) <= limit:
                total = wide[:, :half] @ w[:, :half].T + wide[:, half:] @ w[:, half:].T
            else:
                total = torch.stack([wide[:, i : i + 1] * w[:, i] for i in range(wide.shape[1])]).cumsum(0)[-1]
            out.copy_(total if bias is None else total + bias.float())

        return run

    return LinearKernel(f"splits below {limit + 1}", prepare)


def unsteady(weight):
    """Depends on where in the call a row stands."""

    def run(x, bias, out):
        place = torch.arange(len(x), dtype=torch.float64)[:, None]
        out.copy_((x.double() @ weight.double().T) * (1 + place * 1e-3))

    return run


def test_a_schedule_that_splits_k_is_struck_out(kernels):
    """The wrong row counts are struck out and padded past; what is left has one order."""
    kernels(splitting(5))
    weight = weight_of(64, 96, torch.float32)
    linear = prepare_linear(weight)
    assert linear.kernel == "splits below 6"
    struck = set(linear.certificate.struck_out)
    assert {"rows=1", "rows=2", "rows=3", "rows=4", "rows=5"} == struck
    assert "first difference at" in str(linear.certificate.struck_out["rows=1"])
    assert linear.padded_rows(1) == linear.padded_rows(5) == 6
    x = torch.randn(100, 96, generator=torch.Generator().manual_seed(3))
    whole = linear(x)
    assert all(same(linear(x[i : i + 1]), whole[i : i + 1]) for i in range(100))
    raw = splitting(5).prepare(weight)
    out = torch.empty(1, 64)
    raw(x[:1], None, out)
    assert not same(out, whole[:1]), "the wrong kernel is not wrong: this control proves nothing"


def test_a_kernel_without_any_order_falls_to_the_next(kernels):
    kernels(LinearKernel("unsteady", unsteady), splitting(0))
    assert prepare_linear(weight_of(64, 32, torch.float32)).kernel == "splits below 1"


def test_a_row_at_a_time():
    weight = weight_of(64, 32, torch.float32)
    run, bias = linear_cpu._prepare_torch_rows(weight), torch.randn(64)
    x, out = torch.randn(33, 32), torch.empty(33, 64)
    run(x, bias, out)
    assert torch.allclose(out.double(), linear_reference(x, weight, bias), atol=1e-5)
    piece = torch.empty(1, 64)
    run(x[7:8], bias, piece)
    assert same(piece, out[7:8])


def test_inputs_off_the_cache_line():
    """A view whose rows don't start on a cache line gives the same bits."""
    linear = prepare_linear(weight_of(64, 96, torch.float32))
    x = torch.randn(9, 96)
    flat = torch.empty(9 * 96 + 3)
    for offset in (1, 3):
        view = flat[offset : offset + 9 * 96].view(9, 96)
        view.copy_(x)
        assert view.data_ptr() % linear_cpu.CACHE_LINE
        assert same(linear(view), linear(x))


def test_no_kernel_left_is_a_refusal_that_tells_why(monkeypatch):
    def hook(**_):
        return [[LinearKernel("unsteady", unsteady)]]

    manager = type("M", (), {"hook": type("H", (), {"det_plugin_cpu_linear_kernels": staticmethod(hook)})})
    monkeypatch.setattr(linear_cpu, "plugin_manager", lambda: manager)
    with pytest.raises(CertificateError, match=r"no kernel keeps one order here: unsteady: .*depends on the row count"):
        prepare_linear(weight_of(64, 32, torch.float32))


def test_a_kernel_that_cannot_serve_is_passed_over(kernels):
    kernels(LinearKernel("not here", lambda weight: None))
    assert prepare_linear(weight_of(64, 32, torch.float32)).kernel != "not here"


def test_a_kernel_that_fails_at_some_row_counts(kernels):
    def prepare(weight):
        def run(x, bias, out):
            if len(x) % 2:
                raise RuntimeError("odd")
            out.copy_(torch.stack([x[:, i : i + 1] * weight[:, i] for i in range(x.shape[1])]).cumsum(0)[-1])

        return run

    kernels(LinearKernel("even only", prepare))
    linear = prepare_linear(weight_of(64, 32, torch.float32))
    assert linear.kernel == "even only"
    assert [linear.padded_rows(rows) for rows in (1, 2, 3)] == [2, 2, 4]


def test_certificates_are_kept_and_required(tmp_path, kernels):
    store = CertificateStore("digest", root=tmp_path)
    weight = weight_of(64, 32, torch.float32)
    with pytest.raises(CertificateError, match="missing"):
        prepare_linear(weight, store=store, mode="require")
    made = prepare_linear(weight, store=store).certificate
    assert prepare_linear(weight, store=store, mode="require").certificate == made
    with pytest.raises(CertificateError, match="missing"):
        prepare_linear(weight, with_bias=True, store=store, mode="require")


@given(st.sets(st.integers(1, 600), min_size=1), st.lists(st.integers(1, 1500), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_only_certified_row_counts_run(certified, asked):
    """Whatever is certified, nothing else is called, and every row comes back."""
    seen = []

    def run(x, bias, out):
        seen.append(len(x))
        out.copy_(x * 2)

    certificate = Certificate("linear_cpu", "k", "rows=1", tuple(f"rows={rows}" for rows in certified), {}, (1,))
    linear = InvariantLinear(3, 3, torch.float32, "stand-in", run, certificate)
    for rows in asked:
        x = torch.arange(rows * 3.0).reshape(rows, 3)
        assert torch.equal(linear(x), x * 2)
    assert set(seen) <= certified


def test_as_an_operator_under_compile():
    linear = prepare_linear(weight_of(5, 8, torch.float32))
    handle = linear_cpu.register_handle(linear)
    x = torch.randn(4, 8)
    got = torch.ops.det_plugin.cpu_linear(x, None, handle, 5)
    assert same(got, linear(x))
    compiled = torch.compile(lambda t: torch.ops.det_plugin.cpu_linear(t, None, handle, 5) * 1.0, backend="eager")
    assert same(compiled(x), linear(x))
