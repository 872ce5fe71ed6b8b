"""Activation functions on the CPU, the same in eager and compiled code.

Replaces (vLLM 0.32.0) the classes of ``model_executor.layers.activation`` through the host's out-of-tree
registry.  On x86 their ``forward_cpu`` is plain PyTorch even with custom ops on: compiled code fuses it and drops
the rounding between the activation and the product, and eager code's last bit depends on where a vector loop
ends.  Here both run one opaque operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from det_plugin.config import DetConfig
from det_plugin.host.vllm.patching import resolve
from det_plugin.ops.pointwise_cpu import rowwise

MODULE = "vllm.model_executor.layers.activation"

GATED = ("SiluAndMul", "GeluAndMul", "MulAndSilu")
PLAIN = ("GELU", "GELUTanh", "NewGELU", "FastGELU", "QuickGELU", "ReLUSquaredActivation")
CERTIFIED = tuple(f"Det{name}" for name in (*GATED, *PLAIN))
"""Class names that the model audit accepts."""

_functions: list[Callable[[torch.Tensor], torch.Tensor]] = []


def _activation(x: torch.Tensor, handle: int, parts: int) -> torch.Tensor:
    return _functions[handle](x)


def _activation_fake(x: torch.Tensor, handle: int, parts: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // parts))


_library = torch.library.Library("det_plugin", "FRAGMENT")
_library.define("cpu_activation(Tensor x, int handle, int parts) -> Tensor")
_library.impl("cpu_activation", _activation, "CPU")
torch.library.register_fake("det_plugin::cpu_activation", _activation_fake, lib=_library)


def _bind(layer: Any, parts: int) -> Callable[[torch.Tensor], torch.Tensor]:
    native = layer.forward_native
    return lambda x: rowwise(native, x, parts)


def _deterministic(base: type, name: str, parts: int) -> type:
    class Deterministic(base):  # type: ignore[misc, valid-type]
        __det_plugin__ = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._det_run = _bind(self, parts)
            # layers of one class and setting share a function, so that compiled code of one layer serves all
            key = (name, repr(self))
            self._det_handle = _handles.setdefault(key, len(_functions))
            if self._det_handle == len(_functions):
                _functions.append(self._det_run)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.compiler.is_compiling():
                return torch.ops.det_plugin.cpu_activation(x, self._det_handle, parts)
            return self._det_run(x)

    Deterministic.__name__ = Deterministic.__qualname__ = f"Det{name}"
    return Deterministic


_handles: dict[tuple[str, str], int] = {}


def install(config: DetConfig) -> None:
    """Register the activation functions; idempotent.

    Raises:
        HostError: a class is gone, or another plugin replaced it.
    """
    from vllm.model_executor.custom_op import op_registry_oot

    from det_plugin.errors import HostError

    for name, parts in (*((n, 2) for n in GATED), *((n, 1) for n in PLAIN)):
        _, _, base = resolve(f"{MODULE}:{name}")
        found = op_registry_oot.get(name)
        if getattr(found, "__det_plugin__", False):
            continue
        if found is not None:
            raise HostError(f"{name} is already replaced by {found!r}; uninstall that plugin")
        base.register_oot(_deterministic(base, name, parts), name=name)
