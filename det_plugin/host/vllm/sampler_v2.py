"""The seeded sampler in the V2 model runner, which the GPU worker uses.

Read in vLLM 0.32.0.  Replaces or wraps:

- ``vllm.v1.worker.gpu.model_runner.Sampler``: :class:`DetSampler` is built in its place;
- ``compute_topk_scores`` in ``vllm.v1.worker.gpu.sample.sampler`` and ``.prompt_logprob``, and
  ``compute_token_logprobs`` in the latter: logprobs in a fixed order, for decode and prefill alike;
- ``GPUWatermarkSampler.__init__``: refused (its kernels draw noise of their own).

Bias, penalties, bad words, allowed ids, ``min_tokens``, thinking budgets, grammar masks and custom logits
processors stay the host's: they work on each row alone.  FlashInfer's sampling is never used: it draws from a
global generator.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from wrapt import when_imported

from det_plugin.config import DetConfig
from det_plugin.errors import UnsupportedError
from det_plugin.host.vllm.patching import replace, wrap

_config: DetConfig | None = None
_class: type | None = None


def make_sampler_class() -> type:
    """:class:`DetSampler`, a subclass of the host's V2 sampler."""
    import torch
    from vllm.config.model import PROCESSED_LOGPROBS_MODES
    from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from det_plugin.sampling import gpu
    from det_plugin.sampling.filters import masked_logits
    from det_plugin.sampling.reference import GREEDY_EPS, log_min_p

    class DetSampler(Sampler):
        """The host's V2 sampler with seeded noise and per-row filters."""

        def __init__(self, vllm_config: Any, max_num_reqs: int, *args: Any, **kwargs: Any) -> None:
            super().__init__(vllm_config, max_num_reqs, *args, **kwargs)
            if self.use_fp64_gumbel:
                raise UnsupportedError(
                    "use_fp64_gumbel", "noise is specified in fp32 with 32 random bits", "leave it off"
                )
            self.use_flashinfer = self.use_xpu_sampler = False
            self.det_log_min_p = UvaBackedTensor(max_num_reqs, dtype=torch.float32)
            self.det_log_min_p.np.fill(-np.inf)
            self.det_log_min_p.copy_to_uva()
            self.det_changed = False
            self.det_processed = np.zeros(max_num_reqs, dtype=bool)
            self.det_filtered = np.zeros(max_num_reqs, dtype=bool)

        def add_request(self, req_idx: int, sampling_params: Any) -> None:
            states = self.sampling_states
            states.add_request(req_idx, sampling_params)
            processed = self.thinking_budget_state.add_request(req_idx, sampling_params)
            for processor in self.logits_processors:
                processed |= processor.add_request(req_idx, sampling_params)
            self.det_processed[req_idx] = self.needs_logits_processing[req_idx] = processed
            self.logprob_token_ids_state.add_request(req_idx, sampling_params)
            if self.trace_replay_state is not None:
                self.trace_replay_state.add_request(req_idx, sampling_params)
            if sampling_params.seed is None:  # warm-up requests; the front end writes a seed into all others
                states.seeds.np[req_idx] = 0
            floor = log_min_p(sampling_params.min_p)
            if self.det_log_min_p.np[req_idx] != floor:
                self.det_log_min_p.np[req_idx] = floor
                self.det_changed = True
            self.det_filtered[req_idx] = sampling_params.temperature >= GREEDY_EPS and (
                floor > -np.inf or states.top_k.np[req_idx] != states.vocab_size or states.top_p.np[req_idx] < 1.0
            )

        def apply_staged_writes(self) -> None:
            super().apply_staged_writes()
            if self.det_changed:
                self.det_changed = False
                self.det_log_min_p.copy_to_uva()

        def sample(
            self,
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            input_ids,
            expanded_local_pos,
            seq_lens_upper_bound_np,
            return_logprobs=False,
        ):
            if self.det_processed[idx_mapping_np].any():
                logits = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
                context = LogitsContext(
                    expanded_idx_mapping=expanded_idx_mapping,
                    idx_mapping=idx_mapping,
                    idx_mapping_np=idx_mapping_np,
                    expanded_local_pos=expanded_local_pos,
                    input_ids=input_ids,
                    pos=pos,
                    seq_lens_upper_bound_np=seq_lens_upper_bound_np,
                )
                for processor in self.logits_processors:
                    logits = processor.apply(logits, context)
                self.thinking_budget_state.apply(logits, context)
            states = self.sampling_states
            some = self.det_filtered[idx_mapping_np]
            with_top_k = bool((some & (states.top_k.np[idx_mapping_np] != states.vocab_size)).any())
            sampled = gpu.sample(
                logits,
                expanded_idx_mapping,
                pos,
                states.temperature.gpu,
                states.seeds.gpu,
                states.top_k.gpu,
                states.top_p.gpu,
                self.det_log_min_p.gpu,
                filtered=bool(some.any()),
                with_top_k=with_top_k,
            )
            if self.return_sampling_mask or (return_logprobs and self.logprobs_mode in PROCESSED_LOGPROBS_MODES):
                rows = expanded_idx_mapping.long()
                logits = masked_logits(
                    logits,
                    states.temperature.gpu[rows],
                    states.top_k.gpu[rows],
                    states.top_p.gpu[rows],
                    self.det_log_min_p.gpu[rows],
                )
            return sampled, logits

    return DetSampler


def make_compute_topk_scores() -> Any:
    """The host's ``compute_topk_scores`` in a fixed order, ties by id."""
    import torch
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.sample.logprob import _fill_logprob_token_ids_kernel

    from det_plugin.ops._triton import next_power_of_2
    from det_plugin.sampling import gpu_logprobs

    def compute_topk_scores(
        logits,
        num_logprobs,
        sampled_token_ids,
        cu_num_logits=None,
        logprob_token_ids_state=None,
        expanded_idx_mapping=None,
        max_per_req_token_ids=0,
        logits_mode=False,
    ):
        sampled = sampled_token_ids.to(torch.int64)
        top = gpu_logprobs.top_ids(logits, num_logprobs)
        valid = None
        if max_per_req_token_ids == 0:
            columns = torch.cat((sampled.unsqueeze(-1), top), dim=1)
        else:
            width = max(num_logprobs, max_per_req_token_ids)
            columns = sampled.new_zeros((len(sampled), 1 + width))
            valid = torch.zeros_like(columns, dtype=torch.bool)
            state = logprob_token_ids_state
            top = top.to(torch.int32) if num_logprobs else state.token_ids.gpu
            _fill_logprob_token_ids_kernel[(len(sampled),)](
                columns,
                columns.stride(0),
                valid,
                valid.stride(0),
                sampled,
                top,
                top.stride(0),
                expanded_idx_mapping,
                state.num_token_ids.gpu,
                state.token_ids.gpu,
                state.token_ids.gpu.stride(0),
                NUM_TOPK=num_logprobs,
                PADDED_COLS=next_power_of_2(width),
            )
        scores, ranks = gpu_logprobs.scores(logits, sampled, columns)
        if logits_mode:
            scores = logits.gather(-1, columns).to(torch.float32)
        if valid is not None:
            scores = scores.masked_fill(~valid, float("-inf"))
        on_device = isinstance(cu_num_logits, torch.Tensor)
        return LogprobsTensors(
            logprob_token_ids=columns,
            logprobs=scores,
            selected_token_ranks=ranks,
            cu_num_generated_tokens=None if on_device else cu_num_logits,
            cu_num_generated_tokens_tensor=cu_num_logits if on_device else None,
        )

    return compute_topk_scores


def _compute_token_logprobs(logits: Any, token_ids: Any) -> Any:
    import torch

    from det_plugin.sampling import gpu_logprobs

    columns = token_ids.to(torch.int64)
    return gpu_logprobs.scores(logits, columns[:, 0].contiguous(), columns)[0]


def _refuse_watermark(_original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            "watermarking", "its sampler draws noise of its own", "start the engine without --watermark-config"
        )

    return __init__


def _patch_runner(_module: Any = None) -> None:
    global _class
    _class = _class or make_sampler_class()
    compute = make_compute_topk_scores()
    for module in ("sampler", "prompt_logprob"):
        wrap(f"vllm.v1.worker.gpu.sample.{module}:compute_topk_scores", lambda _original: compute)
    wrap(
        "vllm.v1.worker.gpu.sample.prompt_logprob:compute_token_logprobs",
        lambda _original: _compute_token_logprobs,
    )
    wrap("vllm.v1.watermarking.gpu_sampler:GPUWatermarkSampler.__init__", _refuse_watermark)
    replace("vllm.v1.worker.gpu.model_runner:Sampler", _class)


def install(config: DetConfig) -> None:
    """Replace the V2 sampler once the V2 model runner is imported; idempotent, the last configuration counts.

    Raises:
        HostError: an upstream symbol is gone (raised from the import of the model runner if that comes later).
    """
    global _config
    _config = config
    if "vllm.v1.worker.gpu.model_runner" in sys.modules:
        _patch_runner()
    else:
        when_imported("vllm.v1.worker.gpu.model_runner")(_patch_runner)
