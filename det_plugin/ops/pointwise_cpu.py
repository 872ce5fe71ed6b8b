"""Activation functions on a CPU: the same bits for an element whatever the number of rows.

Contract
    ``y[r] = f(x[r])`` for each row; an element's bits depend on its value, on the function, the dtype and the
    machine.  Gated functions take a row of two halves.
Why it needs care
    PyTorch's vectorised loops finish a stretch that is no multiple of the vector length with scalar code, whose
    exponential may differ in the last bit.  Where stretches end depends on the number of rows and on how threads
    share them.  So every stretch is made a multiple of the vector length: rows are padded to one, and several
    threads get a number of rows that they can share equally (PyTorch cuts a long tensor into as many equal stretches as
    there are threads); what is left over is handed over in pieces too small to be cut.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

VECTOR = 128
"""Elements: a multiple of every vector loop's step (AVX-512 takes two vectors of 32 16-bit numbers at a time)."""

SERIAL = 32768
"""Elements that PyTorch leaves to a single thread (``at::internal::GRAIN_SIZE``)."""

SHARED = os.environ.get("OMP_DYNAMIC", "false").strip().lower() not in ("true", "1")
"""Whether every parallel loop gets all threads; with OMP_DYNAMIC the runtime may give it fewer."""


def rowwise(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """``function(x)`` for an element-wise ``function``, with bits that don't depend on the number of rows.

    Args:
        function: takes ``[R, parts * D]`` and gives ``[R, D]``; element ``[r, i]`` of the result depends on
            ``x[r, i]``, ``x[r, D + i]``, ... only.
        x: ``[..., parts * D]``, a floating dtype.
        parts: 2 for gated functions.

    Returns:
        ``[..., D]`` in the dtype that ``function`` gives.

    Raises:
        ValueError: the last dimension is not a multiple of ``parts``.
    """
    if x.shape[-1] % parts:
        raise ValueError(f"x: got last dimension {x.shape[-1]}, expected a multiple of {parts}")
    width = x.shape[-1] // parts
    threads = torch.get_num_threads()
    if width % VECTOR == 0 and (threads == 1 or x.numel() <= SERIAL):
        return function(x)
    rows = x.reshape(-1, parts, width)
    padded = -(-width // VECTOR) * VECTOR
    if padded != width:
        rows = torch.nn.functional.pad(rows, (0, padded - width))
    rows = rows.reshape(-1, parts * padded)
    count = len(rows)
    if threads == 1:
        out = function(rows)
    else:
        equal = count - count % threads if SHARED and count * padded >= threads * SERIAL else 0
        step = max(1, SERIAL // (parts * padded))
        pieces = [function(rows[:equal])] if equal else []
        pieces += [function(rows[i : i + step]) for i in range(equal, max(count, 1), step)]
        out = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return out[..., :width].reshape(*x.shape[:-1], width)
