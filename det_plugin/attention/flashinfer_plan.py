"""The plan of a decode batch for FlashInfer's kernel, written on the device.

A plan is integers only.  One kernel writes it in place of some twenty torch operators, whose processor time every
decode step would pay; :func:`fill_reference` says the same in torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from det_plugin.ops._triton import next_power_of_2, require_kernel_device, tl, triton


@triton.jit(do_not_specialize=["reqs", "chunks", "table_width", "request_at", "tile_at", "chunk_at", "o_at", "keys_at",
                               "total_at", "merge_at", "valid_at"])  # fmt: skip
def _decode_plan_kernel(
    bytes_ptr, words_ptr, last_ptr, indptr_ptr, start_ptr, length_ptr, reqs, chunks, table_width,
    request_at, tile_at, chunk_at, o_at, keys_at, total_at, merge_at, valid_at,
    PAGE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk number of all requests; the first program also writes what is per request."""
    chunk = tl.program_id(0)
    req = tl.arange(0, BLOCK)
    real = req < reqs
    begin = tl.load(start_ptr + req, mask=real, other=0)
    live = real & (tl.load(start_ptr + req + 1, mask=real, other=0) > begin)
    length = tl.load(length_ptr + req, mask=real, other=0)
    count = tl.where(live, tl.maximum((length + CHUNK - 1) // CHUNK, 1), 0)
    entry = req * chunks + chunk
    tl.store(words_ptr + request_at + entry, req, mask=real)
    tl.store(words_ptr + tile_at + entry, tl.zeros_like(req), mask=real)
    tl.store(words_ptr + chunk_at + entry, tl.zeros_like(req) + chunk, mask=real)
    tl.store(bytes_ptr + valid_at + entry, (chunk < count).to(tl.uint8), mask=real)
    if chunk == 0:
        ends = tl.cumsum(count, axis=0)
        tl.store(words_ptr + merge_at + 1 + req, ends, mask=real)
        tl.store(words_ptr + merge_at + req, tl.zeros_like(req), mask=req == 0)
        rows = tl.load(start_ptr + req + 1, mask=real, other=0)
        if chunks > 1:
            rows = ends
        tl.store(words_ptr + o_at + 1 + req, rows, mask=real)
        tl.store(words_ptr + o_at + req, tl.zeros_like(req), mask=req == 0)
        tl.store(words_ptr + keys_at + req, tl.zeros_like(req) + CHUNK, mask=req == 0)
        tl.store(words_ptr + total_at + req, tl.zeros_like(req) + tl.load(start_ptr + reqs), mask=req == 0)
        tl.store(last_ptr + req, length - (table_width - 1) * PAGE, mask=real)
        tl.store(indptr_ptr + req, req * table_width, mask=real)
        tl.store(indptr_ptr + reqs + req, tl.zeros_like(req) + reqs * table_width, mask=req == 0)


@dataclass(frozen=True)
class DecodePlan:
    """A plan to write: single rows, one per request; requests without a row come last.

    Attributes:
        plan: uint8, the packed sections; mutated.
        last_page_len: int32 ``[num_reqs]``, keys beyond ``table_width - 1`` pages; mutated.
        kv_indptr: int32 ``[num_reqs + 1]``, each request's row in the flat block table; mutated.
        query_start_loc: int32 ``[num_reqs + 1]``, starts with 0.
        seq_lens: int32 ``[num_reqs]``.
        offsets: byte offset of each section within ``plan``.
        chunks: most chunks of a request.
        chunk_keys, page_size: keys per chunk and page.
        table_width: pages per row of the block table.
    """

    plan: torch.Tensor
    last_page_len: torch.Tensor
    kv_indptr: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    offsets: Mapping[str, int]
    chunks: int
    chunk_keys: int
    table_width: int
    page_size: int


def fill(p: DecodePlan) -> None:
    """Write the plan with one kernel.

    Raises:
        ImportError: Triton is not installed.
        ValueError: the tensors are not on a CUDA device.
    """
    require_kernel_device(p.plan)
    words = {name: offset // 4 for name, offset in p.offsets.items()}
    reqs = len(p.seq_lens)
    _decode_plan_kernel[(p.chunks,)](
        p.plan, p.plan.view(torch.int32), p.last_page_len, p.kv_indptr, p.query_start_loc, p.seq_lens, reqs, p.chunks,
        p.table_width, words["request"], words["tile"], words["chunk"], words["o_start"], words["chunk_keys"],
        words["total_rows"], words["merge_start"], p.offsets["valid"], PAGE=p.page_size, CHUNK=p.chunk_keys,
        BLOCK=next_power_of_2(reqs), num_warps=4,
    )  # fmt: skip


def fill_reference(p: DecodePlan) -> None:
    """:func:`fill` in torch, on any device."""
    reqs, device = len(p.seq_lens), p.seq_lens.device
    entries = reqs * p.chunks
    words = p.plan.view(torch.int32)

    def view(name: str, count: int) -> torch.Tensor:
        return words[p.offsets[name] // 4 : p.offsets[name] // 4 + count]

    live = p.query_start_loc[1:] > p.query_start_loc[:-1]
    count = torch.where(live, ((p.seq_lens + p.chunk_keys - 1) // p.chunk_keys).clamp(min=1), 0).to(torch.int32)
    number = torch.arange(p.chunks, dtype=torch.int32, device=device)
    request = torch.arange(reqs, dtype=torch.int32, device=device)
    view("request", entries).copy_(request[:, None].expand(reqs, p.chunks).reshape(-1))
    view("tile", entries).zero_()
    view("chunk", entries).copy_(number[None, :].expand(reqs, p.chunks).reshape(-1))
    valid = p.plan[p.offsets["valid"] : p.offsets["valid"] + entries]
    valid.copy_((number[None, :] < count[:, None]).reshape(-1))
    for name in ("o_start", "merge_start"):
        starts = view(name, reqs + 1)
        starts[:1].zero_()
        starts[1:].copy_(torch.cumsum(count, 0))
    if p.chunks == 1:
        view("o_start", reqs + 1).copy_(p.query_start_loc)
    view("chunk_keys", 1).fill_(p.chunk_keys)
    view("total_rows", 1).copy_(p.query_start_loc[-1:])
    p.last_page_len.copy_(p.seq_lens - (p.table_width - 1) * p.page_size)
    p.kv_indptr.copy_(torch.arange(reqs + 1, dtype=torch.int32, device=device) * p.table_width)
