"""Settings: what is refused, and how; reading and writing them as plain values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import yaml
from hypothesis import given

from loco_fsdp import LoCoConfig
from strategies import configs

NUMBER = "wanted a number from"
BAD: list[tuple[str, Any, str]] = [
    ("bits", 3, "wanted one of 4, 8"),
    ("bits", "4", "wanted one of 4, 8"),
    ("bits", 4.0, "wanted one of 4, 8"),
    ("bits", None, "wanted one of 4, 8"),
    ("bits", [4], "wanted one of 4, 8"),
    ("block_size", 14, "wanted an integer, 16 to 8192"),
    ("block_size", 8194, "wanted an integer, 16 to 8192"),
    ("block_size", 129, "wanted an even number, 16 to 8192"),
    ("block_size", 128.0, "wanted an integer, 16 to 8192"),
    ("block_size", True, "wanted an integer, 16 to 8192"),
    ("residual_checkpoint", "all", "wanted one of 'mean', 'exact', 'none'"),
    ("residual_checkpoint", None, "wanted one of 'mean', 'exact', 'none'"),
    ("residual_checkpoint_dtype", "int8", "wanted one of 'bfloat16', 'float32'"),
    ("scale", "Block", "wanted one of 'block', 'static'"),
    ("scale", None, "wanted one of 'block', 'static'"),
    ("static_scale", 0.0, NUMBER),
    ("static_scale", -1.0, NUMBER),
    ("static_scale", math.nan, NUMBER),
    ("static_scale", math.inf, NUMBER),
    ("static_scale", "1", NUMBER),
    ("static_residual_scale", 2.0**61, NUMBER),
    ("static_residual_scale", True, NUMBER),
    ("feedback", "moving-average", "wanted one of 'moving_average', 'classic', 'none'"),
    ("feedback", None, "wanted one of 'moving_average', 'classic', 'none'"),
    ("feedback", False, "wanted one of 'moving_average', 'classic', 'none'"),
    ("feedback_gain", 0.0, NUMBER),
    ("feedback_gain", 1.0001, NUMBER),
    ("feedback_gain", -0.2, NUMBER),
    ("feedback_gain", math.nan, NUMBER),
    ("feedback_gain", None, NUMBER),
    ("residual_dtype", "float16", "wanted one of 'int8', 'bfloat16', 'float32'"),
    ("residual_dtype", 8, "wanted one of 'int8', 'bfloat16', 'float32'"),
    ("reset_interval", -1, "wanted an integer, 0 or more"),
    ("reset_interval", 1.5, "wanted an integer, 0 or more"),
    ("warmup_steps", -1, "wanted an integer, 0 or more"),
    ("warmup_steps", None, "wanted an integer, 0 or more"),
    ("min_numel", -4096, "wanted an integer, 0 or more"),
    ("min_numel", "4096", "wanted an integer, 0 or more"),
    ("skip", "lm_head", "wanted a tuple of name patterns"),
    ("skip", ("lm_head", 3), "wanted a tuple of name patterns"),
    ("skip", None, "wanted a tuple of name patterns"),
    ("skip", 7, "wanted a tuple of name patterns"),
    ("skip", {"lm_head": True}, "wanted a tuple of name patterns"),
    ("skip", iter(["lm_head"]), "wanted a tuple of name patterns"),
    ("error_stats", 1, "wanted one of False, True"),
    ("error_stats", "yes", "wanted one of False, True"),
]


def from_mapping(**settings: Any) -> LoCoConfig:
    return LoCoConfig.from_dict(settings)


@pytest.mark.parametrize("build", [LoCoConfig, from_mapping])
@pytest.mark.parametrize(("name", "value", "wanted"), BAD, ids=lambda v: str(v)[:24])
def test_bad_value_is_refused(
    build: Callable[..., LoCoConfig], name: str, value: Any, wanted: str
) -> None:
    """By name, value found and values allowed; from a mapping just as from keywords."""
    with pytest.raises(ValueError) as caught:
        build(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}={value!r}: ")
    assert wanted in message


def test_every_setting_has_a_bad_value() -> None:
    """A new setting that is not checked fails here."""
    assert {name for name, _, _ in BAD} == {field.name for field in fields(LoCoConfig)}


def test_limits_themselves_are_allowed() -> None:
    LoCoConfig(block_size=16, feedback_gain=1, reset_interval=0, warmup_steps=0, min_numel=0)
    LoCoConfig(block_size=8192, feedback_gain=2.0**-20, static_scale=2.0**60)
    LoCoConfig(static_residual_scale=2.0**-60, skip=())


def test_defaults_are_those_of_the_definition() -> None:
    config = LoCoConfig()
    assert (config.bits, config.block_size, config.feedback_gain) == (4, 128, 0.2)
    assert (config.scale, config.feedback, config.residual_dtype) == (
        "block",
        "moving_average",
        "int8",
    )


def test_gain_follows_the_feedback_rule() -> None:
    assert LoCoConfig(feedback_gain=0.3).gain == 0.3
    assert LoCoConfig(feedback_gain=0.3, feedback="classic").gain == 1.0
    assert LoCoConfig(feedback_gain=0.3, feedback="none").gain == 0.0


def test_config_cannot_be_changed() -> None:
    config = LoCoConfig()
    with pytest.raises(FrozenInstanceError):
        config.bits = 8  # type: ignore[misc]
    assert hash(replace(config)) == hash(config)
    with pytest.raises(ValueError, match="bits=5"):
        replace(config, bits=5)  # type: ignore[arg-type]


def test_deepspeed_names() -> None:
    """``err_beta`` is 1 - gain, ``reset_T`` the reset interval."""
    config = LoCoConfig.from_dict({"err_beta": 0.8, "reset_T": 1024})
    assert config.feedback_gain == pytest.approx(0.2)
    assert config.reset_interval == 1024
    assert LoCoConfig.from_dict({"err_beta": 0}).gain == 1.0
    assert LoCoConfig.from_dict({"err_beta": 0.75}) == LoCoConfig(feedback_gain=0.25)


@pytest.mark.parametrize("value", [1.0, -0.1, 1.2, "0.8", None, math.nan])
def test_bad_deepspeed_value_is_refused_under_its_own_name(value: Any) -> None:
    with pytest.raises(ValueError, match="err_beta="):
        LoCoConfig.from_dict({"err_beta": value})


def test_bad_reset_interval_of_deepspeed_is_refused() -> None:
    with pytest.raises(ValueError, match="reset_T=-1: wanted an integer, 0 or more"):
        LoCoConfig.from_dict({"reset_T": -1})


@pytest.mark.parametrize(
    "settings",
    [{"err_beta": 0.8, "feedback_gain": 0.2}, {"reset_T": 1024, "reset_interval": 1024}],
)
def test_both_names_of_one_setting_are_refused(settings: dict[str, Any]) -> None:
    """Even when they agree; the error names both."""
    foreign, ours = settings
    with pytest.raises(ValueError, match=f"{foreign} and {ours} are one setting"):
        LoCoConfig.from_dict(settings)


@pytest.mark.parametrize("settings", [{"bit": 4}, {"beta": 0.2, "bits": 4}, {3: 4, "bit": 4}])
def test_unknown_setting_is_refused(settings: dict[Any, Any]) -> None:
    """The error names it and lists what there is, DeepSpeed's names included."""
    with pytest.raises(ValueError, match="no such setting") as caught:
        LoCoConfig.from_dict(settings)
    message = str(caught.value)
    assert all(str(name) in message for name in settings if name != "bits")
    for name in ("bits", "block_size", "feedback_gain", "err_beta", "reset_T"):
        assert name in message.split("Allowed:")[1]


def test_from_dict_leaves_its_argument_alone() -> None:
    settings = {"err_beta": 0.8, "reset_T": 7}
    LoCoConfig.from_dict(settings)
    assert settings == {"err_beta": 0.8, "reset_T": 7}


@given(config=configs(skip=("embed*", "lm_head.weight"), warmup_steps=3, error_stats=True))
def test_settings_survive_every_plain_format(config: LoCoConfig) -> None:
    """Mapping, JSON and YAML: what is read back is equal."""
    settings = config.to_dict()
    assert LoCoConfig.from_dict(settings) == config
    assert LoCoConfig.from_dict(json.loads(json.dumps(settings))) == config
    assert LoCoConfig.from_dict(yaml.safe_load(yaml.safe_dump(settings))) == config


def test_yaml_list_becomes_a_tuple() -> None:
    """So that the config stays hashable and equal to one written in Python."""
    config = LoCoConfig.from_dict(yaml.safe_load("{skip: [embed*, lm_head.weight], bits: 8}"))
    assert config.skip == ("embed*", "lm_head.weight")
    assert config == LoCoConfig(skip=("embed*", "lm_head.weight"), bits=8)
    assert isinstance(hash(config), int)
