"""``default_seed: "random"``: every answer says which seed was drawn for it.

Read in vLLM 0.32.0.  Wraps:

- ``create_completion``, ``create_chat_completion``, ``create_batch_chat_completion`` and ``create_responses``: a
  request without a seed gets a drawn one, as if its sender had written it, so that sending it again with that
  seed repeats the whole answer.  An answer that isn't streamed carries it as the field ``sampling_seed``, the one
  of a batch file too;
- ``init_entrypoints_middleware`` as ``vllm.entrypoints.launchers.app`` calls it: the HTTP header
  ``x-sampling-seed``, of streamed answers as well.

Requests that don't come through these routes are served by :func:`det_plugin.host.vllm.seeds.resolve`, which
writes the seed to the log.
"""

from __future__ import annotations

import secrets
from typing import Any

from det_plugin.host.vllm.patching import wrap
from det_plugin.host.vllm.switch import section_of
from det_plugin.sampling.seeds import SEED_MAX

FIELD = "sampling_seed"
"""Field of answers; requests may send it back under the same name."""

HEADER = "x-sampling-seed"

_ROUTES = (
    "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.create_completion",
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.create_chat_completion",
    "vllm.entrypoints.openai.chat_completion.batch_serving:OpenAIServingChatBatch.create_batch_chat_completion",
    "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.create_responses",
)


def draw() -> int:
    """A fresh seed, 0 to 2**63 - 1."""
    return secrets.randbelow(SEED_MAX + 1)


def _states_a_seed(request: Any) -> bool:
    extra = getattr(request, "model_extra", None) or {}
    xargs = getattr(request, "vllm_xargs", None) or extra.get("vllm_xargs") or {}
    return any(value is not None for value in (request.seed, extra.get(FIELD), xargs.get(FIELD)))


def _recorded(original: Any) -> Any:
    async def create(self: Any, request: Any, raw_request: Any = None, *args: Any, **kwargs: Any) -> Any:
        config = section_of(self.engine_client.vllm_config)
        if config is None or config.default_seed != "random" or _states_a_seed(request):
            return await original(self, request, raw_request, *args, **kwargs)
        request.seed = seed = draw()
        if raw_request is not None:
            raw_request.state.det_sampling_seed = seed
        answer = await original(self, request, raw_request, *args, **kwargs)
        if hasattr(answer, "model_dump") and not hasattr(answer, "error"):  # neither a stream nor a refusal
            setattr(answer, FIELD, seed)
        return answer

    return create


class SeedHeader:
    """ASGI middleware: the drawn seed as a header of the answer."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})

        async def with_header(message: Any) -> None:
            if message["type"] == "http.response.start" and "det_sampling_seed" in state:
                value = str(state["det_sampling_seed"]).encode()
                message["headers"] = [*message.get("headers", ()), (HEADER.encode(), value)]
            await send(message)

        await self.app(scope, receive, with_header)


def _with_header(original: Any) -> Any:
    def init_entrypoints_middleware(args: Any, app: Any, *rest: Any, **kwargs: Any) -> Any:
        app.add_middleware(SeedHeader)
        return original(args, app, *rest, **kwargs)

    return init_entrypoints_middleware


def install() -> None:
    """Install the record; idempotent.  Engines of this process with a fixed default seed are left alone.

    Raises:
        HostError: an upstream symbol is gone.
    """
    for route in _ROUTES:
        wrap(route, _recorded)
    wrap("vllm.entrypoints.launchers.app:init_entrypoints_middleware", _with_header)
