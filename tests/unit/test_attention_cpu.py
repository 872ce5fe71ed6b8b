"""CPU attention: queries cut into runs, the certificate, and the order that a wrong cut would give."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from det_plugin.errors import CertificateError
from det_plugin.evidence.certificates import CertificateStore, first_difference
from det_plugin.host.vllm import attention_cpu
from det_plugin.host.vllm.attention_cpu import rows_per_item, split_queries


@pytest.mark.parametrize(
    ("isa", "heads", "kv_heads", "rows"),
    [
        ("amx", 9, 3, 32),
        ("amx", 32, 8, 8),
        ("amx", 32, 1, 1),
        ("amx", 64, 1, 32),  # heads of such a group are not packed
        ("vec", 8, 8, 8),
        ("vec16", 16, 4, 4),
        ("unknown", 8, 8, 1),
    ],
)
def test_rows_per_item(isa, heads, kv_heads, rows):
    assert rows_per_item(isa, heads, kv_heads) == rows


@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(0, 100)), min_size=1, max_size=6),
    st.sampled_from([1, 2, 8, 32]),
    st.integers(0, 5),
)
@settings(deadline=None)
def test_runs_cover_every_row_once(requests, rows, offset):
    """Against a loop: (rows of the query, keys before them) per request."""
    lengths = [query for query, _ in requests]
    start_loc = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32) + offset
    seq_lens = torch.tensor([query + before for query, before in requests], dtype=torch.int32)
    table = torch.arange(len(requests) * 3, dtype=torch.int32).reshape(-1, 3)
    expected = []
    for index, (query, before) in enumerate(requests):
        for first in range(0, max(query, 1), rows):
            length = min(rows, query - first)
            expected.append((length, before + first + length, table[index].tolist()))
    new_start, new_lens, new_table = split_queries(start_loc, seq_lens, table, rows)
    found = list(zip((new_start[1:] - new_start[:-1]).tolist(), new_lens.tolist(), new_table.tolist(), strict=True))
    assert found == expected
    assert new_start[0] == start_loc[0]
    assert new_start[-1] == start_loc[-1]
    assert (new_start.dtype, new_lens.dtype, new_table.dtype) == (torch.int32,) * 3
    assert new_table.is_contiguous()


# --- with the host's kernel ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernel():
    pytest.importorskip("vllm", reason="the host is not installed")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("the host's CPU attention is not in this build")
    current_platform.import_kernels()
    return current_platform


def isa_of(dtype, block_size=128, dim=64):
    from vllm.v1.attention.backends import cpu_attn

    return cpu_attn._get_attn_isa(dtype, block_size, dim)


def case_of(heads, kv_heads, length, *, dtype=torch.bfloat16, dim=64, window=-1, softcap=0.0):
    isa = isa_of(dtype)
    return attention_cpu.make_case(heads, kv_heads, dim, dtype, 128, isa, window, softcap, length), isa


def reference(case):
    """float64 causal attention."""
    heads, kv_heads, dim = case["shape"]
    q, k, v = (case[name].double().transpose(0, 1) for name in ("query", "key", "value"))
    k, v = (t.repeat_interleave(heads // kv_heads, 0) for t in (k, v))
    scores = q @ k.transpose(1, 2) * dim**-0.5
    length = case["length"]
    scores.masked_fill_(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


SHAPES = [(9, 3, torch.bfloat16), (8, 2, torch.bfloat16), (4, 4, torch.float32), (8, 1, torch.float16)]


@pytest.mark.parametrize(("heads", "kv_heads", "dtype"), SHAPES)
def test_prefill_chunks_and_decode_agree(kernel, heads, kv_heads, dtype):
    length = 700
    case, isa = case_of(heads, kv_heads, length, dtype=dtype)
    rows = rows_per_item(isa, heads, kv_heads)
    whole = attention_cpu._run(case, [(0, length)], rows)
    assert (whole.double() - reference(case)).abs().max() < 20 * torch.finfo(dtype).eps
    for edges in ([0, 100, 200, 500, 700], [0, 1, 2, 3, 33, 699, 700], [*range(0, 700, 16), 700]):
        pieces = list(zip(edges[:-1], edges[1:], strict=True))
        assert first_difference(whole, attention_cpu._run(case, pieces, rows)) is None
    for row in (0, 1, 127, 128, 129, 511, 513, 699):
        assert first_difference(whole[row : row + 1], attention_cpu._run(case, [(row, row + 1)], rows)) is None


def test_without_the_cut_rows_depend_on_the_query(kernel):
    """Negative control: at 3000 keys the host's kernel gives a row of a long query other bits than alone."""
    case, isa = case_of(9, 3, 3000)
    rows = rows_per_item(isa, 9, 3)
    wanted = [*range(2000, 3000, 83)]
    alone = {row: attention_cpu._run(case, [(row, row + 1)], rows)[0] for row in wanted}
    cut = attention_cpu._run(case, [(0, 3000)], rows)
    assert all(first_difference(cut[row], alone[row]) is None for row in wanted)
    uncut = attention_cpu._run(case, [(0, 3000)], None)
    differing = [row for row in wanted if first_difference(uncut[row], alone[row]) is not None]
    assert differing, "the host's kernel keeps one order without the cut: this test cannot fail"


def certify(tmp_path, monkeypatch, length, mode="auto"):
    monkeypatch.setattr(attention_cpu, "certificate_store", lambda _: CertificateStore("digest", root=tmp_path))
    attention_cpu.certify_attention.cache_clear()
    attention_cpu.certify_attention(9, 3, 64, torch.bfloat16, 128, isa_of(torch.bfloat16), -1, 0.0, mode, length)


def test_the_certificate_is_made_kept_and_required(kernel, tmp_path, monkeypatch):
    with pytest.raises(CertificateError, match="missing"):
        certify(tmp_path, monkeypatch, 300, "require")
    certify(tmp_path, monkeypatch, 300)
    certify(tmp_path, monkeypatch, 300, "require")


def test_a_wrong_cut_is_refused(kernel, tmp_path, monkeypatch):
    """A cut that is too coarse for the kernel's registers: the certificate refuses to start."""
    monkeypatch.setattr(attention_cpu, "rows_per_item", lambda *_: 100_000)
    with pytest.raises(CertificateError, match=r"depends on how the query is cut: .*first difference at"):
        certify(tmp_path, monkeypatch, 3000)


def test_the_hosts_scheduler_never_splits_keys():
    seen = {}
    wrapped = attention_cpu._without_kv_split(lambda *args, **kwargs: seen.update(kwargs))
    wrapped(enable_kv_split=True, num_reqs=1)
    assert seen == {"enable_kv_split": False, "num_reqs": 1}
    with pytest.raises(CertificateError, match="enable_kv_split"):
        wrapped(num_reqs=1)


@pytest.mark.parametrize("mode", ["NONE", "VLLM_COMPILE"])
def test_layers_call_directly_only_where_nothing_is_compiled(monkeypatch, mode):
    """A compiled graph must keep the host's opaque operator: without it the compiler would see into the kernel."""
    config = pytest.importorskip("vllm.config", reason="the host is not installed")
    layers = {"a": SimpleNamespace(use_direct_call=False), "b": SimpleNamespace(use_direct_call=False)}
    monkeypatch.setattr(
        config, "get_layers_from_vllm_config", lambda _config, _class, names: {n: layers[n] for n in names}
    )
    compilation = SimpleNamespace(mode=config.CompilationMode[mode])
    builder = SimpleNamespace(vllm_config=SimpleNamespace(compilation_config=compilation), layer_names=["a"])
    attention_cpu._call_directly(builder)
    assert layers["a"].use_direct_call == (mode == "NONE")
    assert not layers["b"].use_direct_call


def test_the_host_has_a_direct_call():
    """The flag that is set is one the host reads, and the direct way leads to the same functions."""
    attention = pytest.importorskip(
        "vllm.model_executor.layers.attention.attention", reason="the host is not installed"
    )
    source = inspect.getsource(attention.Attention.forward)
    direct, _, operators = source.partition("if self.use_direct_call:")[2].partition("else:")
    for name in ("unified_kv_cache_update", "unified_attention_with_output"):
        assert f" {name}(" in direct
        assert f"torch.ops.vllm.{name}(" in operators
