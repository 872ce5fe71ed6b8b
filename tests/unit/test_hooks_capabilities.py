"""The capability matrix and the hooks through which it, and kernels, are extended."""

from __future__ import annotations

import pytest

from det_plugin import UnsupportedError, capabilities
from det_plugin.capabilities import Capability
from det_plugin.hooks import hookimpl, plugin_manager


@pytest.fixture
def extension():
    """Registers plugins with the process-wide manager and takes them away again."""
    manager, added = plugin_manager(), []

    def add(plugin):
        manager.register(plugin)
        added.append(plugin)

    yield add
    for plugin in added:
        manager.unregister(plugin)


def test_every_refusal_says_why_and_what_instead():
    for row in capabilities.matrix().values():
        if not row.supported:
            assert row.reason.strip(), row
            assert row.instead.strip(), row


def test_a_feature_without_a_row_is_refused():
    with pytest.raises(UnsupportedError, match="telepathy"):
        capabilities.require("cpu", "CPU_ATTN", "telepathy")


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("feature", ["speculative decoding", "LoRA", "quantization", "quantized KV cache"])
def test_refused_everywhere(platform, feature):
    with pytest.raises(UnsupportedError) as caught:
        capabilities.require(platform, "CPU_ATTN", feature, spelled="--what-they-wrote")
    assert "--what-they-wrote" in str(caught.value)
    assert "Instead:" in str(caught.value)


def test_supported_on_the_cpu():
    for feature in ("dense decoder", "chunked prefill", "prefix caching", "preemption", "eager", "torch.compile"):
        capabilities.require("cpu", "CPU_ATTN", feature)


def test_an_extension_overrides_a_row(extension):
    class Extension:
        @staticmethod
        @hookimpl
        def det_plugin_capabilities():
            return [Capability("cpu", "*", "LoRA", supported=True)]

    with pytest.raises(UnsupportedError):
        capabilities.require("cpu", "CPU_ATTN", "LoRA")
    extension(Extension())
    capabilities.require("cpu", "CPU_ATTN", "LoRA")
    with pytest.raises(UnsupportedError):
        capabilities.require("cuda", "FLASH_ATTN", "LoRA")


def test_an_extension_can_refuse_what_is_built_in(extension):
    class Extension:
        @staticmethod
        @hookimpl
        def det_plugin_capabilities():
            return [Capability("cpu", "CPU_ATTN", "preemption", False, "it was seen to fail here", "a larger cache")]

    extension(Extension())
    with pytest.raises(UnsupportedError, match=r"it was seen to fail here.*a larger cache"):
        capabilities.require("cpu", "CPU_ATTN", "preemption")


def test_built_ins_use_the_same_hooks():
    manager = plugin_manager()
    assert manager.has_plugin("det_plugin.capabilities")
    assert manager.has_plugin("det_plugin.ops.linear_cpu")


def test_unsupported_error_survives_pickling():
    import pickle

    error = UnsupportedError("a", "b", "c")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.feature, again.instead) == (str(error), "a", "c")
