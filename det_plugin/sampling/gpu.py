"""Triton version of :mod:`det_plugin.sampling.reference`: one sampling step for a batch of rows.

Contract.  Each row is decided from its own logits and parameters.  Segments of 4096 ids are a fixed cut of the
vocabulary; what they hand on is a maximum, the best (score, smallest id), or exact integer sums, so neither
the number of rows nor the split over programs can change a bit.  fp32 and bf16 logits of equal value give
equal results.

Steps.  ``_scan`` adds noise and takes each segment's best token, with no filter.  Filters keep a prefix of the
order (logit descending, id ascending), so if the best token lies in the prefix it is also the best of the
prefix: ``_mass`` adds up the weight and the number of the tokens before it, ``_decide`` accepts it or, for
that row alone, narrows the order and draws again until the token lies in the prefix.  This is the argmax over
the kept tokens, exactly; with top-p it is found at the first try with probability top_p.
"""

from __future__ import annotations

import torch

from det_plugin.ops._triton import cdiv, next_power_of_2, require_kernel_device, tl, triton
from det_plugin.sampling._kernels import GREEDY_EPS, LOG2_E, gumbel, philox_words, pick, weight
from det_plugin.sampling.noise import TARGET

SEGMENT = 4096


@triton.jit
def _load(row_ptr, token, mask):
    return tl.load(row_ptr + token, mask=mask, other=float("-inf")).to(tl.float32)


@triton.jit
def _noisy_best(row_ptr, segment, vocab, scale, position, stream, seed, noisy, x_lim, id_lim, base, floor):
    """Best (score, id) and largest logit of one segment among the tokens up to (x_lim, id_lim)."""
    lane = tl.arange(0, 1024)
    first = segment * 4096 + lane
    x0 = _load(row_ptr, first, first < vocab)
    x1 = _load(row_ptr, first + 1024, first + 1024 < vocab)
    x2 = _load(row_ptr, first + 2048, first + 2048 < vocab)
    x3 = _load(row_ptr, first + 3072, first + 3072 < vocab)
    top = tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), axis=0)
    s0, s1, s2, s3 = x0 * scale, x1 * scale, x2 * scale, x3 * scale
    if noisy:
        w0, w1, w2, w3 = philox_words(segment * 1024 + lane, position, stream, seed)
        s0 = s0 + gumbel(w0)
        s1 = s1 + gumbel(w1)
        s2 = s2 + gumbel(w2)
        s3 = s3 + gumbel(w3)
    low = float("-inf")
    s0 = tl.where(_within(x0, first, x_lim, id_lim) & (x0 * scale - base >= floor), s0, low)
    s1 = tl.where(_within(x1, first + 1024, x_lim, id_lim) & (x1 * scale - base >= floor), s1, low)
    s2 = tl.where(_within(x2, first + 2048, x_lim, id_lim) & (x2 * scale - base >= floor), s2, low)
    s3 = tl.where(_within(x3, first + 3072, x_lim, id_lim) & (x3 * scale - base >= floor), s3, low)
    token = first
    best = s0
    token = tl.where(s1 > best, first + 1024, token)
    best = tl.maximum(best, s1)
    token = tl.where(s2 > best, first + 2048, token)
    best = tl.maximum(best, s2)
    token = tl.where(s3 > best, first + 3072, token)
    best = tl.maximum(best, s3)
    score, chosen = pick(best, token)
    return score, chosen, top


@triton.jit
def _within(x, token, x_lim, id_lim):
    return (x > x_lim) | ((x == x_lim) & (token <= id_lim))


@triton.jit
def _scan_kernel(
    logits_ptr, row_stride, vocab, request_ptr, temperature_ptr, seed_ptr, pos_ptr,
    top_ptr, score_ptr, token_ptr, STREAM: tl.constexpr,
):  # fmt: skip
    """Largest logit and best noisy token of one segment of one row; no filter."""
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
    score, token, top = _noisy_best(
        row_ptr, segment, vocab, scale, position, tl.full((), STREAM, tl.int64), seed, noisy, low, 2147483647,
        0.0, low,
    )  # fmt: skip
    out = row * segments + segment
    tl.store(top_ptr + out, top)
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
def _mass_kernel(
    logits_ptr, row_stride, vocab, request_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    top_ptr, score_ptr, token_ptr, mass_ptr, out_ptr, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Weight of all tokens, weight and number of those before the best one, in one segment of one row."""
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
        limit = tl.load(row_ptr + chosen).to(tl.float32)
        token = segment * BLOCK + tl.arange(0, BLOCK)
        x = _load(row_ptr, token, token < vocab)
        d = x * scale - top * scale
        alive = (x > float("-inf")) & (d >= floor)
        before = alive & _within(x, token, limit, chosen - 1)
        out = mass_ptr + (row * segments + segment) * 3
        if need_p:
            w = tl.where(alive, weight(d * LOG2_E), 0)
            tl.store(out, tl.sum(w, axis=0))
            tl.store(out + 1, tl.sum(tl.where(before, w, 0), axis=0))
        tl.store(out + 2, tl.sum(before.to(tl.int32), axis=0).to(tl.int64))
    elif segment == 0:
        tl.store(out_ptr + row, chosen.to(tl.int64))


@triton.jit
def _target(p, total):
    exact = p.to(tl.float64) * total.to(tl.float64)
    return tl.maximum(tl.ceil(exact).to(tl.int64), 1)


@triton.jit
def _order_key(x):
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _digit(
    row_ptr, vocab, prefix, rest, scale, base, floor, SHIFT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """One step of the radix selection: the next WIDTH bits of the key, and the rank left within them."""
    count = tl.zeros((2048,), tl.int32)
    bins = tl.arange(0, 2048)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = _load(row_ptr, token, token < vocab)
        alive = (x > float("-inf")) & (x * scale - base >= floor)
        key = _order_key(x)
        if SHIFT + WIDTH < 32:
            alive = alive & ((key >> (SHIFT + WIDTH)) == prefix)
        digit = ((key >> SHIFT) & ((1 << WIDTH) - 1)).to(tl.int32)
        count += tl.histogram(digit, 2048, mask=alive)
    reach = tl.cumsum(count, axis=0, reverse=True)
    digit = tl.maximum(tl.max(tl.where(reach >= rest, bins, -1), axis=0), 0)
    rest = rest - tl.sum(tl.where(bins > digit, count, 0), axis=0)
    return (prefix << WIDTH) | digit.to(tl.uint32), rest


@triton.jit
def _top_k_limit(row_ptr, vocab, k, scale, base, floor, LEVELS: tl.constexpr, BLOCK: tl.constexpr):
    """(logit, id) of the k-th token in order, by radix selection on the bits of the logit."""
    prefix = tl.full((), 0, tl.uint32)
    prefix, rest = _digit(row_ptr, vocab, prefix, k, scale, base, floor, 21, 11, BLOCK)
    prefix, rest = _digit(row_ptr, vocab, prefix, rest, scale, base, floor, 10, 11, BLOCK)
    if LEVELS == 3:
        prefix, rest = _digit(row_ptr, vocab, prefix, rest, scale, base, floor, 0, 10, BLOCK)
    if LEVELS == 2:  # bf16 and fp16 logits: the ten low bits of the key are all equal
        prefix = (prefix << 10) | tl.where(prefix >> 21 == 1, 0, 1023).to(tl.uint32)
    bits = prefix.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits & 2147483647, ~bits)
    limit = bits.to(tl.float32, bitcast=True)
    seen = 0
    id_lim = -1
    for start in range(0, vocab, BLOCK):
        if seen < rest:
            token = start + tl.arange(0, BLOCK)
            x = _load(row_ptr, token, token < vocab)
            equal = ((x == limit) & (x * scale - base >= floor)).to(tl.int32)
            found = tl.sum(equal, axis=0)
            if found > 0:
                running = seen + tl.cumsum(equal, axis=0)
                last = tl.max(tl.where((equal > 0) & (running <= rest), token, -1), axis=0)
                id_lim = tl.maximum(id_lim, last)
            seen += found
    if limit != limit:  # noqa: PLR0124  fewer than k tokens: every digit was 0, the bits of a NaN; no limit
        limit = float("-inf")
        id_lim = 2147483647
    return limit, id_lim


@triton.jit
def _mass_before(row_ptr, vocab, scale, base, floor, x_lim, id_lim, BLOCK: tl.constexpr):
    total = tl.zeros((), tl.int64)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = _load(row_ptr, token, token < vocab)
        d = x * scale - base
        keep = (x > float("-inf")) & (d >= floor) & _within(x, token, x_lim, id_lim)
        total += tl.sum(tl.where(keep, weight(d * LOG2_E), 0), axis=0)
    return total


@triton.jit
def _decide_kernel(
    logits_ptr, row_stride, vocab, segments, request_ptr, temperature_ptr, seed_ptr, pos_ptr,
    top_k_ptr, top_p_ptr, min_p_ptr, top_ptr, score_ptr, token_ptr, mass_ptr, out_ptr,
    SEGMENTS: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr, STREAM: tl.constexpr,
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
        part = tl.arange(0, SEGMENTS)
        mass = mass_ptr + (row * segments + part) * 3
        mask = part < segments
        count = tl.sum(tl.load(mass + 2, mask=mask, other=0), axis=0)
        total = tl.zeros((), tl.int64)
        before = tl.zeros((), tl.int64)
        if need_p:
            total = tl.sum(tl.load(mass, mask=mask, other=0), axis=0)
            before = tl.sum(tl.load(mass + 1, mask=mask, other=0), axis=0)
        x = tl.load(row_ptr + chosen).to(tl.float32)
        inside = x * scale - base >= floor
        x_lim = tl.full((), float("-inf"), tl.float32)
        id_lim = tl.full((), 2147483647, tl.int32)
        if need_k:
            inside = inside & (count < k)
            if need_p | (inside == 0):
                x_lim, id_lim = _top_k_limit(row_ptr, vocab, k, scale, base, floor, LEVELS, BLOCK)
                if need_p:
                    total = _mass_before(row_ptr, vocab, scale, base, floor, x_lim, id_lim, BLOCK)
        target = tl.full((), 1, tl.int64)
        if need_p:
            target = _target(p, total)
            if inside & (before >= target):
                inside = inside & False
                x_lim = x
                id_lim = chosen - 1
        done = inside
        seed = tl.load(seed_ptr + request)
        position = tl.load(pos_ptr + row).to(tl.int64) + 1
        stream = tl.full((), STREAM, tl.int64)
        while done == 0:
            best = float("-inf")
            chosen = 2147483647
            for segment in range(0, segments):
                score, token, _top = _noisy_best(
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
    request_state = (temperature, top_k, top_p, log_min_p)
    _scan_kernel[(segments, rows)](
        logits, logits.stride(0), vocab, requests, temperature, seeds, positions, top, score, tokens,
        STREAM=stream, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    if not filtered:
        _combine_kernel[(rows,)](top, score, tokens, segments, out, SEGMENTS=padded, num_warps=1)
        return out
    mass = torch.empty((rows, segments, 3), dtype=torch.int64, device=logits.device)
    _mass_kernel[(segments, rows)](
        logits, logits.stride(0), vocab, requests, *request_state, top, score, tokens, mass, out,
        SEGMENTS=padded, BLOCK=SEGMENT, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    _decide_kernel[(rows,)](
        logits, logits.stride(0), vocab, segments, requests, temperature, seeds, positions, top_k, top_p,
        log_min_p, top, score, tokens, mass, out, SEGMENTS=padded, LEVELS=3 if logits.dtype == torch.float32 else 2,
        BLOCK=SEGMENT, STREAM=stream, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    return out
