"""Triton version of :mod:`det_plugin.sampling.reference`: one sampling step for a batch of rows.

Contract.  Each row is decided from its own logits and parameters.  Segments of 4096 ids are a fixed cut of the
vocabulary; what they hand on is a maximum, the best (score, smallest id), or exact integer sums, so neither
the number of rows nor the split over programs can change a bit.  fp32 and bf16 logits of equal value give
equal results.

Steps.  ``_scan`` adds noise and takes each segment's best token, with no filter.  Filters keep a prefix of the
order (logit descending, id ascending), so if the best token lies in the prefix it is also the best of the
prefix: ``_mass`` adds up the weight and the number of the tokens before it, ``_decide`` accepts it or, for
that row alone, narrows the order and draws again until the token lies in the prefix.  This is the argmax over
the kept tokens, exactly; with top-p it is found at the first try with probability top_p.  With top-k,
``_bound`` finds a logit that at least k tokens reach, ``_mass`` lists the tokens that reach it (k and a few
more), and ``_decide`` works on the list.
"""

from __future__ import annotations

import torch

from det_plugin.ops._triton import (
    cdiv,
    forms,
    launch,
    next_power_of_2,
    require_kernel_device,
    tl,
    triton,
)
from det_plugin.sampling._kernels import GREEDY_EPS, LOG2_E, gumbel, philox_words, pick, weight
from det_plugin.sampling._order import key_logit, kth_key, load_logits, order_key, top_k_limit, within
from det_plugin.sampling.noise import TARGET

SEGMENT = 4096
CAP = 64
"""Top-k candidates of one segment that are kept in a list; rows with more take passes over the row instead."""


@triton.jit
def _noisy_best(row_ptr, segment, vocab, scale, position, stream, seed, noisy, x_lim, id_lim, base, floor):
    """Best (score, id) of one segment among the tokens up to (x_lim, id_lim); maxima of four logits [1024]."""
    lane = tl.arange(0, 1024)
    first = segment * 4096 + lane
    x0 = load_logits(row_ptr, first, first < vocab)
    x1 = load_logits(row_ptr, first + 1024, first + 1024 < vocab)
    x2 = load_logits(row_ptr, first + 2048, first + 2048 < vocab)
    x3 = load_logits(row_ptr, first + 3072, first + 3072 < vocab)
    lane_top = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
    s0, s1, s2, s3 = x0 * scale, x1 * scale, x2 * scale, x3 * scale
    if noisy:
        w0, w1, w2, w3 = philox_words(segment * 1024 + lane, position, stream, seed)
        s0 = s0 + gumbel(w0)
        s1 = s1 + gumbel(w1)
        s2 = s2 + gumbel(w2)
        s3 = s3 + gumbel(w3)
    low = float("-inf")
    s0 = tl.where(within(x0, first, x_lim, id_lim) & (x0 * scale - base >= floor), s0, low)
    s1 = tl.where(within(x1, first + 1024, x_lim, id_lim) & (x1 * scale - base >= floor), s1, low)
    s2 = tl.where(within(x2, first + 2048, x_lim, id_lim) & (x2 * scale - base >= floor), s2, low)
    s3 = tl.where(within(x3, first + 3072, x_lim, id_lim) & (x3 * scale - base >= floor), s3, low)
    token = first
    best = s0
    token = tl.where(s1 > best, first + 1024, token)
    best = tl.maximum(best, s1)
    token = tl.where(s2 > best, first + 2048, token)
    best = tl.maximum(best, s2)
    token = tl.where(s3 > best, first + 3072, token)
    best = tl.maximum(best, s3)
    score, chosen = pick(best, token)
    return score, chosen, lane_top


@triton.jit
def _scan_kernel(
    logits_ptr, row_stride, vocab, request_ptr, temperature_ptr, seed_ptr, pos_ptr,
    top_ptr, score_ptr, token_ptr, sub_ptr, STREAM: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Largest logit, largest of each 128 logits, best noisy token of one segment of one row; no filter."""
    segment = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    segments = tl.num_programs(0)
    request = tl.load(request_ptr + row)
    temperature = tl.load(temperature_ptr + request)
    noisy = temperature >= GREEDY_EPS
    scale = tl.div_rn(1.0, tl.where(noisy, temperature, 1.0))
    seed = tl.load(seed_ptr + request)
    position = tl.load(pos_ptr + row).to(tl.int64) + 1
    row_ptr = logits_ptr + row * row_stride
    low = float("-inf")
    score, token, lane_top = _noisy_best(
        row_ptr, segment, vocab, scale, position, tl.full((), STREAM, tl.int64), seed, noisy, low, 2147483647,
        0.0, low,
    )  # fmt: skip
    out = row * segments + segment
    if SUB:
        sub = tl.max(tl.reshape(lane_top, (32, 32)), axis=1)
        tl.store(sub_ptr + out * 32 + tl.arange(0, 32), sub)
    tl.store(top_ptr + out, tl.max(lane_top, axis=0))
    tl.store(score_ptr + out, score)
    tl.store(token_ptr + out, token)


@triton.jit
def _gather_segments(top_ptr, score_ptr, token_ptr, row, segments, SEGMENTS: tl.constexpr):
    part = tl.arange(0, SEGMENTS)
    mask = part < segments
    base = row * segments + part
    top = tl.max(tl.load(top_ptr + base, mask=mask, other=float("-inf")), axis=0)
    score = tl.load(score_ptr + base, mask=mask, other=float("-inf"))
    token = tl.load(token_ptr + base, mask=mask, other=2147483647)
    best, chosen = pick(score, token)
    return top, best, chosen


@triton.jit
def _row_filters(request, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab):
    """(scale, needs a filter, k, p, floor of the scaled logit below the maximum) of a request."""
    temperature = tl.load(temperature_ptr + request)
    k = tl.load(top_k_ptr + request)
    p = tl.load(top_p_ptr + request)
    floor = tl.load(min_p_ptr + request)
    noisy = temperature >= GREEDY_EPS
    need_k = noisy & (k > 0) & (k < vocab)
    need_p = noisy & (p < 1.0)
    need_floor = noisy & (floor > float("-inf"))
    scale = tl.div_rn(1.0, tl.where(noisy, temperature, 1.0))
    return scale, need_k, need_p, need_floor, k, p, floor


@triton.jit
def _bound_kernel(sub_ptr, vocab, segments, request_ptr, temperature_ptr, top_k_ptr, bound_ptr, SUBS: tl.constexpr):
    """A logit that at least k tokens reach: the k-th largest of the maxima of 128 logits each."""
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(request_ptr + row)
    k = tl.load(top_k_ptr + request)
    if (k > 0) & (k < vocab) & (tl.load(temperature_ptr + request) >= GREEDY_EPS):
        part = tl.arange(0, SUBS)
        valid = part < segments * 32
        sub = tl.load(sub_ptr + row * segments * 32 + part, mask=valid, other=float("-inf"))
        key = kth_key(order_key(sub), valid, k)
        tl.store(bound_ptr + row, tl.where(key == 0, float("-inf"), key_logit(key)))


@triton.jit
def _mass_kernel(
    logits_ptr, row_stride, vocab, request_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    top_ptr, score_ptr, token_ptr, mass_ptr, bound_ptr, list_logit_ptr, list_token_ptr, out_ptr,
    SEGMENTS: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """One segment of one row: weight of all tokens and of those before the best one; with top-k instead the
    tokens that reach the row's bound."""
    segment = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    segments = tl.num_programs(0)
    request = tl.load(request_ptr + row)
    scale, need_k, need_p, need_floor, _k, _p, floor = _row_filters(
        request, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab
    )
    top, _best, chosen = _gather_segments(top_ptr, score_ptr, token_ptr, row, segments, SEGMENTS)
    finite = (top > float("-inf")) & (top < float("inf"))
    if (need_k | need_p | need_floor) & finite:
        row_ptr = logits_ptr + row * row_stride
        token = segment * BLOCK + tl.arange(0, BLOCK)
        out = mass_ptr + (row * segments + segment) * 2
        if need_k:
            if tl.load(top_ptr + row * segments + segment) >= tl.load(bound_ptr + row):
                x = load_logits(row_ptr, token, token < vocab)
                member = (x > float("-inf")) & (x >= tl.load(bound_ptr + row))
                place = tl.cumsum(member.to(tl.int32), axis=0) - 1
                slot = (row * segments + segment) * CAP + place
                tl.store(list_logit_ptr + slot, x, mask=member & (place < CAP))
                tl.store(list_token_ptr + slot, token, mask=member & (place < CAP))
                tl.store(out, tl.sum(member.to(tl.int32), axis=0).to(tl.int64))
            else:
                tl.store(out, tl.full((), 0, tl.int64))
        elif need_p:
            limit = tl.load(row_ptr + chosen).to(tl.float32)
            x = load_logits(row_ptr, token, token < vocab)
            d = x * scale - top * scale
            alive = (x > float("-inf")) & (d >= floor)
            before = alive & within(x, token, limit, chosen - 1)
            w = tl.where(alive, weight(d * LOG2_E), 0)
            tl.store(out, tl.sum(w, axis=0))
            tl.store(out + 1, tl.sum(tl.where(before, w, 0), axis=0))
    elif segment == 0:
        tl.store(out_ptr + row, chosen.to(tl.int64))


@triton.jit
def _target(p, total):
    exact = p.to(tl.float64) * total.to(tl.float64)
    return tl.maximum(tl.ceil(exact).to(tl.int64), 1)


@triton.jit
def _mass_before(row_ptr, vocab, scale, base, floor, x_lim, id_lim, BLOCK: tl.constexpr):
    total = tl.zeros((), tl.int64)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = load_logits(row_ptr, token, token < vocab)
        d = x * scale - base
        keep = (x > float("-inf")) & (d >= floor) & within(x, token, x_lim, id_lim)
        total += tl.sum(tl.where(keep, weight(d * LOG2_E), 0), axis=0)
    return total


@triton.jit
def _sample_list(
    slots, valid, list_logit_ptr, list_token_ptr, scale, base, floor, k, need_p, p, seed, position, stream
):
    """Sampled id of a row with top-k whose candidates fit the list: everything in registers."""
    x = tl.load(list_logit_ptr + slots, mask=valid, other=float("-inf"))
    token = tl.load(list_token_ptr + slots, mask=valid, other=0)
    keep = valid & (x * scale - base >= floor)
    key = order_key(x)
    kth = kth_key(key, keep, k)
    if kth != 0:
        rest = k - tl.sum((keep & (key > kth)).to(tl.int32), axis=0)
        tie = keep & (key == kth)
        id_lim = 0
        bit = 1 << 24
        for _ in range(25):
            fewer = tl.sum((tie & (token < id_lim + bit)).to(tl.int32), axis=0) < rest
            id_lim = tl.where(fewer, id_lim + bit, id_lim)
            bit = bit >> 1
        keep = keep & ((key > kth) | (tie & (token <= id_lim)))
    group = (token >> 12) << 10 | (token & 1023)
    word = (token >> 10) & 3
    w0, w1, w2, w3 = philox_words(group, position, stream, seed)
    bits = tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))
    score = x * scale + gumbel(bits)
    _best, chosen = pick(tl.where(keep, score, float("-inf")), tl.where(keep, token, 2147483647))
    if need_p:
        w = tl.where(keep, weight((x * scale - base) * LOG2_E), 0)
        target = _target(p, tl.sum(w, axis=0))
        done = target < 0
        while done == 0:
            own = tl.max(tl.where(keep & (token == chosen), x, float("-inf")), axis=0)
            before = keep & within(x, token, own, chosen - 1)
            done = tl.sum(tl.where(before, w, 0), axis=0) < target
            if done == 0:
                keep = before
                _best, chosen = pick(tl.where(keep, score, float("-inf")), tl.where(keep, token, 2147483647))
    return chosen


@triton.jit
def _decide_kernel(
    logits_ptr, row_stride, vocab, segments, request_ptr, temperature_ptr, seed_ptr, pos_ptr,
    top_k_ptr, top_p_ptr, min_p_ptr, top_ptr, score_ptr, token_ptr, mass_ptr, list_logit_ptr, list_token_ptr,
    out_ptr, SEGMENTS: tl.constexpr, PASSES: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr,
    STREAM: tl.constexpr,
):  # fmt: skip
    """Accept the best token of one row, or draw again among the tokens before it."""
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(request_ptr + row)
    scale, need_k, need_p, need_floor, k, p, floor = _row_filters(
        request, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab
    )
    top, _best, chosen = _gather_segments(top_ptr, score_ptr, token_ptr, row, segments, SEGMENTS)
    finite = (top > float("-inf")) & (top < float("inf"))
    if (need_k | need_p | need_floor) & finite:
        row_ptr = logits_ptr + row * row_stride
        base = top * scale
        seed = tl.load(seed_ptr + request)
        position = tl.load(pos_ptr + row).to(tl.int64) + 1
        stream = tl.full((), STREAM, tl.int64)
        part = tl.arange(0, SEGMENTS)
        mass = mass_ptr + (row * segments + part) * 2
        sums = tl.load(mass, mask=part < segments, other=0)
        x_lim = tl.full((), float("-inf"), tl.float32)
        id_lim = tl.full((), 2147483647, tl.int32)
        target = tl.full((), 1, tl.int64)
        done = need_k & (tl.max(sums, axis=0) <= CAP)
        if done:
            slot = tl.arange(0, SEGMENTS * CAP)
            of = slot // CAP
            held = tl.load(mass_ptr + (row * segments + of) * 2, mask=of < segments, other=0)
            chosen = _sample_list(
                row * segments * CAP + slot, slot % CAP < held, list_logit_ptr, list_token_ptr, scale, base, floor,
                k, need_p, p, seed, position, stream,
            )  # fmt: skip
        elif need_k:
            x_lim, id_lim = top_k_limit(row_ptr, vocab, k, scale, base, floor, PASSES, BLOCK)
            if need_p:
                target = _target(p, _mass_before(row_ptr, vocab, scale, base, floor, x_lim, id_lim, BLOCK))
        else:
            x = tl.load(row_ptr + chosen).to(tl.float32)
            done = x * scale - base >= floor
            if need_p:
                target = _target(p, tl.sum(sums, axis=0))
                before = tl.sum(tl.load(mass + 1, mask=part < segments, other=0), axis=0)
                if done & (before >= target):
                    done = done & False
                    x_lim = x
                    id_lim = chosen - 1
        while done == 0:
            best = float("-inf")
            chosen = 2147483647
            for segment in range(0, segments):
                score, token, _lane_top = _noisy_best(
                    row_ptr, segment, vocab, scale, position, stream, seed, True, x_lim, id_lim, base, floor
                )
                better = (score > best) | ((score == best) & (token < chosen))
                chosen = tl.where(better, token, chosen)
                best = tl.where(better, score, best)
            done = done | True
            if need_p:
                x = tl.load(row_ptr + chosen).to(tl.float32)
                if _mass_before(row_ptr, vocab, scale, base, floor, x, chosen - 1, BLOCK) >= target:
                    done = done & False
                    x_lim = x
                    id_lim = chosen - 1
        tl.store(out_ptr + row, chosen.to(tl.int64))


@triton.jit
def _combine_kernel(top_ptr, score_ptr, token_ptr, segments, out_ptr, SEGMENTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _top, _best, chosen = _gather_segments(top_ptr, score_ptr, token_ptr, row, segments, SEGMENTS)
    tl.store(out_ptr + row, chosen.to(tl.int64))


def sample(
    logits: torch.Tensor,
    requests: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor,
    filtered: bool = True,
    with_top_k: bool = True,
    stream: int = TARGET,
) -> torch.Tensor:
    """Sample one token a row.

    Args:
        logits: float32, bfloat16 or float16 [R, V], unit column stride; not modified.
        requests: integer [R], each row's index into the per-request arrays.
        positions: integer [R], index of each row's *last input* token; the sampled token's is one more.
        temperature: float32 [N]; below 1e-5 means greedy.
        seeds: int64 [N].
        top_k: int32 [N]; 0 or less, or V or more: off.
        top_p: float32 [N]; 1 or more: off.
        log_min_p: float32 [N], ``fp32(ln(min_p))``; minus infinity: off.
        filtered: False when no row has a filter; saves two launches, changes no bit.
        with_top_k: False when no row has top-k; saves one launch, changes no bit.
        stream: noise stream.

    Returns:
        int64 [R]; equal, bit for bit, to :func:`det_plugin.sampling.reference.sample_reference` on each row.

    Raises:
        ValueError: shape, stride or dtype.
    """
    if logits.ndim != 2 or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise ValueError(
            f"logits: expected [R, V] with unit column stride, got {tuple(logits.shape)} {logits.stride()}"
        )
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"logits: expected float32, bfloat16 or float16, got {logits.dtype}")
    require_kernel_device(logits)
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    segments = cdiv(vocab, SEGMENT)
    padded = next_power_of_2(segments)
    stats = torch.empty((2, rows, segments), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((rows, segments), dtype=torch.int32, device=logits.device)
    top, score = stats[0], stats[1]
    requests, positions = requests.contiguous(), positions.contiguous()
    state = (requests, temperature, top_k, top_p, log_min_p)
    has_k = filtered and with_top_k
    sub = torch.empty((rows, segments, 32) if has_k else (1,), dtype=torch.float32, device=logits.device)
    exact = {"enable_fp_fusion": False}
    read = (logits, requests, positions, temperature, seeds, top_k, top_p, log_min_p, score)
    key = (logits.stride(0), vocab, forms(*read))
    launch(
        _scan_kernel, key, (segments, rows, 1),
        (logits, logits.stride(0), vocab, requests, temperature, seeds, positions, top, score, tokens, sub),
        (stream, has_k), num_warps=4, **exact,
    )  # fmt: skip
    if not filtered:
        arguments = (top, score, tokens, segments, out)
        launch(_combine_kernel, key, (rows, 1, 1), arguments, (padded,), num_warps=1)
        return out
    mass = torch.empty((rows, segments, 2), dtype=torch.int64, device=logits.device)
    bound = torch.empty(rows, dtype=torch.float32, device=logits.device)
    members = (rows, segments, CAP) if has_k else (1,)
    list_logit = torch.empty(members, dtype=torch.float32, device=logits.device)
    list_token = torch.empty(members, dtype=torch.int32, device=logits.device)
    if has_k:
        launch(
            _bound_kernel, key, (rows, 1, 1),
            (sub, vocab, segments, requests, temperature, top_k, bound), (padded * 32,), num_warps=8, **exact,
        )  # fmt: skip
    launch(
        _mass_kernel, key, (segments, rows, 1),
        (
            logits, logits.stride(0), vocab, *state, top, score, tokens, mass, bound, list_logit, list_token, out,
        ),
        (padded, SEGMENT, CAP), num_warps=8, **exact,
    )  # fmt: skip
    launch(
        _decide_kernel, key, (rows, 1, 1),
        (
            logits, logits.stride(0), vocab, segments, requests, temperature, seeds, positions, top_k, top_p,
            log_min_p, top, score, tokens, mass, list_logit, list_token, out,
        ),
        (padded, 8 if logits.dtype == torch.bfloat16 else 16, SEGMENT, CAP, stream), num_warps=16, **exact,
    )  # fmt: skip
    return out
