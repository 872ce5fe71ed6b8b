"""The package's records in the host's log."""

import logging

import pytest

from det_plugin.host.vllm import logs


@pytest.fixture
def loggers(monkeypatch):
    """The names of two loggers without handlers, in place of the host's and the package's."""
    monkeypatch.setattr(logs, "HOST", "tests_host")
    monkeypatch.setattr(logs, "OWN", "tests_own")
    pair = logging.getLogger("tests_host"), logging.getLogger("tests_own")
    yield pair
    for logger in pair:
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


def test_an_operators_progress_reaches_the_hosts_log(loggers):
    host, own = loggers
    handler = Kept()
    host.addHandler(handler)
    host.setLevel(logging.INFO)
    host.propagate = False
    child = logging.getLogger("tests_own.ops.linear")
    child.info("before")
    logs.share()
    logs.share()
    child.info("after")
    child.debug("too fine")
    assert handler.said == ["after"]
    assert not own.propagate


def test_a_configuration_of_the_users_own_stays(loggers):
    host, own = loggers
    mine = Kept()
    host.addHandler(Kept())
    own.addHandler(mine)
    logs.share()
    assert own.handlers == [mine]
    assert own.propagate


def test_a_host_that_configures_no_logging_leaves_records_to_the_root(loggers):
    _, own = loggers
    logs.share()
    assert not own.handlers
    assert own.propagate
