"""Published rules that derive one sequence's seed from what a request gives.

    seed of choice 0        the request's seed
    seed of choice i >= 1   low 63 bits of words 1, 0 of Philox4x32-10(counter = (i, 0, CHOICE, 0), key = seed)
    noise_scope "prompt"    first, seed := low 63 bits of words 1, 0 of
                            Philox4x32-10(counter = (h & 0xFFFFFFFF, h >> 32, PROMPT, 0), key = seed), where h is
                            the 8-byte BLAKE2b digest (little endian) of the prompt's ids as little-endian int64

Choice i is therefore the same whether n is 4 or 16, and choice 0 is the answer for n = 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from det_plugin.sampling.noise import CHOICE, PROMPT, philox4x32, split_seed

SEED_MAX = 2**63 - 1


def _derive(seed: int, low: int, high: int, stream: int) -> int:
    words = philox4x32(np.array([low, high, stream, 0], dtype=np.uint32), split_seed(seed))
    return (int(words[1]) << 32 | int(words[0])) & SEED_MAX


def choice_seed(seed: int, index: int) -> int:
    """Seed of choice ``index`` (0 to 2**32 - 1) of a request with ``n`` > 1."""
    return seed if index == 0 else _derive(seed, index, 0, CHOICE)


def prompt_seed(seed: int, prompt_token_ids: Sequence[int]) -> int:
    """Seed with a hash of the prompt mixed in (``noise_scope`` "prompt")."""
    data = np.asarray(prompt_token_ids, dtype="<i8").tobytes()
    h = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    return _derive(seed, h & 0xFFFFFFFF, h >> 32, PROMPT)


def check_seed(value: object, name: str) -> int:
    """An explicit seed, checked.

    Raises:
        ValueError: not an integer from 0 to 2**63 - 1; the message names ``name``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= SEED_MAX:
        raise ValueError(f"{name}: got {value!r}, accepts an integer from 0 to {SEED_MAX}")
    return value
