"""The ``det-plugin`` command line.

Exit status of ``verify``, ``replay`` and ``diff``: 0 same, 1 different, 2 not tested.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from det_plugin import __version__
from det_plugin.errors import ConfigError, DetPluginError
from det_plugin.terminal import check_writable, guarded

app = typer.Typer(
    name="det-plugin",
    help="Bitwise-reproducible inference for vLLM: verify it, measure it, record it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}

BaseUrl = Annotated[str | None, typer.Option(help="http://host:port; replaces --host and --port")]
Host = Annotated[str, typer.Option(help="Host of the server.")]
Port = Annotated[int, typer.Option(help="Port of the server.")]
Model = Annotated[str | None, typer.Option(help="Served model name; the first one when left out.")]
Timeout = Annotated[float, typer.Option(help="Seconds that one request may take, its whole answer included.")]
ApiKey = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Bearer token.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result as JSON.")]


def _url(base_url: str | None, host: str, port: int) -> str:
    if base_url is not None:
        return base_url
    if not host.strip():
        raise ConfigError("--host: got an empty name, accepts a host")
    return f"http://{host}:{port}"


def _guard(action: Callable[[], int]) -> None:
    """Run a command; an expected error is one line on stderr and exit status 2."""
    raise typer.Exit(guarded(action))


def _version(show: bool) -> None:
    if show:
        print(f"det-plugin {__version__}")
        raise typer.Exit()


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def verify(
    base_url: BaseUrl = None,
    host: Host = "localhost",
    port: Port = 8000,
    test_mode: Annotated[
        str, typer.Option(help="single, prefix, radix_cache, p_vs_d, mixed (commas for several), or all.")
    ] = "all",
    quick: Annotated[bool, typer.Option(help="A pass in about a minute on a small CPU server.")] = False,
    n_trials: Annotated[int | None, typer.Option(help="Trials per mode. [default: 50]")] = None,
    n_start: Annotated[int, typer.Option(help="First batch size.")] = 1,
    batch_sizes: Annotated[
        str | None, typer.Option(help="Batch sizes, comma-separated; replaces --n-start and --n-trials.")
    ] = None,
    temperature: Annotated[
        str | None, typer.Option(help="One or more, comma-separated; each mode runs with each. [default: 0]")
    ] = None,
    sampling_seed: Annotated[str, typer.Option(help="Seed of sampled requests; 'none' sends none.")] = "42",
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens per sample. [default: 100]")] = None,
    frequency_penalty: Annotated[float, typer.Option()] = 0.0,
    presence_penalty: Annotated[float, typer.Option()] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Of sampled requests.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Of sampled requests.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Of sampled requests.")] = None,
    top_logprobs: Annotated[int, typer.Option(help="Compare the top k logprobs as well.")] = 0,
    return_logprob: Annotated[bool, typer.Option(help="Accepted; logprobs are always compared.")] = True,
    stream: Annotated[bool, typer.Option(help="Read answers as streams.")] = False,
    prefix_lengths: Annotated[
        str | None, typer.Option(help="Shared prefixes of mode prefix. [default: 1,511,2048,4097]")
    ] = None,
    long_prompt_tokens: Annotated[
        int | None, typer.Option(help="Prompt that joins in mode mixed. [default: 2048]")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests at once in radix_cache and p_vs_d.")] = 8,
    rng_seed: Annotated[int, typer.Option(help="Seed of the verification's own choices.")] = 0,
    model: Model = None,
    timeout: Timeout = 600.0,
    api_key: ApiKey = None,
    json_file: JsonFile = None,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained report.")] = None,
) -> None:
    """Compare every sample's token ids and logprobs against a running vLLM server."""

    def action() -> int:
        from det_plugin.verify.command import build_options, execute, numbers, seed
        from det_plugin.verify.options import QUICK

        values: dict[str, Any] = dict(QUICK) if quick else {}
        if n_trials is not None:
            values.pop("batch_sizes", None)
        given = {
            "n_trials": n_trials,
            "batch_sizes": None if batch_sizes is None else numbers("--batch-sizes", batch_sizes, int),
            "temperatures": None if temperature is None else numbers("--temperature", temperature, float),
            "max_new_tokens": max_new_tokens,
            "prefix_lengths": None if prefix_lengths is None else numbers("--prefix-lengths", prefix_lengths, int),
            "long_prompt_tokens": long_prompt_tokens,
        }
        values |= {name: value for name, value in given.items() if value is not None}
        options = build_options(
            base_url=_url(base_url, host, port),
            model=model,
            test_modes=[part.strip() for part in test_mode.split(",")],
            n_start=n_start,
            sampling_seed=seed(sampling_seed),
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            top_logprobs=top_logprobs,
            stream=stream,
            concurrency=concurrency,
            rng_seed=rng_seed,
            timeout=timeout,
            api_key=api_key,
            **values,
        )
        return execute(options, json_file=json_file, html_file=html)

    _guard(action)


@app.command()
def record(
    prompts: Annotated[Path, typer.Option(help="One prompt a line, or JSON lines with a prompt field.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Record file to write.")],
    base_url: BaseUrl = None,
    host: Host = "localhost",
    port: Port = 8000,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer, where a line doesn't say.")] = 64,
    temperature: Annotated[float, typer.Option(help="Where a line doesn't say.")] = 0.0,
    sampling_seed: Annotated[str, typer.Option(help="Where a line doesn't say; 'none' sends none.")] = "none",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 8,
    model: Model = None,
    timeout: Timeout = 600.0,
    api_key: ApiKey = None,
) -> None:
    """Send prompts to a server; store requests, answers, exact logprobs and the server's fingerprint."""

    def action() -> int:
        from det_plugin.verify.command import build_options, seed
        from det_plugin.verify.replay import ask_all, load_requests, save

        defaults: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
        number = seed(sampling_seed)
        build_options(temperatures=[temperature], sampling_seed=number)  # the same values are accepted as by verify
        check_writable("--output", output)
        if number is not None:
            defaults["seed"] = number
        recording = ask_all(
            load_requests(prompts, defaults),
            base_url=_url(base_url, host, port),
            model=model,
            concurrency=concurrency,
            timeout=timeout,
            api_key=api_key,
        )
        try:
            save(output, recording)
        except OSError as error:
            raise ConfigError(f"--output: cannot write {output} ({error})") from None
        tokens = sum(len(a.token_ids) for r in recording.records for a in r.answers)
        print(f"recorded {len(recording.records)} requests, {tokens} tokens: {output}")
        return 0

    _guard(action)


@app.command()
def replay(
    recording: Annotated[Path, typer.Argument(help="Record file made by det-plugin record.")],
    base_url: BaseUrl = None,
    host: Host = "localhost",
    port: Port = 8000,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Store the new answers.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 8,
    top_logprobs: Annotated[bool, typer.Option(help="Compare the top logprobs as well.")] = False,
    model: Model = None,
    timeout: Timeout = 600.0,
    api_key: ApiKey = None,
    json_file: JsonFile = None,
) -> None:
    """Send recorded requests again and compare the answers."""

    def action() -> int:
        from det_plugin.evidence.records import read_records
        from det_plugin.verify.replay import ask_all, compare_records, save

        check_writable("--output", output)
        check_writable("--json", json_file)
        old = read_records(recording)
        new = ask_all(
            [(r.id, r.request) for r in old.records],
            base_url=_url(base_url, host, port),
            model=model,
            concurrency=concurrency,
            timeout=timeout,
            api_key=api_key,
        )
        if output is not None:
            try:
                save(output, new)
            except OSError as error:
                raise ConfigError(f"--output: cannot write {output} ({error})") from None
        return _report_diff(compare_records(old, new, names=("recorded", "replayed"), top=top_logprobs), json_file)

    _guard(action)


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="Record file.")],
    second: Annotated[Path, typer.Argument(help="Record file to compare with it.")],
    top_logprobs: Annotated[bool, typer.Option(help="Compare the top logprobs as well.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Compare two record files and print the first divergence."""

    def action() -> int:
        from det_plugin.evidence.records import read_records
        from det_plugin.verify.replay import compare_records

        check_writable("--json", json_file)
        names = (first.name, second.name) if first.name != second.name else (str(first), str(second))
        result = compare_records(read_records(first), read_records(second), names=names, top=top_logprobs)
        return _report_diff(result, json_file)

    _guard(action)


def _report_diff(result: Any, json_file: Path | None) -> int:
    from det_plugin.evidence.results import EXIT_CODES

    for line in result.lines():
        print(line)
    if json_file is not None:
        try:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            json_file.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json: cannot write {json_file} ({error})") from None
    return EXIT_CODES[result.status]


@app.command()
def bench(
    model: Annotated[
        str | None,
        typer.Option(help="Model folder or name, to start servers with; the demo's small model when left out."),
    ] = None,
    host_only: Annotated[
        str | None,
        typer.Option(
            help="Start these on this machine: stock, deterministic, host_batch_invariant, each with an optional "
            "@BACKEND, comma-separated."
        ),
    ] = None,
    servers: Annotated[str | None, typer.Option(help="Or measure running ones: NAME=URL, comma-separated.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write JSON here, and a plot beside it.")] = None,
    suite: Annotated[
        str | None,
        typer.Option(help="Sizes of the cases: cpu, or gpu (streamed, with latencies). (default: by machine)"),
    ] = None,
    cases: Annotated[
        str | None, typer.Option(help="Only cases whose name holds one of these, semicolon-separated.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds, interleaved.")] = 5,
    limit: Annotated[
        float | None,
        typer.Option(min=1, help="Measure nothing that would end later than these seconds (servers start)."),
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(help="Concurrent requests, comma-separated. (default: cpu 1,8,32; gpu 1,8,64,256)")
    ] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="(default: cpu 64; gpu 512)")] = None,
    output_tokens: Annotated[int | None, typer.Option(min=2, help="(default: cpu 48; gpu 256)")] = None,
    prefill_prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts at once in the prefill case. (default: cpu 8; gpu 32)")
    ] = None,
    prefill_tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of each of them. (default: cpu 512; gpu 4096)")
    ] = None,
    context_tokens: Annotated[
        int | None, typer.Option(min=0, help="Context of the long decode cases; 0: none. (default: cpu 0; gpu 30000)")
    ] = None,
    poisson_seconds: Annotated[
        float | None, typer.Option(min=0, help="Seconds of mixed arrivals; 0: none. (default: cpu 0; gpu 20)")
    ] = None,
    poisson_rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests/s of mixed arrivals. (default: 70 % of stock's capacity)")
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(help="text (the server's tokenizer) or random (token ids). (default: cpu text; gpu random)"),
    ] = None,
    server_args: Annotated[str, typer.Option(help="Further arguments of every started server, one string.")] = "",
    one_at_a_time: Annotated[bool, typer.Option(help="Start servers one after another; no interleaving.")] = False,
    restarts: Annotated[
        int, typer.Option(min=0, help="Afterwards start the servers again this often: start-up on warm caches.")
    ] = 0,
    check: Annotated[bool, typer.Option(help="Verify determinism before measuring.")] = True,
    timeout: Timeout = 600.0,
    commit: Annotated[
        str | None,
        typer.Option(help="Commit of the source, for the report. (default: of this checkout, where it has a history)"),
    ] = None,
) -> None:
    """Measure whole-engine speed of servers, deterministic beside stock."""

    def action() -> int:
        from det_plugin.verify.bench import BenchOptions, run_bench
        from det_plugin.verify.command import numbers

        check_writable("--out", out, regular=True)
        return run_bench(
            BenchOptions.from_command(
                model=model,
                host_only=host_only,
                servers=servers,
                out=out,
                suite=suite,
                cases_filter=[part.strip() for part in (cases or "").split(";") if part.strip()],
                rounds=rounds,
                limit=limit,
                concurrency=None if concurrency is None else numbers("--concurrency", concurrency, int),
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                prefill_prompts=prefill_prompts,
                prefill_tokens=prefill_tokens,
                context_tokens=context_tokens,
                poisson_seconds=poisson_seconds,
                poisson_rate=poisson_rate,
                prompts=prompts,
                server_args=server_args,
                one_at_a_time=one_at_a_time,
                restarts=restarts,
                check=check,
                timeout=timeout,
                commit=commit,
            )
        )

    _guard(action)


@app.command(context_settings={**PASS_THROUGH, "help_option_names": []})
def demo(context: typer.Context) -> None:
    """Stock and deterministic server side by side, with a report."""

    def action() -> int:
        from det_plugin.verify.demo import main  # type: ignore[import-not-found,import-untyped,unused-ignore]

        return int(main(context.args) or 0)

    _guard(action)


@app.command(context_settings={**PASS_THROUGH, "help_option_names": []})
def doctor(context: typer.Context) -> None:
    """Print what would run here: host, backends, schedules, certificates."""

    def action() -> int:
        from det_plugin.host.vllm.doctor import main  # type: ignore[import-not-found,unused-ignore]

        return int(main(context.args) or 0)

    _guard(action)


@app.command()
def certify(model: Annotated[str, typer.Argument(help="Model folder or name.")]) -> None:
    """Make the certificates of a model ahead of time."""

    def action() -> int:
        from det_plugin.host.vllm.doctor import certify_main  # type: ignore[import-not-found,unused-ignore]

        if not model.strip():
            raise ConfigError("MODEL: got an empty name, accepts a model folder or name")
        try:
            return int(certify_main(model) or 0)
        except DetPluginError:
            raise
        except Exception as error:  # whatever the host raises for a model it cannot load
            raise ConfigError(f"{model} could not be certified: {' '.join(str(error).split())[:300]}") from error

    _guard(action)


if __name__ == "__main__":
    app()
