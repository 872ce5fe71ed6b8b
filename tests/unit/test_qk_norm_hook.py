"""The fused query/key norm and rotary embedding in the host's Qwen3 layer: same bytes, and only where certified."""

from __future__ import annotations

import types

import pytest
import torch

from det_plugin.ops import _custom_ops, qk_norm_rope

HEADS, KV_HEADS, SIZE, EPS = 4, 2, 32, 1e-6


class Norm(torch.nn.Module):
    variance_epsilon = EPS

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(1 + 0.2 * torch.randn(SIZE))

    def forward(self, x):
        return torch.ops.det_plugin.rms_norm(x, self.weight.data, EPS)


class Layer:
    """What ``Qwen3Attention.forward`` uses of itself; the rotary embedding fuses the first product."""

    def __init__(self, contraction):
        torch.manual_seed(0)
        self.num_heads, self.num_kv_heads, self.head_dim = HEADS, KV_HEADS, SIZE
        self.q_size, self.kv_size = HEADS * SIZE, KV_HEADS * SIZE
        self.q_norm, self.k_norm = Norm(), Norm()
        angles = torch.arange(64)[:, None] * 100.0 ** (-torch.arange(SIZE // 2) * 2 / SIZE)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
        weight = torch.randn(48, (HEADS + 2 * KV_HEADS) * SIZE)
        self.qkv_proj = lambda x: (x @ weight, None)
        self.o_proj = lambda x: (x, None)
        self.attn = lambda q, k, v: torch.cat([q, k, v], dim=-1)
        self.rotary_emb = Rotary(self.cos_sin)
        self.det_plugin_contraction = contraction


class Rotary:
    def __init__(self, cos_sin):
        self.cos_sin = cos_sin

    def _match_cos_sin_cache_dtype(self, _query):
        return self.cos_sin

    def __call__(self, positions, *parts):
        cos, sin = (part[:, None] for part in self.cos_sin[positions].chunk(2, dim=-1))
        return [
            torch.cat(
                qk_norm_rope.rotate_reference(*x.view(len(x), -1, SIZE).chunk(2, dim=-1), cos, sin, "first"), dim=-1
            ).flatten(1)
            for x in parts
        ]


@pytest.fixture
def forward():
    pytest.importorskip("vllm")
    from vllm.model_executor.models.qwen3 import Qwen3Attention

    from det_plugin.host.vllm import qk_norm_cuda

    assert _custom_ops.NAMESPACE
    original = Qwen3Attention.forward
    return original, qk_norm_cuda._with_fused_kernel(original)


def run(forward, contraction):
    layer = Layer(contraction)
    positions = torch.randint(64, (21,), generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(21, 48, generator=torch.Generator().manual_seed(2))
    return forward(layer, positions, hidden).numpy().tobytes()


def test_the_fused_layer_has_the_bytes_of_the_hosts(forward):
    original, fused = forward
    assert run(fused, "first") == run(original, None)


def test_another_contraction_is_seen(forward):
    """Negative control."""
    original, fused = forward
    assert run(fused, "none") != run(original, None)


@pytest.mark.usefixtures("forward")
def test_without_a_certificate_the_hosts_own_layer_runs():
    from det_plugin.host.vllm import qk_norm_cuda

    seen = []
    wrapped = qk_norm_cuda._with_fused_kernel(lambda *arguments: seen.append(arguments))
    wrapped(types.SimpleNamespace(det_plugin_contraction=None), "positions", "hidden")
    assert len(seen) == 1


def test_the_certificate_compares_the_layers_own_operators(forward, monkeypatch):
    """On the CPU, with the reference in the kernel's place: the data reaches every head and position."""
    from det_plugin.host.vllm import qk_norm_cuda

    monkeypatch.setattr(qk_norm_rope, "qk_norm_rope_kernel", qk_norm_rope.qk_norm_rope_reference)
    layer = Layer(None)
    data = qk_norm_cuda.certification_data(layer, EPS)
    assert data[0].shape == (qk_norm_cuda.TOKENS, (HEADS + 2 * KV_HEADS) * SIZE)
    assert data[1].unique().numel() == 64
    apart = qk_norm_cuda._apart(layer)
    assert qk_norm_rope.find_contraction(apart, *data) == "first"
    assert qk_norm_cuda.contraction_of(layer) is None  # no GPU


def test_a_layer_that_is_not_covered_keeps_its_operators_and_says_so(forward, monkeypatch, caplog):
    from det_plugin.host.vllm import qk_norm_cuda

    weight = types.SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    norm = types.SimpleNamespace(weight=weight, variance_epsilon=EPS)
    layer = Layer(None)
    layer.q_norm = layer.k_norm = norm
    monkeypatch.setattr(qk_norm_cuda.logger, "propagate", True)
    monkeypatch.setattr(qk_norm_cuda, "_found", {})
    with caplog.at_level("INFO", logger="vllm.det_plugin"):
        assert qk_norm_cuda.contraction_of(layer) is None
        assert qk_norm_cuda.contraction_of(layer) is None
    assert [record.getMessage() for record in caplog.records if "stay apart" in record.getMessage()] == [
        "det_plugin: query/key norms and rotary embedding stay apart: "
        "the fused kernel doesn't cover Rotary in torch.bfloat16"
    ]


def rotary(**change):
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    made = RotaryEmbedding.__new__(change.pop("kind", RotaryEmbedding))
    values = dict(is_neox_style=True, rotary_dim=64, head_size=64, use_flashinfer=False, use_aiter=False)
    made.__dict__.update(values | change)
    return made


def test_only_plain_rotary_embeddings_are_fused():
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.layers.rotary_embedding.fope import FourierRotaryEmbedding
    from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

    from det_plugin.host.vllm.qk_norm_cuda import _plain

    class Own(RotaryEmbedding):
        def forward_cuda(self, positions, query, key=None):
            raise NotImplementedError

    assert _plain(rotary())
    assert not _plain(rotary(is_neox_style=False))
    assert not _plain(rotary(rotary_dim=32))
    assert not _plain(rotary(use_flashinfer=True))
    assert not _plain(rotary(kind=Own))
    assert not _plain(MRotaryEmbedding.__new__(MRotaryEmbedding))
    assert not _plain(rotary(kind=FourierRotaryEmbedding))
