"""Attention on the CPU: the host's kernel, held to one order.

Read in vLLM 0.32.0: ``v1/attention/backends/cpu_attn.py`` and the C++ kernel's public source.  Two things there
depend on the batch.  With ``enable_kv_split`` a decode's keys are cut by how busy the threads are; and the
key tile, over which softmax sums are taken, shrinks as the number of query rows of a work item grows, so that
prefill and decode, and different chunk sizes, sum in different orders beyond some hundred keys.

The order used here: no key split, and every work item holds at most as many query rows as the kernel keeps in
registers; then the key tile is a constant of the machine.  Long queries are presented to the kernel as several
requests of consecutive rows that share one block table.  A certificate compares whole prefill, chunks, and
single decode rows byte for byte before the first request.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import torch

from det_plugin.config import DetConfig
from det_plugin.errors import CertificateError, UnsupportedError
from det_plugin.evidence.certificates import Schedule, certify
from det_plugin.host.vllm.patching import resolve, wrap
from det_plugin.host.vllm.store import certificate_store

logger = logging.getLogger("vllm.det_plugin")

REGISTER_ROWS = {"vec": 8, "vec16": 16, "amx": 32}
"""Query rows (times heads of a group) that a work item's kernel holds in registers, by the host's ISA name."""


def rows_per_item(isa: str, num_heads: int, num_kv_heads: int) -> int:
    """Largest number of query tokens of one work item that keeps the key tile constant."""
    rows = REGISTER_ROWS.get(isa, 1)
    group = num_heads // num_kv_heads
    return max(1, rows // group) if rows % group == 0 else rows


def split_queries(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cut each request's query into runs of at most ``rows`` tokens.

    Args:
        query_start_loc: int32 [R + 1].  seq_lens: int32 [R].  block_table: int32 [R, B].
        rows: positive.

    Returns:
        The same three for the runs: int32 [V + 1], [V], [V, B].
    """
    lengths = (query_start_loc[1:] - query_start_loc[:-1]).long()
    runs = torch.div(lengths + (rows - 1), rows, rounding_mode="floor").clamp_(min=1)
    request = torch.repeat_interleave(torch.arange(len(runs)), runs)
    first = torch.cumsum(runs, 0) - runs
    index = torch.arange(int(runs.sum())) - first[request]
    start = index * rows
    stop = torch.minimum(start + rows, lengths[request])
    new_start_loc = torch.empty(len(request) + 1, dtype=query_start_loc.dtype)
    new_start_loc[0] = query_start_loc[0]
    new_start_loc[1:] = query_start_loc[0] + torch.cumsum(stop - start, 0)
    new_seq_lens = (seq_lens[request].long() - (lengths[request] - stop)).to(seq_lens.dtype)
    return new_start_loc, new_seq_lens, block_table[request].contiguous()


def install(config: DetConfig) -> None:
    """Hold the host's CPU attention to the canonical order; idempotent."""
    builder = "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder"
    resolve("vllm._custom_ops:cpu_attn_get_scheduler_metadata")

    def make_init(original: Any) -> Any:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if self.is_cross_attention or self.is_encoder_only_attention:
                raise CertificateError("attention on the CPU is certified for decoder layers only")
            self.det_rows = rows_per_item(self.isa, self.num_heads, self.num_kv_heads)
            for window, softcap in _variants(self):
                certify_attention(
                    self.num_heads,
                    self.num_kv_heads,
                    self.head_dim,
                    self.dtype,
                    self.block_size,
                    self.isa,
                    window,
                    softcap,
                    config.certificates,
                )
            _call_directly(self)

        return __init__

    def make_build(original: Any) -> Any:
        def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            m = common_attn_metadata
            if isinstance(m.causal, torch.Tensor) or not m.causal:
                raise CertificateError("attention on the CPU is certified for causal masks only")
            if m.max_query_len > self.det_rows:
                requests = m.num_reqs
                start_loc, seq_lens, table = split_queries(
                    m.query_start_loc[: requests + 1],
                    m.seq_lens[:requests],
                    m.block_table_tensor[:requests],
                    self.det_rows,
                )
                m = dataclasses.replace(
                    m,
                    num_reqs=len(seq_lens),
                    query_start_loc=start_loc,
                    seq_lens=seq_lens,
                    block_table_tensor=table,
                    max_query_len=self.det_rows,
                )
            return original(self, 0, m, fast_build)

        return build

    wrap(f"{builder}.__init__", make_init)
    wrap(f"{builder}.build", make_build)
    wrap("vllm._custom_ops:cpu_attn_get_scheduler_metadata", _without_kv_split)


def _variants(builder: Any) -> set[tuple[int, float]]:
    """(sliding window, soft cap) of the group's layers; refuses what the certificate does not cover."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    found = set()
    layers = get_layers_from_vllm_config(builder.vllm_config, Attention, builder.layer_names)
    for name, layer in layers.items():
        impl = layer.impl
        for feature, value in (("ALiBi slopes", impl.alibi_slopes), ("attention sinks", impl.sinks)):
            if value is not None:
                raise UnsupportedError(
                    f"{feature} (layer {name}) on the CPU", "that kernel path is not certified", "use a GPU"
                )
        found.add((int(impl.sliding_window), float(impl.logits_soft_cap)))
    return found


def _call_directly(builder: Any) -> None:
    """Let uncompiled layers call the host's Python functions themselves, as the host's ``use_direct_call`` means.

    Through its two operators, which only compiled graphs need, the same functions cost three times the time.
    """
    from vllm.config import CompilationMode, get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    if builder.vllm_config.compilation_config.mode != CompilationMode.NONE:
        return
    for layer in get_layers_from_vllm_config(builder.vllm_config, Attention, builder.layer_names).values():
        layer.use_direct_call = True


def _without_kv_split(original: Any) -> Any:
    def cpu_attn_get_scheduler_metadata(*args: Any, **kwargs: Any) -> Any:
        if "enable_kv_split" not in kwargs:
            raise CertificateError("the host schedules CPU attention without naming enable_kv_split")
        return original(*args, **{**kwargs, "enable_kv_split": False})

    return cpu_attn_get_scheduler_metadata


def _run(case: dict[str, Any], pieces: list[tuple[int, int]], rows: int | None) -> torch.Tensor:
    """Attention of query rows [first, last) for each piece, each a request of its own over one cache."""
    from vllm import _custom_ops as ops

    lengths = [last - first for first, last in pieces]
    query = torch.cat([case["query"][first:last] for first, last in pieces])
    start_loc = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    seq_lens = torch.tensor([last for _, last in pieces], dtype=torch.int32)
    table = case["table"].expand(len(pieces), -1).contiguous()
    if rows is not None:
        start_loc, seq_lens, table = split_queries(start_loc, seq_lens, table, rows)
    heads, kv_heads, dim = case["shape"]
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(seq_lens),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        seq_lens=seq_lens,
        dtype=query.dtype,
        query_start_loc=start_loc,
        causal=True,
        sliding_window_size=case["window"],
        isa=case["isa"],
        enable_kv_split=False,
    )
    out = torch.empty_like(query)
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=case["key_cache"],
        value_cache=case["value_cache"],
        output=out,
        query_start_loc=start_loc,
        seq_lens=seq_lens,
        scale=dim**-0.5,
        causal=True,
        alibi_slopes=None,
        sliding_window=case["window"],
        block_table=table,
        softcap=case["softcap"],
        scheduler_metadata=metadata,
        s_aux=None,
    )
    return out


def make_case(
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    block_size: int,
    isa: str,
    window: int,
    softcap: float,
    length: int,
) -> dict[str, Any]:
    """Random queries for ``length`` positions and a paged cache that holds their keys and values."""
    from vllm import _custom_ops as ops

    generator = torch.Generator().manual_seed(7)
    blocks = (length + block_size - 1) // block_size
    query, key, value = (
        torch.randn(length, h, dim, generator=generator).to(dtype) for h in (heads, kv_heads, kv_heads)
    )
    cache = torch.zeros(blocks + 1, kv_heads, block_size, 2 * dim, dtype=dtype)
    view = cache.view(blocks + 1, kv_heads, block_size * 2, dim)
    key_cache, value_cache = view.chunk(2, dim=2)
    table = torch.randperm(blocks, generator=generator).to(torch.int32)[None] + 1
    slots = table[0].long().repeat_interleave(block_size)[:length] * block_size
    slots += torch.arange(length) % block_size
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)
    return {
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "table": table,
        "shape": (heads, kv_heads, dim),
        "isa": isa,
        "window": window,
        "softcap": softcap,
        "key": key,
        "value": value,
        "length": length,
    }


@functools.cache
def certify_attention(
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    block_size: int,
    isa: str,
    window: int,
    softcap: float,
    mode: str,
    length: int = 1500,
) -> None:
    """Compare whole prefill with chunks, single decode rows and mixed batches, byte for byte.

    Raises:
        CertificateError: a row's bytes depend on how the query was cut.
    """
    rows = rows_per_item(isa, heads, kv_heads)
    key = (
        f"{str(dtype).removeprefix('torch.')},heads={heads},kv={kv_heads},dim={dim},block={block_size},isa={isa},"
        f"window={window},softcap={softcap},length={length},rows={rows}"
    )
    case: dict[str, Any] = {}

    def block(cuts: list[int]) -> Any:
        def run(_: torch.Tensor) -> torch.Tensor:
            if not case:
                case.update(make_case(heads, kv_heads, dim, dtype, block_size, isa, window, softcap, length))
            edges = [0, *[c for c in cuts if c < length], length]
            return _run(case, list(zip(edges[:-1], edges[1:], strict=True)), rows)

        return run

    def decode(_: torch.Tensor) -> torch.Tensor:
        # every row of the first 70 and every 13th after, alone; the others as found in chunks of 5
        out = block(list(range(5, length, 5)))(_)
        for position in [*range(70), *range(70, length, 13)]:
            out[position] = _run(case, [(position, position + 1)], rows)[0]
        return out

    certificate = certify(
        "attention_cpu",
        key,
        Schedule("prefill", block([])),
        [
            Schedule("chunks of 16", block(list(range(16, length, 16)))),
            Schedule("chunks of 100", block(list(range(100, length, 100)))),
            Schedule("rows as a batch", block(list(range(1, length)))),
            Schedule("single rows", decode),
        ],
        lambda start, count: (torch.empty(0),),
        (length,),
        store=certificate_store("cpu"),
        mode=mode,  # type: ignore[arg-type]
    )
    for name, difference in certificate.struck_out.items():
        raise CertificateError(
            f"attention on this CPU ({key}) depends on how the query is cut: {name}: {difference}. "
            "Deterministic inference can't run this model here"
        )
