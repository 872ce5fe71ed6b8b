"""What the command lines of ``det-plugin verify`` and ``python -m det_plugin.test_deterministic`` share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from det_plugin.errors import ConfigError
from det_plugin.terminal import check_writable
from det_plugin.verify.options import VerifyOptions
from det_plugin.verify.runner import run_verification

_OPTION_NAMES = {"test_modes": "test-mode", "temperatures": "temperature"}
"""Fields whose option is called differently."""


def numbers(name: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    """Split ``text`` at commas and convert every part.

    Raises:
        ConfigError: naming the option and the part that could not be converted.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        values = [kind(part) for part in parts]
    except ValueError:
        values = []
    if not values:
        raise ConfigError(f"{name}: got {text!r}, accepts numbers separated by commas")
    return values


def seed(text: str) -> int | None:
    """``--sampling-seed``: a number, or ``none``.

    Raises:
        ConfigError: neither.
    """
    if text.strip().lower() == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--sampling-seed: got {text!r}, accepts a whole number or 'none'") from None


def build_options(**values: Any) -> VerifyOptions:
    """Make :class:`VerifyOptions`; entries that are None keep their default.

    Raises:
        ConfigError: one line that names the option, what it got and what is wrong.
    """
    try:
        return VerifyOptions(**values)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0]) if first["loc"] else "?"
        name = "--" + _OPTION_NAMES.get(field, field).replace("_", "-")
        raise ConfigError(f"{name}: got {first['input']!r}; {first['msg']}") from None


def execute(options: VerifyOptions, *, json_file: Path | None = None, html_file: Path | None = None) -> int:
    """Run a verification on the terminal and write its files.

    Returns:
        The exit status: 0 same, 1 different, 2 not tested.

    Raises:
        ConfigError: a file cannot be written; nothing was sent then.
    """
    check_writable("--json", json_file)
    check_writable("--html", html_file)
    result = run_verification(options, echo=lambda line: print(line, flush=True), progress=True)
    try:
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            json_file.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
        if html_file is not None:
            from det_plugin.evidence.report import write_report

            write_report(html_file, {result.server.get("model") or result.base_url: result})
    except OSError as error:
        print(f"cannot write the result: {error}", file=sys.stderr)
        return max(result.exit_code, 2)
    return result.exit_code
