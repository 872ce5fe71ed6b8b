"""Filters as masked logits in plain torch, for the modes that return what filtering left.

Contract.  As in :mod:`det_plugin.sampling.reference`, bit for bit: elementwise fp32 operations, a stable sort,
and a cumulative sum of integers.  Slower than the fused step (it sorts), used where processed logprobs or
sampling masks are asked for.
"""

from __future__ import annotations

import torch

from det_plugin.sampling.noise import EXP2_COEFFS, LOG2_E
from det_plugin.sampling.reference import GREEDY_EPS


def fixed_weights(x: torch.Tensor) -> torch.Tensor:
    """2**x for float32 x <= 0 as int64 with 40 fraction bits; see :func:`det_plugin.sampling.noise.exp2_fixed`."""
    live = x > -64
    x = torch.where(live, x, torch.zeros_like(x))
    i = torch.floor(x)
    f = x - i
    acc = torch.full_like(f, EXP2_COEFFS[-1])
    for c in EXP2_COEFFS[-2::-1]:
        acc = acc * f
        acc = acc + c
    acc = acc * f
    mantissa = ((acc + 1.0) * 2.0**23).to(torch.int64)
    shift = (-i).clamp(max=63).to(torch.int64)
    return torch.where(live, (mantissa << 17) >> shift, torch.zeros_like(mantissa))


def masked_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor,
) -> torch.Tensor:
    """Scaled logits of the kept tokens, minus infinity elsewhere; greedy rows unchanged.

    Args:
        logits: float [R, V].
        temperature: float32 [R]; below 1e-5 is greedy.
        top_k: int [R]; 0 or less, or V or more: off.
        top_p: float32 [R]; 1 or more: off.
        log_min_p: float32 [R]; minus infinity: off.

    Returns:
        float32 [R, V].
    """
    x = logits.float() + 0.0
    vocab = x.shape[1]
    greedy = temperature < GREEDY_EPS
    one = torch.ones_like(temperature)
    scale = torch.where(greedy, one, one / torch.where(greedy, one, temperature))[:, None]
    scaled = x * scale
    top = x.amax(-1, keepdim=True)
    d = scaled - top * scale
    alive = (x > -torch.inf) & (d >= log_min_p[:, None])
    values, order = torch.sort(torch.where(alive, x, -torch.inf), dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=x.device)[None]
    k = torch.where((top_k > 0) & (top_k < vocab), top_k.to(torch.int64), vocab)[:, None]
    keep = (rank < k) & (values > -torch.inf)
    weights = fixed_weights((values * scale - top * scale) * LOG2_E)
    weights = torch.where(keep, weights, torch.zeros_like(weights))
    reach = weights.cumsum(-1)
    target = torch.ceil(top_p.double()[:, None] * reach[:, -1:].double()).to(torch.int64).clamp(min=1)
    keep &= (top_p >= 1)[:, None] | (reach - weights < target)
    mask = torch.zeros_like(keep).scatter(1, order, keep)
    finite = torch.isfinite(top)
    free = greedy[:, None] | ~finite
    return torch.where(free, x, torch.where(mask, scaled, -torch.inf))
