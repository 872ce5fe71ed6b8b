"""The switch: flag, keyword, ``additional_config`` and environment, folded into the host's own configuration.

Replaced symbols (read in vLLM 0.32.0): ``EngineArgs.__init__`` and ``AsyncEngineArgs.__init__`` (one more
keyword), ``EngineArgs.add_cli_args`` (one more flag), ``EngineArgs.from_cli_args`` (passes it on),
``EngineArgs.create_engine_config`` (refuses what is not proven), ``WorkerBase.__init__`` (installs the
operators in processes whose configuration asks for them).
"""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from det_plugin.config import SECTION, DetConfig, resolve
from det_plugin.errors import ConfigError, DetPluginError
from det_plugin.host.vllm import refusal

KEYWORD = "enable_deterministic_inference"
FLAG = "--enable-deterministic-inference"
ARG_UTILS = "vllm.engine.arg_utils"

BACKEND_ALIASES = {"triton": "TRITON_ATTN", "fa3": "FLASH_ATTN", "flashinfer": "FLASHINFER"}
"""Short names accepted by ``--attention-backend`` beside vLLM's own."""

_flag_from_cli: ContextVar[bool | None] = ContextVar("det_plugin_flag", default=None)


def install_on_import() -> None:
    """Wrap the engine arguments as soon as their module is imported (it may be half imported now)."""
    module = sys.modules.get(ARG_UTILS)
    if module is None:
        import wrapt

        wrapt.register_post_import_hook(lambda _: install(), ARG_UTILS)
    elif hasattr(module, "AsyncEngineArgs") and hasattr(module, "EngineArgs"):
        install()
    else:
        _install_on_first_use(module)


def _install_on_first_use(module: types.ModuleType) -> None:
    """The module is being executed: install when its classes are first taken from it."""

    class Pending(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            if name in {"EngineArgs", "AsyncEngineArgs"}:
                spec = object.__getattribute__(self, "__spec__")
                if not getattr(spec, "_initializing", False):
                    object.__setattr__(self, "__class__", types.ModuleType)
                    install()
            return object.__getattribute__(self, name)

    module.__class__ = Pending


def install() -> None:
    """Add the switch to the host's engine arguments; idempotent."""
    from det_plugin.host.vllm.patching import wrap

    for cls in ("EngineArgs", "AsyncEngineArgs"):
        wrap(f"{ARG_UTILS}:{cls}.__init__", _with_keyword)
    wrap(f"{ARG_UTILS}:EngineArgs.add_cli_args", _with_flag)
    wrap(f"{ARG_UTILS}:EngineArgs.from_cli_args", _with_flag_value)
    wrap(f"{ARG_UTILS}:EngineArgs.create_engine_config", _with_guards)
    wrap("vllm.v1.worker.worker_base:WorkerBase.__init__", _with_activation)


def section_of(vllm_config: Any) -> DetConfig | None:
    """The enabled plugin configuration inside a host configuration, or None."""
    additional = getattr(vllm_config, "additional_config", None)
    if not isinstance(additional, dict) or SECTION not in additional:
        return None
    config = DetConfig.from_section(additional[SECTION])
    return config if config.enable else None


def _with_keyword(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        flag = kwargs.pop(KEYWORD, None)
        if flag is not None and not isinstance(flag, bool):
            raise ConfigError(f"{KEYWORD}: got {flag!r}, accepts True or False")
        if flag is None:
            flag = _flag_from_cli.get()
        config = resolve(flag, kwargs.get("additional_config"))
        if config is not None:
            additional = kwargs.get("additional_config") or {}
            if not isinstance(additional, dict):
                import json

                additional = json.loads(additional) if isinstance(additional, str) else dict(additional)
            kwargs["additional_config"] = {**additional, SECTION: config.as_section()}
            kwargs.update(_without_aliases(kwargs))
        with explained(config is not None, model=kwargs.get("model")):
            original(self, *args, **kwargs)

    return __init__


def _with_flag(original: Any) -> Any:
    def add_cli_args(parser: Any) -> Any:
        parser = original(parser)
        group = parser.add_argument_group(
            title="DeterministicInference",
            description="det_plugin: the same request gets the same token ids and logprobs, bit for bit.",
        )
        group.add_argument(
            FLAG,
            action=argparse.BooleanOptionalAction,
            default=None,
            help="Return the same token ids and logprobs for the same request, bit for bit, whatever shares "
            "its batch, whatever the caches hold, however the engine schedules.",
        )
        _explain_refusals()
        return parser

    return add_cli_args


def _without_aliases(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that name an attention backend by one of our short names, in the host's own spelling."""

    def own(name: Any) -> Any:
        return BACKEND_ALIASES.get(name.lower(), name) if isinstance(name, str) else name

    found = {}
    if isinstance(kwargs.get("attention_backend"), str):
        found["attention_backend"] = own(kwargs["attention_backend"])
    config = kwargs.get("attention_config")
    if isinstance(config, dict) and isinstance(config.get("backend"), str):
        found["attention_config"] = {**config, "backend": own(config["backend"])}
    return found


_EXPECTED = (ValueError, OSError, ImportError, RuntimeError, NotImplementedError)
"""What the host raises for arguments it cannot serve; anything else keeps its stack trace."""


@contextmanager
def explained(on: bool, model: Any = None) -> Iterator[None]:
    """Give an error of the host a line of its own, which the command line shows in place of a stack trace.

    The error itself stays what it is, for callers from Python.
    """
    try:
        yield
    except Exception as error:
        if on and isinstance(error, _EXPECTED) and not isinstance(error, DetPluginError):
            with suppress(AttributeError):
                error.__det_plugin__ = _one_line(error, model)  # type: ignore[attr-defined]
        raise


def _one_line(error: Exception, model: Any) -> str:
    text = str(error).strip()
    details = getattr(error, "errors", None)
    if callable(details):  # pydantic's ValidationError: its text carries type names and a link
        with suppress(Exception):
            text = "; ".join(
                ".".join(map(str, (getattr(error, "title", ""), *e["loc"])))
                + ": "
                + str(e["msg"]).removeprefix("Value error, ")
                for e in details()
            )
    text = " ".join(text.split()) or type(error).__name__
    if isinstance(model, str) and _not_found(error):
        return (
            f"model: got {model!r}, accepts a folder that holds config.json, or the name of a model that this "
            f"machine has or can download ({text})"
        )
    return text


def _not_found(error: Exception) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    missing = {"HFValidationError", "LocalEntryNotFoundError", "RepositoryNotFoundError", "GatedRepoError"}
    text = str(error)
    return bool(names & missing) or "Invalid repository ID" in text or "valid model identifier" in text


def _reason(error: BaseException) -> str:
    """The line that explains an error: our own anywhere in its chain, else the one that :func:`explained` gave."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for link in chain:
        if isinstance(link, DetPluginError):
            return str(link)
    return next((link.__det_plugin__ for link in chain if hasattr(link, "__det_plugin__")), "")


def _explain_refusals() -> None:
    """On the command line a refusal is one clear line without a stack trace, and the exit code is not zero."""
    previous = sys.excepthook
    if getattr(previous, "det_plugin", False):
        return

    def excepthook(kind: Any, error: BaseException, trace: Any) -> None:
        if reason := _reason(error):
            print(f"error: {reason}", file=sys.stderr, flush=True)
            return
        previous(kind, error, trace)
        if reason := refusal.read():
            print(f"error: {reason}", file=sys.stderr, flush=True)

    excepthook.det_plugin = True  # type: ignore[attr-defined]
    sys.excepthook = excepthook


def _with_flag_value(original: Any) -> Any:
    def from_cli_args(cls: Any, args: argparse.Namespace) -> Any:
        token = _flag_from_cli.set(getattr(args, KEYWORD, None))
        try:
            return original(cls, args)
        finally:
            _flag_from_cli.reset(token)

    return from_cli_args


def _with_guards(original: Any) -> Any:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        additional = self.additional_config
        config = resolve(None, additional) if isinstance(additional, dict) and SECTION in additional else None
        if config is None:
            return original(self, *args, **kwargs)
        from det_plugin.host.vllm import activation

        with explained(True, model=self.model):
            activation.prepare(self, config)
            vllm_config = original(self, *args, **kwargs)
        activation.activate_front_end(vllm_config, config)
        refusal.prepare()
        return vllm_config

    return create_engine_config


_REFUSING_STEPS = ("init_device", "load_model", "initialize_from_config")
"""Methods of a worker during which layers are checked and schedules certified."""


def _with_activation(original: Any) -> Any:
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        from det_plugin.host.vllm import activation

        config = section_of(vllm_config)
        with refusal.told():
            activation.activate_worker(vllm_config, config)
        original(self, vllm_config, *args, **kwargs)
        for name in _REFUSING_STEPS if config is not None else ():
            if hasattr(self, name):
                setattr(self, name, refusal.telling(getattr(self, name)))

    return __init__
