"""Real servers of a real model, shared by the whole session.

Both servers are eager, report cached tokens, keep prefix caching on and run up to 256 requests at once.  A test
that needs other arguments starts a server of its own with :func:`make_server`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_kit import Probe, take_share_of_cores

from det_plugin.verify.demo import SERVER_ARGS, SERVER_ENV
from det_plugin.verify.model import NAME, smollm2
from det_plugin.verify.server import VllmServer

HERE = Path(__file__).parent
SERVED_NAME = NAME
MANY = ["--max-num-seqs", "256"]
TEST_TIMEOUT = 900


GROUPS = {
    "servers": ("test_known_holes", "test_restart", "test_sampling_http", "test_sampling_modes"),
    "two ranks": ("test_processes", "test_tensor_parallel"),
}
"""Files that one process runs: those that use the session's two servers, so that these exist once, and those whose
engines take two cores."""

FIRST, LAST = (*GROUPS["servers"], "test_invariance"), GROUPS["two ranks"]
"""The longest files start first; engines that take two cores come when the other process is done, or nearly."""


def place(stem: str) -> int:
    """Where a file stands in the order of files."""
    return FIRST.index(stem) if stem in FIRST else len(FIRST) + (stem in LAST)


def pytest_sessionstart() -> None:
    take_share_of_cores()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything below this folder ``e2e``, give it a time limit, and put it in order."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if item.get_closest_marker("timeout") is None and item.get_closest_marker("soak") is None:
                item.add_marker(pytest.mark.timeout(TEST_TIMEOUT))
    items.sort(key=lambda item: place(item.path.stem))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n``: each file in one process, and each group of files in one.

    (``--dist loadgroup`` of pytest-xdist 3.8 does nothing under pytest 9.2, and says nothing either.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            stem = Path(nodeid.partition("::")[0]).stem
            return next((group for group, files in GROUPS.items() if stem in files), stem)

    config.option.loadscopereorder = False
    return Files(config, log)


@pytest.fixture(scope="session")
def model_path() -> Path:
    """Folder of SmolLM2-135M-Instruct, made at the first use."""
    return smollm2()


@pytest.fixture(scope="session")
def log_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the servers' logs go; ``DET_PLUGIN_TEST_LOGS`` keeps them elsewhere."""
    if kept := os.environ.get("DET_PLUGIN_TEST_LOGS"):
        folder = Path(kept)
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def make_server(model_path: Path, log_folder: Path) -> Callable[..., VllmServer]:
    """``make_server(deterministic=..., extra_args=[...], env={...}, model=...)``: a server not yet started.

    ``extra_args`` follow the usual ones, so that they win; use the result as a context manager.
    """
    count = 0

    def make(
        *,
        deterministic: bool,
        extra_args: list[str] | tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        eager: bool = True,
        model: str | os.PathLike[str] | None = None,
        **kwargs,
    ) -> VllmServer:
        nonlocal count
        count += 1
        usual = [argument for argument in SERVER_ARGS if eager or argument != "--enforce-eager"]
        kind = "deterministic" if deterministic else "stock"
        return VllmServer(
            model if model is not None else model_path,
            deterministic=deterministic,
            extra_args=[*usual, *extra_args],
            env={**SERVER_ENV, "VLLM_CPU_KVCACHE_SPACE": "1", **(env or {})},
            log=kwargs.pop("log", log_folder / f"{count:02d}-{kind}.log"),
            **kwargs,
        )

    return make


@pytest.fixture(scope="session")
def stock_server(make_server: Callable[..., VllmServer]) -> Iterator[VllmServer]:
    """vLLM as it comes, without the plugin switched on."""
    with make_server(deterministic=False, extra_args=MANY) as server:
        yield server


@pytest.fixture(scope="session")
def det_server(make_server: Callable[..., VllmServer]) -> Iterator[VllmServer]:
    """The same with ``--enable-deterministic-inference``."""
    with make_server(deterministic=True, extra_args=MANY) as server:
        yield server


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probe]:
    """A process that has imported vLLM and forks a child for each command line, program or engine."""
    found = Probe(tmp_path_factory.mktemp("probe"))
    yield found
    found.close()


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probe]:
    """The same, without vLLM and without the plugin: its children import them themselves."""
    found = Probe(tmp_path_factory.mktemp("bare"), bare=True)
    yield found
    found.close()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Attach the servers' last log lines to a failed test."""
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" and report.failed:
        for name in ("stock_server", "det_server"):
            server = getattr(item, "funcargs", {}).get(name)
            if server is not None:
                report.sections.append((f"{name} log, last lines", server.log_tail(30)))
