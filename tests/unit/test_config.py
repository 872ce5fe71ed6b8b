"""The one configuration object and the combination of switches."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_plugin import ConfigError, DetConfig
from det_plugin.config import ENABLE_ENV, INT64_MAX, SECTION, env_switch, resolve


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch):
    monkeypatch.delenv(ENABLE_ENV, raising=False)


def test_defaults():
    assert DetConfig().as_section() == {
        "enable": True,
        "default_seed": 42,
        "noise_scope": "seed",
        "tp_invariant": False,
        "certificates": "auto",
    }


def test_section_is_json_and_comes_back():
    config = DetConfig(default_seed=INT64_MAX, noise_scope="prompt", certificates="require")
    assert DetConfig.from_section(json.loads(json.dumps(config.as_section()))) == config
    assert DetConfig.from_section(config) is config


def test_it_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        DetConfig().default_seed = 3  # type: ignore[misc]


@given(st.integers(0, INT64_MAX))
def test_every_seed_is_accepted(seed):
    assert DetConfig.from_section({"default_seed": seed}).default_seed == seed


@pytest.mark.parametrize("seed", [-1, INT64_MAX + 1, 1.0, 1.5, "7", "rnd", True, None, [1], float("nan")])
def test_other_seeds_are_refused(seed):
    with pytest.raises(ConfigError, match=r"default_seed: got .*accepts an integer from 0 to 9223372036854775807"):
        DetConfig.from_section({"default_seed": seed})


@pytest.mark.parametrize("value", [None, 1, "true", [True], 0.5])
def test_a_section_of_another_type_is_refused(value):
    with pytest.raises(ConfigError, match=r"additional_config\['det_plugin'\]: got "):
        DetConfig.from_section(value)


@pytest.mark.parametrize("field", ["enable", "tp_invariant"])
@pytest.mark.parametrize("value", ["yes", 1, None, 0.0])
def test_booleans_are_booleans(field, value):
    with pytest.raises(ConfigError, match=field):
        DetConfig.from_section({field: value})


def test_several_faults_are_all_told():
    with pytest.raises(ConfigError) as caught:
        DetConfig.from_section({"default_seed": -1, "noise_scope": "x", "nope": 1})
    for name in ("default_seed", "noise_scope", "nope", "known fields"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "value"),
    [("1", True), (" TRUE ", True), ("on", True), ("0", False), ("No", False), ("", False), (None, None)],
)
def test_variable(monkeypatch, raw, value):
    if raw is not None:
        monkeypatch.setenv(ENABLE_ENV, raw)
    assert env_switch() is value


@pytest.mark.parametrize("raw", ["2", "maybe", "enable", "-1"])
def test_variable_that_is_neither(monkeypatch, raw):
    monkeypatch.setenv(ENABLE_ENV, raw)
    with pytest.raises(ConfigError, match=ENABLE_ENV):
        env_switch()


SECTIONS = {"absent": None, "on": {}, "true": True, "off": False, "disabled": {"enable": False}}


@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("variable", [None, "1", "0"])
def test_truth_table(monkeypatch, flag, section, variable):
    """Any explicit switch decides; two that contradict each other are refused."""
    if variable is not None:
        monkeypatch.setenv(ENABLE_ENV, variable)
    value = SECTIONS[section]
    additional = {} if section == "absent" else {SECTION: value}
    said = {flag} if flag is not None else set()
    if section != "absent":
        said.add(section in ("on", "true"))
    if variable is not None:
        said.add(variable == "1")
    if len(said) > 1:
        with pytest.raises(ConfigError, match="conflicting switches"):
            resolve(flag, additional)
    else:
        config = resolve(flag, additional)
        assert (config is not None) is (said == {True})
        assert config is None or config == DetConfig()


@pytest.mark.parametrize("additional", [None, {}, "{}", {"other": 1}, "null"])
def test_off_is_the_default(additional):
    assert resolve(None, additional) is None


@pytest.mark.parametrize("additional", ['{"det_plugin": {"default_seed": 7}}', {SECTION: {"default_seed": 7}}])
def test_section_as_text_or_mapping(additional):
    assert resolve(None, additional) == DetConfig(default_seed=7)


@pytest.mark.parametrize("additional", [[1], 7, "x", '"x"', "[1]"])
@pytest.mark.parametrize("flag", [True, None])
def test_additional_config_of_another_type(monkeypatch, additional, flag):
    """Refused where the switch is on; the host's own affair where it is off."""
    if flag is None and additional != "x":
        assert resolve(None, additional) is None
        monkeypatch.setenv(ENABLE_ENV, "1")
    with pytest.raises(ConfigError, match="additional_config"):
        resolve(flag, additional)
