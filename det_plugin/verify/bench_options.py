"""What ``det-plugin bench`` measures: the suites, and the command line read into options."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from det_plugin.errors import ConfigError
from det_plugin.verify.bench_load import Case
from det_plugin.verify.bench_report import kind_of
from det_plugin.verify.bench_servers import KINDS, gpu_facts

SUITES: dict[str, dict[str, Any]] = {
    "cpu": {
        "concurrency": [1, 8, 32],
        "prompt_tokens": 64,
        "output_tokens": 48,
        "prefill_prompts": 8,
        "prefill_tokens": 512,
        "context_tokens": 0,
        "poisson_seconds": 0.0,
        "prompts": "text",
    },
    "gpu": {
        "concurrency": [1, 8, 64, 256],
        "prompt_tokens": 512,
        "output_tokens": 256,
        "prefill_prompts": 32,
        "prefill_tokens": 4096,
        "context_tokens": 30_000,
        "poisson_seconds": 20.0,
        "prompts": "random",
    },
}
"""Sizes of each suite; 0 leaves a kind of case out."""

CONTEXT_CONCURRENCY = (1, 4)
CONTEXT_OUTPUT = 128


def _may_be_a_model(name: str) -> bool:
    """False for what is certainly none: an empty name, a path to nothing, a folder or file of something else."""
    path = Path(name)
    if not name.strip():
        return False
    if path.is_dir():
        return any((path / file).exists() for file in ("config.json", "params.json"))
    if path.exists():
        return path.suffix == ".gguf"
    return not name.startswith(("/", "./", "../", "~"))


@dataclass
class BenchOptions:
    """What to measure; see ``det-plugin bench --help``.  None: the suite's value."""

    variants: list[str] = field(default_factory=list)
    urls: dict[str, str] = field(default_factory=dict)
    model: str | None = None
    out: Path | None = None
    suite: str | None = None
    cases_filter: list[str] = field(default_factory=list)
    rounds: int = 5
    limit: float | None = None
    concurrency: list[int] | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    prefill_prompts: int | None = None
    prefill_tokens: int | None = None
    context_tokens: int | None = None
    poisson_seconds: float | None = None
    poisson_rate: float | None = None
    prompts: str | None = None
    server_args: list[str] = field(default_factory=list)
    one_at_a_time: bool = False
    restarts: int = 0
    check: bool = True
    timeout: float = 600.0
    commit: str | None = None

    def __post_init__(self) -> None:
        if self.suite is None:
            self.suite = "gpu" if gpu_facts() else "cpu"
        if self.suite not in SUITES:
            raise ConfigError(f"--suite: got {self.suite!r}, accepts {', '.join(SUITES)}")
        for name, value in SUITES[self.suite].items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    @classmethod
    def from_command(
        cls, *, host_only: str | None, servers: str | None, server_args: str, **values: Any
    ) -> BenchOptions:
        """Read the command line's strings.

        Raises:
            ConfigError: naming the option, what it got and what it accepts.
        """
        if (host_only is None) == (servers is None):
            raise ConfigError("give either --host-only (servers to start) or --servers (running ones)")
        options = cls(**values)
        if any(number < 1 for number in options.concurrency or ()):
            raise ConfigError(f"--concurrency: got {options.concurrency}, accepts 1 or above")
        if options.prompts not in ("text", "random"):
            raise ConfigError(f"--prompts: got {options.prompts!r}, accepts text, random")
        if not options.timeout > 0:
            raise ConfigError(f"--timeout: got {options.timeout}, accepts seconds above 0")
        if options.commit is not None and not options.commit.strip():
            raise ConfigError("--commit: got an empty name, accepts a commit")
        if not options.cases():
            known = "; ".join(case.name for case in options.all_cases())
            raise ConfigError(f"--cases: got {options.cases_filter}, no case of suite {options.suite} has it: {known}")
        if servers is not None:
            for part in servers.split(","):
                name, mark, url = part.partition("=")
                if not mark or not name.strip() or not url.strip():
                    raise ConfigError(f"--servers: got {part!r}, accepts NAME=URL")
                if name.strip() in options.urls:
                    raise ConfigError(f"--servers: names {name.strip()!r} twice")
                options.urls[name.strip()] = url.strip()
            options.one_at_a_time = False
            if options.restarts:
                raise ConfigError("--restarts: only servers that are started here (--host-only) can be started again")
        else:
            options._read_variants(host_only or "", server_args)
        if any(case.load == "poisson" for case in options.cases()) and options.poisson_rate is None:
            names = [*options.variants, *options.urls]
            first = names[:1] if options.one_at_a_time else names
            if not any(kind_of(name) == "stock" for name in first):
                raise ConfigError(
                    "mixed arrivals follow the stock server's capacity: measure it (first), or give --poisson-rate"
                )
        return options

    def _read_variants(self, host_only: str, server_args: str) -> None:
        self.variants = list(dict.fromkeys(part.strip() for part in host_only.split(",") if part.strip()))
        for variant in self.variants:
            if variant.partition("@")[0] not in KINDS:
                raise ConfigError(f"--host-only: got {variant!r}, accepts {', '.join(KINDS)}, each with @BACKEND")
        if not self.variants:
            raise ConfigError(f"--host-only: got nothing, accepts {', '.join(KINDS)}")
        if self.model is None:
            from det_plugin.verify.model import ModelError, smollm2

            try:
                self.model = str(smollm2())
            except ModelError as error:
                raise ConfigError(f"--model: not given, and the demo's model can't be had: {error}") from None
        elif not _may_be_a_model(self.model):
            raise ConfigError(
                f"--model: got {self.model!r}, accepts a folder that holds config.json, or the name of a model"
            )
        try:
            self.server_args = shlex.split(server_args)
        except ValueError as error:
            raise ConfigError(f"--server-args: got {server_args!r} ({error})") from None
        if "--skip-tokenizer-init" in self.server_args:
            if self.check:
                raise ConfigError("the check before measuring needs the server's tokenizer: add --no-check")
            if self.prompts == "text":
                raise ConfigError("--prompts text needs the server's tokenizer: use --prompts random")

    def all_cases(self) -> list[Case]:
        """The suite's cases, in the order they are measured."""
        stream = self.suite == "gpu"
        length, new = self.prompt_tokens or 1, self.output_tokens or 2
        cases = [
            # up to four times the tokens at low concurrency on a CPU: steadier timing
            Case(f"decode, {n} concurrent", n, length, new if stream else new * max(1, 4 // n), stream=stream)
            for n in self.concurrency or ()
        ]
        name = f"prefill, {self.prefill_prompts} x {self.prefill_tokens}"
        cases.append(Case(name, self.prefill_prompts or 1, self.prefill_tokens or 1, 1, load="prefill", stream=stream))
        if self.context_tokens:
            for n in CONTEXT_CONCURRENCY:
                name = f"decode at {self.context_tokens} context, {n} concurrent"
                cases.append(Case(name, n, self.context_tokens, CONTEXT_OUTPUT, load="context", stream=True))
        if self.poisson_seconds:
            cases.append(
                replace(self.capacity_case(), name="mixed arrivals", load="poisson", seconds=self.poisson_seconds)
            )
        return cases

    def cases(self) -> list[Case]:
        """Of :meth:`all_cases`, those whose name holds one of the wanted strings (all without any)."""
        wanted = self.cases_filter
        return [case for case in self.all_cases() if not wanted or any(part in case.name for part in wanted)]

    def capacity_case(self) -> Case:
        """The decode case whose rate counts as a server's capacity: 64 concurrent, or the largest below."""
        n = max((n for n in self.concurrency or () if n <= 64), default=64)
        return Case(f"decode, {n} concurrent", n, self.prompt_tokens or 1, self.output_tokens or 2, stream=True)
