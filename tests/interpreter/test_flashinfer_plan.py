"""The kernel that writes FlashInfer's decode plan, against the same in torch: every byte of it."""

from __future__ import annotations

import pytest
import torch

from det_plugin.attention import flashinfer, flashinfer_plan

WIDTH = 512


def plans(starts, lengths, max_context, page=16, chunk_keys=flashinfer.CHUNK_KEYS, fill=0):
    """(plan, last page lengths, page starts) as the kernel and as torch write them over bytes of ``fill``."""
    reqs, chunks = len(lengths), max(1, -(-max_context // chunk_keys))
    offsets, size = flashinfer._pack(flashinfer._decode_sections(reqs, chunks))
    found = []
    for write in (flashinfer_plan.fill, flashinfer_plan.fill_reference):
        out = (
            torch.full((size,), fill, dtype=torch.uint8),
            torch.full((reqs,), fill, dtype=torch.int32),
            torch.full((reqs + 1,), fill, dtype=torch.int32),
        )
        args = [torch.tensor(x, dtype=torch.int32) for x in (starts, lengths)]
        write(flashinfer_plan.DecodePlan(*out, *args, offsets, chunks, chunk_keys, WIDTH, page))
        found.append(out)
    return found


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("fill", [0, 77])
@pytest.mark.parametrize(
    ("starts", "lengths"),
    [
        ([0, 1], [1]),
        ([0, 1, 2, 3, 4], [1, 2048, 2049, 7000]),
        ([0, 1, 2, 2, 2], [3000, 5, 0, 0]),
        ([0, 1, 2, 3], [8192, 1, 4096]),
        ([0] + [1] * 8, [9] + [0] * 7),
        (list(range(34)), [1 + 211 * i for i in range(33)]),
        (list(range(257)), [1 + 31 * i for i in range(256)]),
        ([0, 0, 0], [0, 0]),
    ],
)
@pytest.mark.parametrize("max_context", [2048, 8192, 40960])
def test_every_byte_is_that_of_torch(starts, lengths, max_context, fill):
    lengths = [min(length, max_context) for length in lengths]
    kernel, reference = plans(starts, lengths, max_context, fill=fill)
    assert equal(kernel, reference)


def test_control_other_chunks_are_noticed():
    kernel, _ = plans([0, 1, 2], [3000, 4000], 8192)
    _, other = plans([0, 1, 2], [3000, 4000], 8192, chunk_keys=1024)
    assert not equal(kernel, other)
