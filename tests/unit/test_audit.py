"""The audit of a built model: every layer that nobody certified is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from det_plugin import UnsupportedError

pytest.importorskip("vllm", reason="the host is not installed")
audit = pytest.importorskip("det_plugin.host.vllm.audit")


@pytest.fixture(scope="module", autouse=True)
def _host():
    """vLLM layers want a current configuration."""
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


class Model(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


def refused(platform="cpu", **children):
    return {(name, kind) for name, kind, _ in audit.unproven(Model(**children), platform)}


def test_an_empty_model_passes():
    audit.check_model(Model(), "cpu")


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "layer",
    [nn.Linear(2, 2), nn.Conv1d(1, 1, 1), nn.LayerNorm(2), nn.GRU(2, 2), Gate(), nn.MultiheadAttention(2, 1)],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_of_plain_pytorch(platform, layer):
    assert ("thing", type(layer).__name__) in refused(platform, thing=layer)
    with pytest.raises(UnsupportedError, match=r"layer thing\S* of class \w+ in Model") as caught:
        audit.check_model(Model(thing=layer), platform)
    assert "Instead:" in str(caught.value)


def test_a_layer_deep_inside_is_found():
    inner = nn.ModuleList([Model(), Model(gate=nn.Linear(2, 2))])
    assert refused(layers=inner) == {("layers.1.gate", "Linear")}


def test_embeddings_pass():
    assert refused(embed=nn.Embedding(3, 2)) == set()


@pytest.mark.parametrize("function", [nn.SiLU(), nn.GELU(), nn.Tanh(), nn.Sigmoid(), nn.Softmax(dim=-1)])
def test_plain_activations_round_differently_when_compiled(function):
    assert refused(act=function) == {("act", type(function).__name__)}
    assert refused("cuda", act=function) == set()


def test_exact_activations_pass():
    assert refused(act=nn.ReLU(), other=nn.Identity()) == set()


def test_a_quantized_linear_is_refused():
    from vllm.model_executor.layers.linear import LinearBase

    layer = LinearBase.__new__(LinearBase)
    nn.Module.__init__(layer)
    layer.quant_method = object()
    assert refused(proj=layer) == {("proj", "LinearBase")}


def test_activations_of_the_host():
    """The replaced classes pass, under their new names; one that is not replaced is refused."""
    from vllm.model_executor.layers.activation import SiluAndMul, SwigluOAIAndMul

    from det_plugin.host.vllm import pointwise_cpu

    certified = pointwise_cpu._deterministic(SiluAndMul, "SiluAndMul", 2)
    assert refused(act=certified()) == set()
    assert refused(act=SiluAndMul()) == {("act", "SiluAndMul")}
    assert refused(act=SwigluOAIAndMul()) == {("act", "SwigluOAIAndMul")}


def test_rotary_embeddings():
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    class Own(RotaryEmbedding):
        def forward_cpu(self, *args):
            return self.forward_native(*args)

    Own.__module__ = "vllm.model_executor.layers.rotary_embedding.own"
    arguments = (64, 64, 32, 10000.0, True, torch.float32)
    assert refused(rotary=RotaryEmbedding(*arguments)) == set()
    assert refused(rotary=Own(*arguments)) == {("rotary", "Own")}


def test_gemma_norm_is_refused_on_the_cpu_only():
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm

    assert refused(norm=GemmaRMSNorm(8)) == {("norm", "GemmaRMSNorm")}
