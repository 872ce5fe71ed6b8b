"""Triton functions on the order of tokens, (logit descending, id ascending), and the k-th token in it."""

from __future__ import annotations

from det_plugin.ops._triton import tl, triton


@triton.jit
def load_logits(row_ptr, token, mask):
    return tl.load(row_ptr + token, mask=mask, other=float("-inf")).to(tl.float32)


@triton.jit
def within(x, token, x_lim, id_lim):
    return (x > x_lim) | ((x == x_lim) & (token <= id_lim))


@triton.jit
def order_key(x):
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def key_logit(key):
    bits = key.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits & 2147483647, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def kth_key(key, valid, k):
    """Largest key that at least k valid entries reach, bit by bit; 0 when fewer are valid."""
    prefix = tl.full((), 0, tl.uint32)
    bit = tl.full((), 2147483648, tl.uint32)
    for _ in range(32):
        reach = tl.sum((valid & (key >= (prefix | bit))).to(tl.int32), axis=0)
        prefix = tl.where(reach >= k, prefix | bit, prefix)
        bit = bit >> 1
    return prefix


@triton.jit
def _count_reaching(row_ptr, vocab, key1, key2, key3, scale, base, floor, BLOCK: tl.constexpr):
    n1 = tl.zeros((BLOCK,), tl.int32)
    n2 = tl.zeros((BLOCK,), tl.int32)
    n3 = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = load_logits(row_ptr, token, token < vocab)
        key = tl.where((x > float("-inf")) & (x * scale - base >= floor), order_key(x), 0)
        n1 += (key >= key1).to(tl.int32)
        n2 += (key >= key2).to(tl.int32)
        n3 += (key >= key3).to(tl.int32)
    return tl.sum(n1, axis=0), tl.sum(n2, axis=0), tl.sum(n3, axis=0)


@triton.jit
def top_k_limit(row_ptr, vocab, k, scale, base, floor, PASSES: tl.constexpr, BLOCK: tl.constexpr):
    """(logit, id) of the k-th token in order: two bits of its key in each pass over the row."""
    prefix = tl.full((), 0, tl.uint32)
    unit = tl.full((), 1073741824, tl.uint32)
    above = 0  # tokens whose key is larger than every key that starts with the prefix
    for _ in range(PASSES):
        n1, n2, n3 = _count_reaching(
            row_ptr, vocab, prefix + unit, prefix + unit * 2, prefix + unit * 3, scale, base, floor, BLOCK
        )
        digit = (n1 >= k).to(tl.int32) + (n2 >= k).to(tl.int32) + (n3 >= k).to(tl.int32)
        above = tl.where(digit == 0, n1, tl.where(digit == 1, n2, tl.where(digit == 2, n3, above)))
        prefix = prefix + unit * digit.to(tl.uint32)
        unit = unit >> 2
    if PASSES == 8:  # bf16 logits: the sixteen low bits of the key are all equal
        prefix = prefix | tl.where(prefix >> 31 == 1, 0, 65535).to(tl.uint32)
    limit = key_logit(prefix)
    rest = k - above
    seen = 0
    id_lim = -1
    for start in range(0, vocab, BLOCK):
        if seen < rest:
            token = start + tl.arange(0, BLOCK)
            x = load_logits(row_ptr, token, token < vocab)
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
