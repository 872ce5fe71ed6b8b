"""All-reduce between CPU ranks in rank order, whatever the message size.

Replaces (vLLM 0.32.0) ``CpuCommunicator.all_reduce``: the shards are gathered, then added
in fp32 from rank 0 upwards and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch

from det_plugin.config import DetConfig
from det_plugin.host.vllm.patching import resolve, wrap

COMMUNICATOR = "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator"


def ordered_sum(parts: torch.Tensor) -> torch.Tensor:
    """Sum over the first dimension (ranks) in order, in fp32 (float64 stays), rounded once to the dtype."""
    wide = torch.float64 if parts.dtype == torch.float64 else torch.float32
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


def install(config: DetConfig) -> None:
    """Fix the order of reductions between ranks; idempotent."""
    resolve(f"{COMMUNICATOR}.all_gather")

    def make(original: Any) -> Any:
        def all_reduce(self: Any, input_: torch.Tensor) -> torch.Tensor:
            if not input_.is_floating_point():
                return original(self, input_)
            gathered = input_.new_empty((self.world_size * input_.numel(),))
            self.dist_module.all_gather_into_tensor(gathered, input_.contiguous().view(-1), group=self.device_group)
            input_.copy_(ordered_sum(gathered.view(self.world_size, -1)).view_as(input_))
            return input_

        return all_reduce

    wrap(f"{COMMUNICATOR}.all_reduce", make)
