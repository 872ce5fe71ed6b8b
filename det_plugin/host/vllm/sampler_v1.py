"""The seeded sampler in the V1 model runner, which the CPU worker uses.

Read in vLLM 0.32.0.  Replaces or wraps:

- ``vllm.v1.worker.gpu_model_runner.Sampler``: :class:`DetSampler` is built in its place;
- ``vllm.v1.worker.gpu_model_runner.GPUModelRunner._sample``: tells the sampler each row's seed and position.

Bias, penalties, bad words, allowed ids, ``min_tokens``, thinking budgets, grammar masks and custom logits
processors stay the host's: they work on each row alone.  Temperature, min-p, top-k, top-p, noise, argmax and
logprobs are :mod:`det_plugin.sampling.cpu`.  Per-request torch generators are no longer consulted.
Also wraps ``vllm.triton_utils.dispatcher._rebind_kernels``, which fails once numba is imported: it scans every
module with ``vars()``, and llvmlite's library handle answers that with a function of its own.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from wrapt import when_imported

from det_plugin.config import DetConfig
from det_plugin.errors import HostError, UnsupportedError
from det_plugin.host.vllm.patching import replace, wrap

_config: DetConfig | None = None
_class: type | None = None


def row_seeds(runner: Any) -> np.ndarray:
    """int64 [num_reqs]: seeds of the rows in batch order, written by the front end into each request."""
    assert _config is not None
    default = _config.default_seed
    seeds = []
    for req_id in runner.input_batch.req_ids:
        params = runner.requests[req_id].sampling_params
        seed = params.seed
        if seed is None:
            if not isinstance(default, int) and params.temperature > 0:
                raise HostError(f"request {req_id} reached the worker without a seed and default_seed is random")
            seed = default if isinstance(default, int) else 0
        seeds.append(seed)
    return np.array(seeds, dtype=np.int64)


def make_sampler_class() -> type:
    """:class:`DetSampler`, a subclass of the host's V1 sampler."""
    import torch
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
    from vllm.v1.sample.sampler import Sampler

    from det_plugin.sampling import cpu, cpu_logprobs

    def rows(tensor: Any) -> np.ndarray:
        return np.ascontiguousarray(tensor.detach().to(torch.float32).numpy())

    class DetSampler(Sampler):
        """The host's V1 sampler with seeded noise, per-row filters and logprobs in a fixed order."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.det_seeds: np.ndarray | None = None
            self.det_positions: np.ndarray | None = None
            cpu.warm_up()
            cpu_logprobs.warm_up()

        def forward(self, logits, sampling_metadata, predict_bonus_token=False, logprobs_mode_override=None) -> Any:
            mode = logprobs_mode_override or self.logprobs_mode
            wants = sampling_metadata.max_num_logprobs is not None or sampling_metadata.logprob_token_ids
            scores = None
            if wants and mode in ("raw_logprobs", "raw_logits"):
                scores = rows(logits)
                if logits.dtype == torch.float32:  # the processors below write in place
                    scores = scores.copy()
            logits = logits.to(torch.float32)
            logits = self.apply_logits_processors(logits, sampling_metadata, predict_bonus_token)
            params = self._params(sampling_metadata, len(logits))
            sampled, processed = self._draw(logits, sampling_metadata, params, wants and scores is None)
            if processed is not None:
                scores = processed
            tensors = None
            if wants:
                tensors = self._scores(scores, sampled, sampling_metadata, mode.endswith("logits"))
            return SamplerOutput(
                sampled_token_ids=torch.from_numpy(sampled.astype(np.int32)).unsqueeze(-1),
                logprobs_tensors=tensors,
            )

        def sample(self, logits, sampling_metadata, logprobs_mode_override=None):
            """Sample without the processors that may change an argmax; the host's signature."""
            mode = logprobs_mode_override or self.logprobs_mode
            params = self._params(sampling_metadata, len(logits))
            sampled, processed = self._draw(
                logits, sampling_metadata, params, mode in ("processed_logits", "processed_logprobs")
            )
            tensor = None if processed is None else torch.from_numpy(processed)
            if tensor is not None and mode == "processed_logprobs":
                tensor = self.compute_logprobs(tensor)
            return torch.from_numpy(sampled), tensor

        def _params(self, metadata, num_rows: int) -> Any:
            seeds, positions = self.det_seeds, self.det_positions
            if seeds is None or positions is None:  # profiling and warm-up runs
                seeds = positions = np.zeros(num_rows, np.int64)
            if len(seeds) != num_rows:
                raise HostError(f"sampler: {num_rows} rows of logits for {len(seeds)} requests")
            if metadata.all_greedy:
                return cpu.BatchParams(np.zeros(num_rows, np.float32), seeds, positions)
            min_p = None
            for processor in metadata.logitsprocs.argmax_invariant:
                if isinstance(processor, MinPLogitsProcessor) and processor.min_p_count:
                    min_p = processor.min_p_cpu[:num_rows]
            return cpu.BatchParams(
                metadata.temperature.numpy(),
                seeds,
                positions,
                None if metadata.top_k is None else metadata.top_k.numpy(),
                None if metadata.top_p is None else metadata.top_p.numpy(),
                min_p,
            )

        def _draw(self, logits, metadata, params, want_processed: bool) -> tuple[np.ndarray, Any]:
            custom = [p for p in metadata.logitsprocs.argmax_invariant if not isinstance(p, MinPLogitsProcessor)]
            if custom and not params.greedy.all():  # they expect scaled logits
                greedy = torch.from_numpy(np.flatnonzero(params.greedy))
                untouched = logits[greedy]
                logits = logits * torch.from_numpy(params.scale).unsqueeze(1)
                params.scale = np.ones_like(params.scale)
                for processor in custom:
                    logits = processor.apply(logits)
                # the host lets them at a greedy row only when it stands beside a sampled one; here they never are
                logits[greedy] = untouched
            data = rows(logits)
            sampled = cpu.sample(data, params)
            if not want_processed:
                return sampled, None
            data = data.copy()
            cpu.apply_filters(data, params)
            return sampled, data

        def _scores(self, scores: Any, sampled: np.ndarray, metadata, as_logits: bool) -> Any:
            """Columns: the sampled token, then each row's top-k, or the ids that the row asked for."""
            lse = np.zeros(len(scores)) if as_logits else cpu_logprobs.logsumexp(scores)
            wanted = metadata.logprob_token_ids or {}
            num_top = metadata.max_num_logprobs or 0
            if num_top < 0:
                num_top = scores.shape[1]
            width = max([num_top, *(len(ids) for ids in wanted.values())])
            ids = np.zeros((len(scores), 1 + width), np.int64)
            values = np.full((len(scores), 1 + width), -np.inf, np.float32)
            ids[:, 0] = sampled
            values[:, :1] = cpu_logprobs.token_logprobs(scores, lse, ids[:, :1])
            if num_top:
                top_ids, top_values = cpu_logprobs.top_logprobs(scores, lse, num_top)
                ids[:, 1 : 1 + num_top], values[:, 1 : 1 + num_top] = top_ids, top_values
            for row, tokens in wanted.items():
                asked = np.array([tokens], dtype=np.int64)
                end = 1 + len(tokens)
                ids[row, 1:end] = asked
                values[row, 1:end] = cpu_logprobs.token_logprobs(scores[row : row + 1], lse[row : row + 1], asked)
                ids[row, end:], values[row, end:] = 0, -np.inf
            return LogprobsTensors(
                torch.from_numpy(ids.astype(np.int32)),
                torch.from_numpy(values),
                torch.from_numpy(cpu_logprobs.token_ranks(scores, lse, sampled)),
            )

        @staticmethod
        def compute_logprobs(logits):
            return torch.from_numpy(cpu_logprobs.log_softmax(rows(logits)))

        @staticmethod
        def gather_logprobs(logprobs, num_logprobs, token_ids):
            scores, tokens = rows(logprobs), token_ids.numpy()
            lse = np.zeros(len(scores))
            ids, values = cpu_logprobs.top_logprobs(scores, lse, num_logprobs)
            own = cpu_logprobs.token_logprobs(scores, lse, tokens[:, None])
            return LogprobsTensors(
                torch.from_numpy(np.concatenate([tokens[:, None], ids], axis=1).astype(np.int32)),
                torch.from_numpy(np.concatenate([own, values], axis=1)),
                torch.from_numpy(cpu_logprobs.token_ranks(scores, lse, tokens)),
            )

    return DetSampler


def _make_sample(original: Any) -> Any:
    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        if spec_decode_metadata is not None:
            raise UnsupportedError(
                "speculative decoding in the V1 model runner",
                "its verification draws from a global generator",
                "start the engine without --speculative-config",
            )
        num_reqs = self.input_batch.num_reqs
        self.sampler.det_seeds = row_seeds(self)
        self.sampler.det_positions = self.optimistic_seq_lens_cpu[:num_reqs].numpy().astype(np.int64)
        # Every request has a seed here, so the host gave each a torch generator.  Nothing draws from them, and
        # the host rewinds them after a prefill chunk, which a CPU generator answers with an error.
        self.input_batch.generators.clear()
        try:
            return original(self, logits, spec_decode_metadata)
        finally:
            self.sampler.det_seeds = self.sampler.det_positions = None

    return _sample


def _hide_llvmlite(original: Any) -> Any:
    def _rebind_kernels(*args: Any, **kwargs: Any) -> Any:
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("llvmlite")}
        try:
            return original(*args, **kwargs)
        finally:
            sys.modules.update(hidden)

    return _rebind_kernels


def _patch_runner(_module: Any = None) -> None:
    global _class
    _class = _class or make_sampler_class()
    replace("vllm.v1.worker.gpu_model_runner:Sampler", _class)
    wrap("vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample", _make_sample)


def install(config: DetConfig) -> None:
    """Replace the V1 sampler once the V1 model runner is imported; idempotent, the last configuration counts.

    The front end never imports that module, so there this costs nothing.

    Raises:
        HostError: an upstream symbol is gone (raised from the import of the model runner if that comes later).
    """
    global _config
    _config = config
    wrap("vllm.triton_utils.dispatcher:_rebind_kernels", _hide_llvmlite)
    if "vllm.v1.worker.gpu_model_runner" in sys.modules:
        _patch_runner()
    else:
        when_imported("vllm.v1.worker.gpu_model_runner")(_patch_runner)
