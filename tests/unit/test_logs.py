"""The package's records in the host's log."""

import logging

import pytest
import torch

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


def test_a_level_of_the_users_own_stays(loggers):
    host, own = loggers
    handler = Kept()
    host.addHandler(handler)
    host.setLevel(logging.INFO)
    own.setLevel(logging.ERROR)
    logs.share()
    own.info("not wanted")
    own.error("wanted")
    assert handler.said == ["wanted"]


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


def test_a_dtype_that_the_vendor_does_not_pack_is_said_once(monkeypatch, caplog):
    pytest.importorskip("vllm")
    from vllm import _custom_ops

    from det_plugin.host.vllm import linear_cpu

    def fail(*_):
        raise RuntimeError("could not create a primitive descriptor. Run workload with ONEDNN_VERBOSE=all")

    linear_cpu._say_unpacked.cache_clear()
    monkeypatch.setattr(_custom_ops, "_supports_onednn", True)
    monkeypatch.setattr(_custom_ops, "create_onednn_mm", fail)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="vllm.det_plugin")
    for rows in (64, 128, 64):
        assert linear_cpu._prepare_onednn(torch.zeros(rows, 32, dtype=torch.float16)) is None
    [said] = [record.getMessage() for record in caplog.records]
    assert "packs no float16 weights here" in said
    assert said.endswith("(could not create a primitive descriptor)")
