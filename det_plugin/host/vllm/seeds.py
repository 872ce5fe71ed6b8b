"""Seeds and request checks, in the process that accepts requests.

Read in vLLM 0.32.0.  Replaces or wraps:

- ``vllm.v1.engine.input_processor.InputProcessor.process_inputs``: checks the request and writes the resolved
  seed into its own copy of the sampling parameters, so that engine and workers see a seed in every request;
- ``vllm.v1.engine.parallel_sampling.ParentRequest._get_child_sampling_params``: seeds of the choices of ``n`` > 1
  (stock adds the index to the seed, and gives every choice of an unseeded request the same parameters);
- ``to_sampling_params`` of the chat, completion, responses, transcription and translation requests, and
  ``to_beam_search_params`` of the first two: the same checks before the response starts, so that streamed
  requests get HTTP 400 too.

A request's seed is ``seed`` (OpenAI field, ``SamplingParams.seed``) or ``sampling_seed`` (``vllm_xargs``,
``SamplingParams.extra_args``, or a field of the HTTP body), else the configured default.
``noise_scope`` ("seed" or "prompt"), in the same places, overrides the configured scope for one request.
"""

from __future__ import annotations

import math
from typing import Any

from det_plugin.config import DetConfig
from det_plugin.host.vllm import drawn_seed
from det_plugin.host.vllm.patching import wrap
from det_plugin.host.vllm.switch import section_of
from det_plugin.sampling.reference import GREEDY_EPS
from det_plugin.sampling.seeds import check_seed, choice_seed, prompt_seed

KNOWN_EXTRA_ARGS = {
    "sampling_seed",
    "noise_scope",
    "kv_transfer_params",
    "ec_transfer_params",
    "kv_cache_report_mode",
}
"""Extra arguments that something reads; plugins may add theirs.  Others are refused, unless the engine has
custom logits processors, which read extra arguments of their own."""

_REQUESTS = (
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",
    "vllm.entrypoints.openai.completion.protocol:CompletionRequest",
    "vllm.entrypoints.openai.responses.protocol:ResponsesRequest",
    "vllm.entrypoints.speech_to_text.transcription.protocol:TranscriptionRequest",
    "vllm.entrypoints.speech_to_text.translation.protocol:TranslationRequest",
)
_RESOLVED = "det_plugin_resolved"
"""Attribute of sampling parameters whose seed was resolved: a stock engine in the same process has none."""

_free_extra_args = False  # set once an engine with custom logits processors is seen


def _refuse(message: str, field: str, value: Any = None) -> Exception:
    from vllm.exceptions import VLLMValidationError

    return VLLMValidationError(message, parameter=field, value=value)


def _checked_seed(value: Any, field: str) -> int:
    try:
        return check_seed(value, field)
    except ValueError as error:
        raise _refuse(str(error), field, value) from None


def explicit_seed(seed: Any, extra_args: dict[str, Any] | None) -> int | None:
    """The seed that a request states, or None.

    Raises:
        VLLMValidationError: out of range, not an integer, or two different ones.
    """
    first = None if seed is None else _checked_seed(seed, "seed")
    other = (extra_args or {}).get("sampling_seed")
    second = None if other is None else _checked_seed(other, "sampling_seed")
    if first is not None and second is not None and first != second:
        raise _refuse(
            f"seed and sampling_seed: got {first} and {second}, accepts one of them, or equal values",
            "sampling_seed",
            second,
        )
    return second if first is None else first


def check_params(params: Any) -> None:
    """Request-level checks on a ``SamplingParams`` beyond the host's own (temperature, top_p, penalties).

    Raises:
        VLLMValidationError: names the field, what it got and what it accepts; HTTP 400.
    """
    explicit_seed(params.seed, params.extra_args)
    check_extra_args(params.extra_args or {})
    _check_bias(params.logit_bias)
    _check_some_token_is_left(params)
    if params.min_p > 0 and params.top_k > 0:
        raise _refuse(
            f"min_p: got {params.min_p} together with top_k {params.top_k}, accepts one of the two; "
            "set min_p to 0 or top_k to 0 (top_k may come from the model's generation config)",
            "min_p",
            params.min_p,
        )


def _check_bias(bias: Any) -> None:
    for token, value in (bias or {}).items():
        if not math.isfinite(value):
            raise _refuse(f"logit_bias: got {value} for token {token}, accepts finite numbers", "logit_bias", value)


def _check_some_token_is_left(params: Any) -> None:
    allowed = params.allowed_token_ids
    if allowed and params.min_tokens > 0 and set(allowed) <= params.all_stop_token_ids:
        raise _refuse(
            f"min_tokens: got {params.min_tokens} with allowed_token_ids that all end the answer, so no token is left; "
            "accepts 0, or further allowed_token_ids",
            "min_tokens",
            params.min_tokens,
        )


def check_extra_args(extra: dict[str, Any]) -> None:
    """Refuse an unknown extra argument and an unknown ``noise_scope``.

    Raises:
        VLLMValidationError: names the argument, what it got and what it accepts; HTTP 400.
    """
    scope = extra.get("noise_scope")
    if scope not in (None, "seed", "prompt"):
        raise _refuse(f"noise_scope: got {scope!r}, accepts 'seed' or 'prompt'", "noise_scope", scope)
    if not _free_extra_args:
        for name in extra:
            if name not in KNOWN_EXTRA_ARGS:
                raise _refuse(
                    f"{name}: unknown extra argument, accepts {', '.join(sorted(KNOWN_EXTRA_ARGS))} "
                    "(others only when the server has custom logits processors)",
                    name,
                )


def resolve(params: Any, prompt_token_ids: Any, request_id: str, config: DetConfig) -> None:
    """Write the resolved seed of a request into its own copy of the sampling parameters."""
    extra = params.extra_args or {}
    seed = explicit_seed(params.seed, extra)
    if seed is None:
        if config.default_seed != "random":
            seed = config.default_seed
        elif params.temperature < GREEDY_EPS:
            seed = 0  # greedy and beam search draw no noise: nothing to record
        else:
            seed = drawn_seed.draw()
            from vllm.logger import init_logger

            init_logger("vllm.det_plugin").info(
                "Request %s gave no seed: drew %d; send seed=%d to repeat the answer.", request_id, seed, seed
            )
    if (extra.get("noise_scope") or config.noise_scope) == "prompt":
        if prompt_token_ids is None:
            raise _refuse(
                "noise_scope: 'prompt' needs the prompt's token ids, got prompt embeddings; accepts 'seed'",
                "noise_scope",
            )
        seed = prompt_seed(seed, prompt_token_ids)
    params.seed = seed
    params.__dict__.pop("sampling_type", None)  # a cached property that depends on the seed
    params.__dict__[_RESOLVED] = True


def _has_custom_processors(processor: Any) -> bool:
    if processor.model_config.logits_processors:
        return True
    from importlib.metadata import entry_points

    return bool(entry_points(group="vllm.logits_processors"))


def _init_processor(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        global _free_extra_args
        original(self, *args, **kwargs)
        _free_extra_args = _has_custom_processors(self)

    return __init__


def _process_inputs(original: Any) -> Any:
    def process_inputs(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.sampling_params import SamplingParams

        config = section_of(self.vllm_config)
        if config is None or not isinstance(params, SamplingParams):
            return original(self, request_id, prompt, params, *args, **kwargs)
        check_params(params)
        request = original(self, request_id, prompt, params, *args, **kwargs)
        _check_some_token_is_left(request.sampling_params)  # now that the model's own end of text is among the stops
        resolve(request.sampling_params, request.prompt_token_ids, request_id, config)
        return request

    return process_inputs


def _child_params(original: Any) -> Any:
    def _get_child_sampling_params(self: Any, index: int) -> Any:
        from copy import copy

        if _RESOLVED not in self.sampling_params.__dict__:
            return original(self, index)
        child = copy(self.sampling_params)
        child.n = 1
        child.seed = choice_seed(self.sampling_params.seed, index)
        child.__dict__.pop("sampling_type", None)
        return child

    return _get_child_sampling_params


def _check_body(request: Any) -> None:
    """Checks on what the host would read otherwise or ignore; the body's seed and scope join the extra arguments."""
    if getattr(request, "seed", None) is not None:  # the host reads -1 as "no seed"
        _checked_seed(request.seed, "seed")
    extra = getattr(request, "model_extra", None) or {}
    best_of, n = extra.get("best_of"), getattr(request, "n", None) or 1
    if best_of is not None and best_of != n:
        raise _refuse(
            f"best_of: got {best_of!r}, accepts n ({n}): this host no longer picks the best of more; ask for them all "
            "with n, with logprobs",
            "best_of",
            best_of,
        )
    _check_bias(getattr(request, "logit_bias", None))  # the host clamps it, NaN to its least value
    for name in ("sampling_seed", "noise_scope"):
        given = extra.get(name)
        if given is None:
            continue
        if name == "sampling_seed":
            given = _checked_seed(given, name)
        xargs = dict(request.vllm_xargs or {})
        if xargs.setdefault(name, given) != given:
            raise _refuse(
                f"{name}: got {given!r} in the body and {xargs[name]!r} in vllm_xargs, "
                "accepts one of them, or equal values",
                name,
                given,
            )
        request.vllm_xargs = xargs


def _to_sampling_params(original: Any) -> Any:
    def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        _check_body(self)
        params = original(self, *args, **kwargs)
        check_params(params)
        return params

    return to_sampling_params


def _to_beam_search_params(original: Any) -> Any:
    def to_beam_search_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        _check_body(self)
        explicit_seed(self.seed, self.vllm_xargs)
        check_extra_args(self.vllm_xargs or {})
        return original(self, *args, **kwargs)

    return to_beam_search_params


def install(config: DetConfig) -> None:
    """Install the seed rules; idempotent.  Each engine of this process follows its own configuration.

    Raises:
        HostError: an upstream symbol is gone.
    """
    wrap("vllm.v1.engine.input_processor:InputProcessor.__init__", _init_processor)
    wrap("vllm.v1.engine.input_processor:InputProcessor.process_inputs", _process_inputs)
    wrap("vllm.v1.engine.parallel_sampling:ParentRequest._get_child_sampling_params", _child_params)
    for request in _REQUESTS:
        wrap(f"{request}.to_sampling_params", _to_sampling_params)
    for request in _REQUESTS[:2]:
        wrap(f"{request}.to_beam_search_params", _to_beam_search_params)
    if config.default_seed == "random":
        drawn_seed.install()
