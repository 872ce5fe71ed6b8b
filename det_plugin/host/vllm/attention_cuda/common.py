"""What the three backends share: refusals, batch metadata, and the bases of builders and layers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.utils import get_num_attention_heads_from_layers

from det_plugin.attention import triton_paged
from det_plugin.attention.contract import check_config
from det_plugin.errors import HostError, UnsupportedError


def dtype_name(dtype: Any) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


class Refusals:
    """Mixin of a backend class: refuse a layer before weights load, with the package's own error.

    Replaces ``AttentionBackend.validate_configuration``, which the host calls while the model is built.
    """

    det_backend: str

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def validate_configuration(
        cls,
        *,
        head_size,
        dtype,
        kv_cache_dtype=None,
        block_size=None,
        use_mla=False,
        has_sink=False,
        use_sparse=False,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=None,
        attn_type="decoder",
        has_sliding_window=False,
        use_non_causal=False,
        use_pcp=False,
        use_dcp=False,
        use_rswa=False,
        **_other,
    ) -> list[str]:
        """Raises UnsupportedError when the layer is not proven; otherwise there is nothing to object."""
        capability = None
        if device_capability is not None:
            capability = (device_capability.major, device_capability.minor)
        check_config(
            cls.det_backend,
            head_dim=head_size,
            dtype=dtype_name(dtype),
            kv_cache_dtype=kv_cache_dtype,
            page_size=block_size,
            sinks=has_sink,
            mla=use_mla or use_sparse,
            attn_type=getattr(attn_type, "value", str(attn_type)),
            window=1 if has_sliding_window else 0,
            compute_capability=capability,
        )
        refused = {
            "bidirectional attention over image tokens": use_mm_prefix,
            "quantised KV caches with per-head scales": use_per_head_quant_scales,
            "non-causal attention": use_non_causal,
            "prefill context parallelism": use_pcp,
            "decode context parallelism": use_dcp,
            "reference sliding-window attention": use_rswa,
        }
        for feature, asked in refused.items():
            if asked:
                raise UnsupportedError(
                    f"{feature} with the {cls.det_backend} attention backend",
                    "no order is defined for it",
                    "serve without it",
                )
        return []


@dataclass
class BatchMetadata:
    """One batch as the kernels see it; the tensors are the host's persistent buffers.

    Attributes:
        num_actual_tokens: query tokens, graph padding included.
        max_query_len, max_seq_len: upper bounds known on the host.
        query_start_loc: int32 ``[num_reqs + 1]``.
        seq_lens: int32 ``[num_reqs]``; 0 for padding.
        block_table: int32 ``[num_reqs, pages]``.
        slot_mapping: int64 ``[num_actual_tokens]``.
        extra: what the backend's own builder adds.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True
    extra: Any = None


def batch_metadata(common, extra: Any = None) -> BatchMetadata:
    """From the host's ``CommonAttentionMetadata``.

    Raises:
        UnsupportedError: the batch is not plain causal attention.
    """
    if common.causal is not True:
        raise UnsupportedError("non-causal attention", "no order is defined for it", "serve without it")
    return BatchMetadata(
        common.num_actual_tokens,
        common.max_query_len,
        common.max_seq_len,
        common.query_start_loc,
        common.seq_lens,
        common.block_table_tensor,
        common.slot_mapping,
        True,
        extra,
    )


def cache_views(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, each ``[pages, page, kv heads, d]``, of the host's ``[pages, kv heads, page, 2 d]``."""
    keys, values = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    return keys, values


@functools.cache
def shared_workspace(num_heads: int, head_dim: int, max_context: int, device: str) -> triton_paged.Workspace:
    """One workspace per shape and device: layers run one after another."""
    return triton_paged.make_workspace(num_heads, head_dim, max_context, device)


class InvariantBuilder(AttentionMetadataBuilder[BatchMetadata]):
    """Base of the metadata builders: heads of this rank, and scratch memory of the Triton kernel."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        model = vllm_config.model_config
        heads = get_num_attention_heads_from_layers(vllm_config, layer_names)
        self.num_heads = heads or model.get_num_attention_heads(vllm_config.parallel_config)
        self.workspace = shared_workspace(self.num_heads, kv_cache_spec.head_size, model.max_model_len, str(device))

    def build_for_cudagraph_capture(self, common_attn_metadata) -> BatchMetadata:
        common_attn_metadata.seq_lens.fill_(1)  # long contexts would only make capturing slow
        return self.build(0, common_attn_metadata)


@dataclass
class Plan:
    """What one batch runs.

    Attributes:
        launches: of the planned kernel; None in a group of sliding windows.
        limit: what the kernel's ``run`` takes beside them: its longest context, or its scratch memory.
        workspace: of the Triton kernel.
    """

    launches: list[Any] | None
    limit: Any
    workspace: triton_paged.Workspace


class PlanningBuilder(InvariantBuilder):
    """Plans each batch: single rows on the device, all others from the host's exact lengths.

    A subclass's constructor sets ``layout``, ``max_context`` (keys), ``limit`` (see :class:`Plan`) and
    ``buffers``, the persistent memory of the plans that CUDA graphs read.

    Attributes:
        windows: whether the group's layers have sliding windows; nothing is planned for these.
        graph_rows: rows of the largest captured batch, 0 without full graphs.
        max_rows: rows of the largest batch of single rows.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1  # requests with one new token come first
    layout: Any
    max_context: int
    limit: Any
    buffers: Any

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.windows = getattr(kv_cache_spec, "sliding_window", None) is not None
        compilation = vllm_config.compilation_config
        self.graph_rows = 0
        if compilation.cudagraph_mode.has_full_cudagraphs():
            self.graph_rows = compilation.max_cudagraph_capture_size or 0
        self.max_rows = max(vllm_config.scheduler_config.max_num_seqs, self.graph_rows)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> BatchMetadata:
        launches = None if self.windows else self._plan(common_attn_metadata)
        return batch_metadata(common_attn_metadata, Plan(launches, self.limit, self.workspace))

    def _plan(self, common) -> list[Any]:
        if common.max_query_len == 1:
            graph = common.num_actual_tokens <= self.graph_rows
            context = self.max_context if graph else max(1, min(common.max_seq_len, self.max_context))
            return self._plan_decode(common, context, self.buffers if graph else None)
        if common.seq_lens_cpu_upper_bound is None:
            raise HostError("CommonAttentionMetadata.seq_lens_cpu_upper_bound: got None, expected exact lengths")
        return self._plan_batch(common, common.query_start_loc_cpu.numpy(), common.seq_lens_cpu_upper_bound.numpy())

    def _plan_decode(self, common, context: int, buffers) -> list[Any]:
        """Launches for single rows of up to ``context`` keys, in ``buffers`` where a graph reads them."""
        raise NotImplementedError

    def _plan_batch(self, common, query_start: np.ndarray, seq_lens: np.ndarray) -> list[Any]:
        """Launches from int32 arrays on the host: ``[num_reqs + 1]`` starts and ``[num_reqs]`` lengths."""
        raise NotImplementedError


class InvariantImpl:
    """Mixin of an ``AttentionImpl``, before the host's own class: one layer.

    Writing the cache stays the host's own kernel: it copies.

    Raises:
        UnsupportedError: the layer is not proven; raised while the model is built.
    """

    det_backend: str

    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads,
        alibi_slopes,
        sliding_window,
        kv_cache_dtype,
        logits_soft_cap=None,
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        sinks=None,
        **kwargs,
    ):
        check_config(
            self.det_backend,
            head_dim=head_size,
            dtype=dtype_name(torch.get_default_dtype()),
            kv_cache_dtype=kv_cache_dtype,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            scale=scale,
            softcap=logits_soft_cap or 0.0,
            window=sliding_window or 0,
            sinks=sinks is not None,
            attn_type=getattr(attn_type, "value", str(attn_type)),
            alibi=alibi_slopes is not None,
        )
        self._check_host()
        super().__init__(  # type: ignore[call-arg]  # the host's class comes next
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            sinks,
            **kwargs,
        )
        self.supports_quant_query_input = False
        self.window = sliding_window or 0

    def _check_host(self) -> None:
        """What else must hold before the host's constructor runs."""

    def fused_output_quant_supported(self, quant_key) -> bool:
        return False

    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ) -> torch.Tensor:
        """``output[i] = attention(query[i])``; see the host's ``AttentionImpl``."""
        if attn_metadata is None:
            return output.fill_(0)  # profiling run
        tokens = attn_metadata.num_actual_tokens
        keys, values = cache_views(kv_cache, self.head_size)
        self._attend(query[:tokens], keys, values, output[:tokens], attn_metadata)
        return output

    def _attend(self, query, keys, values, output, metadata: BatchMetadata) -> None:
        """Write ``output``: it and ``query`` are ``[tokens, heads, d]``, the cache as :func:`cache_views`."""
        raise NotImplementedError

    def _run_triton(self, query, keys, values, output, metadata: BatchMetadata, workspace) -> None:
        """:func:`det_plugin.attention.triton_paged.paged_attention`, with what the layer has."""
        triton_paged.paged_attention(
            query,
            keys,
            values,
            output,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            max_query_len=metadata.max_query_len,
            scale=self.scale,
            window=self.window,
            softcap=self.logits_soft_cap,
            sinks=self.sinks,
            workspace=workspace,
        )


class PlannedImpl(InvariantImpl):
    """A layer that runs planned launches, or the Triton kernel where the planned one does not offer it.

    A subclass's constructor sets ``on_triton``.
    """

    on_triton: bool

    def _check_host(self) -> None:
        """Refuse speculative decoding: a plan needs the exact lengths of several rows on the host."""
        vllm_config = get_current_vllm_config_or_none()
        if vllm_config is not None and vllm_config.speculative_config is not None:
            raise UnsupportedError(
                f"speculative decoding with the {self.det_backend} attention backend",
                "its plan needs lengths that the host does not know in time",
                "choose --attention-backend TRITON_ATTN",
            )

    def _attend(self, query, keys, values, output, metadata: BatchMetadata) -> None:
        plan = metadata.extra
        if self.on_triton:
            self._run_triton(query, keys, values, output, metadata, plan.workspace)
            return
        if plan.launches is None:
            raise HostError("a layer without a window shares its metadata with a group of sliding windows")
        self._run_plan(query, keys, values, output, metadata.block_table, plan)

    def _run_plan(self, query, keys, values, output, block_table, plan: Plan) -> None:
        raise NotImplementedError
