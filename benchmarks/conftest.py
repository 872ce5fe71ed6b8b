"""Options and the session of the kernel benchmarks (``test_kernels.py``)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

STARTED = time.monotonic()
KEY: pytest.StashKey = pytest.StashKey()


def pytest_addoption(parser):
    parser.addoption(
        "--seconds",
        type=float,
        default=110.0,
        help="kernel benchmarks: measure nothing more after these seconds (default: 110; 0: no limit)",
    )


@pytest.fixture(scope="session")
def kernels(request):
    """The run's :class:`kernel_runs.KernelSession`."""
    from kernel_runs import KernelSession

    names = [i.callspec.params["name"] for i in request.session.items if "kernels" in getattr(i, "fixturenames", ())]
    session = KernelSession(list(dict.fromkeys(names)), request.config.getoption("--seconds"), STARTED)
    request.config.stash[KEY] = session
    return session


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config, benchmarks, output_json):
    session = config.stash.get(KEY, None)
    if session is not None:
        output_json["det_plugin"] = session.report()
