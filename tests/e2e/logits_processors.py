"""Custom logits processors that the tests give to servers; imported by the server's processes."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class Repeat(AdapterLogitsProcessor):
    """Adds the extra argument ``repeat`` to the logit of the token before; may change an argmax."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        bonus = (params.extra_args or {}).get("repeat")
        if bonus is None:
            return None

        def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if output_ids:
                logits[output_ids[-1]] += bonus
            return logits

        return process


class Sharpen(AdapterLogitsProcessor):
    """Multiplies the distance to the largest logit by the extra argument ``sharpen``; changes no argmax."""

    def is_argmax_invariant(self) -> bool:
        return True

    def new_req_logits_processor(self, params: Any) -> Any:
        factor = (params.extra_args or {}).get("sharpen")
        if factor is None:
            return None

        def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            top = logits.max()
            return top + (logits - top) * factor

        return process
