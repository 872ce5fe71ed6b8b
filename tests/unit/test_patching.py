"""Replacing symbols of the host: missing targets raise, twice is once, kinds of functions survive."""

from __future__ import annotations

import sys
import types

import pytest

from det_plugin import HostError
from det_plugin.host.vllm import patching


@pytest.fixture
def host(monkeypatch):
    """A stand-in module with one class."""
    module = types.ModuleType("stand_in_host")

    class Base:
        def inherited(self):
            return "inherited"

    class Thing(Base):
        value = 3

        def method(self, x):
            """Adds one."""
            return x + 1

        @staticmethod
        def static(x):
            return x + 1

        @classmethod
        def bound(cls, x):
            return cls.__name__, x

    module.Thing = Thing
    module.function = lambda x: x + 1
    monkeypatch.setitem(sys.modules, "stand_in_host", module)
    monkeypatch.setattr(patching, "host_version", lambda: "0.32.0")
    return module


def doubled(original):
    return lambda *args: (original(*args), original(*args))


def test_function_and_method(host):
    patching.wrap("stand_in_host:function", doubled)
    patching.wrap("stand_in_host:Thing.method", doubled)
    assert host.function(1) == (2, 2)
    assert host.Thing().method(1) == (2, 2)
    assert host.Thing.method.__doc__ == "Adds one."


def test_static_and_class_methods_stay_what_they_are(host):
    patching.wrap("stand_in_host:Thing.static", doubled)
    patching.wrap("stand_in_host:Thing.bound", doubled)
    assert host.Thing.static(1) == host.Thing().static(1) == (2, 2)

    class Child(host.Thing):
        pass

    assert Child.bound(1) == Child().bound(1) == (("Child", 1), ("Child", 1))


@pytest.mark.parametrize("target", ["function", "Thing.method", "Thing.static", "Thing.bound"])
def test_twice_is_once(host, target):
    patching.wrap(f"stand_in_host:{target}", doubled)
    owner = host.Thing if "." in target else host
    first = vars(owner)[target.rpartition(".")[2]]
    patching.wrap(f"stand_in_host:{target}", doubled)
    assert vars(owner)[target.rpartition(".")[2]] is first


@pytest.mark.parametrize(
    "target", ["stand_in_host:gone", "stand_in_host:Thing.gone", "stand_in_host:Gone.x", "no_such_module_xyz:f"]
)
def test_missing_target(host, target):
    with pytest.raises(HostError, match="has no"):
        patching.wrap(target, doubled)
    with pytest.raises(HostError, match="has no"):
        patching.replace(target, None)


def test_inherited_target(host):
    with pytest.raises(HostError, match="inherited"):
        patching.wrap("stand_in_host:Thing.inherited", doubled)


def test_replace(host):
    patching.replace("stand_in_host:Thing.value", 4)
    patching.replace("stand_in_host:Thing.value", 4)
    assert host.Thing.value == 4


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.32.3.post1", "0.32.0rc1"])
def test_supported_versions(monkeypatch, version):
    monkeypatch.setattr(patching, "host_version", lambda: version)
    patching.check_host_version()


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.32.0", "0.3.2", "dev", "", "0.0.0"])
def test_other_versions(monkeypatch, version):
    monkeypatch.setattr(patching, "host_version", lambda: version)
    with pytest.raises(HostError, match=r"supports vLLM >=0\.32,<0\.33"):
        patching.check_host_version()
