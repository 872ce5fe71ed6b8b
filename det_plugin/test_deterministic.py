"""``python -m det_plugin.test_deterministic``: SGLang's argument names and defaults, against a vLLM server.

Exit status: 0 same, 1 different, 2 not tested.  ``det-plugin verify`` is the same with more options.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from det_plugin.terminal import guarded
from det_plugin.verify.command import build_options, execute, numbers, seed

__test__ = False  # a command, not a pytest module

MODES = ("single", "prefix", "radix_cache", "p_vs_d", "mixed", "all")


def parser() -> argparse.ArgumentParser:
    """The argument parser."""
    result = argparse.ArgumentParser(
        prog="python -m det_plugin.test_deterministic",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add: Any = result.add_argument
    add("--host", default="localhost")
    add("--port", type=int, default=30000)
    add("--n-trials", type=int, default=50)
    add("--n-start", type=int, default=1)
    add("--temperature", default="0.0", help="one value, or several separated by commas")
    add("--sampling-seed", default="42", help="seed of sampled requests; 'none' sends none")
    add("--max-new-tokens", type=int, default=100)
    add("--frequency-penalty", type=float, default=0.0)
    add("--presence-penalty", type=float, default=0.0)
    add("--return-logprob", action="store_true", help="accepted; logprobs are always compared")
    add("--stream", action="store_true", help="read answers as streams")
    add("--test-mode", choices=MODES, default="single")
    add("--model", default=None, help="served model name; the first one when left out")
    add("--rng-seed", type=int, default=0, help="seed of the test's own choices")
    add("--timeout", type=float, default=600.0, help="seconds that one request may take")
    add("--json", type=Path, default=None, metavar="FILE", help="write the result as JSON")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the test; returns the exit status."""
    args = parser().parse_args(argv)

    def action() -> int:
        options = build_options(
            base_url=f"http://{args.host}:{args.port}",
            model=args.model,
            test_modes=[args.test_mode],
            n_trials=args.n_trials,
            n_start=args.n_start,
            temperatures=numbers("--temperature", args.temperature, float),
            sampling_seed=seed(args.sampling_seed),
            max_new_tokens=args.max_new_tokens,
            frequency_penalty=args.frequency_penalty,
            presence_penalty=args.presence_penalty,
            stream=args.stream,
            rng_seed=args.rng_seed,
            timeout=args.timeout,
        )
        return execute(options, json_file=args.json)

    return guarded(action, prefix="not tested: ")


if __name__ == "__main__":
    sys.exit(main())
