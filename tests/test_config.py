"""HOTConfig: presets as spec.md has them, errors that say what to write, storage that gives back the same."""

import json
from dataclasses import fields

import pytest
import torch
from torch import nn

from hot_hf import HOTConfig, apply_hot
from hot_hf.config import CONFIG_NAME, PRESETS
from hot_hf.plan import Plan

# spec.md, section 8: g_x, and the kept activation.
PRESET_PLANS = {
    "default": Plan(8, "per_token", "ht_int4", 8, "per_feature", 16, "nearest"),
    "paper": Plan(4, "lqs", "hla_int8", 8, "per_tensor", 16, "pseudo_stochastic"),
    "fast": Plan(4, "per_token", "hla_int8", 8, "per_feature", 16, "nearest"),
    "smallest": Plan(8, "per_token", "hla_int4", 8, "per_feature", 16, "nearest"),
}


@pytest.mark.parametrize("name", PRESET_PLANS)
def test_presets(name):
    config = HOTConfig.from_preset(name)
    assert config.plan() == PRESET_PLANS[name]
    method = HOTConfig if name == "default" else getattr(HOTConfig, name)
    assert method() == config == HOTConfig.coerce(name)
    assert method(seed=3, rank=4).rank == HOTConfig.from_preset(name, rank=4).rank == 4
    assert set(PRESETS) == set(PRESET_PLANS)


def test_fields_carry_help():
    for f in fields(HOTConfig):
        assert len(f.metadata["help"]) > 15, f.name


BAD_VALUES = [
    ("grad_input_bits", 3, r"choose one of \[4, 8, None\]"),
    ("grad_input_bits", "8", "choose one of"),
    ("grad_input_bits", 8.0, "choose one of"),
    ("grad_input_bits", True, "choose one of"),
    ("grad_input_granularity", "per_row", "'per_token', 'per_tensor', 'lqs'"),
    ("activation_format", "int4", "'hla_int8', 'hla_int4', 'ht_int4', 'int8', 'none'"),
    ("activation_format", None, "choose one of"),
    ("rank", 0, "whole number from 1 to 16"),
    ("rank", 17, "whole number from 1 to 16"),
    ("rank", 8.5, "whole number from 1 to 16"),
    ("rank", True, "whole number from 1 to 16"),
    ("grad_weight_granularity", "per_token", "'per_feature', 'per_tensor'"),
    ("block_size", 8, r"\[1, 16, 32, 64, 128\]"),
    ("block_size", 16.0, "choose one of"),
    ("rounding", "up", "'nearest', 'stochastic', 'pseudo_stochastic'"),
    ("seed", -1, "whole number from 0"),
    ("min_features", 0, "at least 1"),
    ("lqs_batches", 0, "at least 1"),
    ("lqs_threshold", 1.5, "number from 0 to 1"),
    ("lqs_threshold", float("nan"), "number from 0 to 1"),
    ("lqs_threshold", True, "number from 0 to 1"),
    ("include", "q_proj", r"list of strings, for example \['\*\.q_proj'\]"),
    ("exclude", [1], "list of strings"),
    ("linear_classes", None, "list of strings"),
    ("skip_heads", 1, "True or False"),
    ("lora", "yes", "True, False, or None"),
    ("share", None, "True or False"),
    ("overrides", ["*.q_proj"], "must map name patterns to settings"),
    ("overrides", {"*.q_proj": {"bits": 4}}, "keys of"),
    ("overrides", {"*.q_proj": 4}, "keys of"),
]


@pytest.mark.parametrize("name, value, remedy", BAD_VALUES, ids=[f"{n}={v}" for n, v, _ in BAD_VALUES])
def test_bad_values(name, value, remedy):
    """Bad input: the field, what was found, and what to write instead."""
    with pytest.raises(ValueError, match=remedy) as error:
        HOTConfig(**{name: value})
    assert f"HOTConfig.{name}" in str(error.value)


def test_bad_override_names_its_pattern():
    with pytest.raises(ValueError, match=r"overrides\['\*\.q_proj'\]: Plan.rank=99 .*1 to 16"):
        HOTConfig(overrides={"*.q_proj": {"rank": 99}})


def test_unknown_preset_and_field():
    with pytest.raises(ValueError, match=r"Unknown HOT preset 'best'; choose one of \['default', 'paper'"):
        HOTConfig.from_preset("best")
    with pytest.raises(ValueError, match="Unknown HOT preset 'best'"):
        apply_hot(nn.Linear(64, 64), "best")
    with pytest.raises(ValueError, match=r"no field \['bits'\]; known fields are.*grad_input_bits"):
        HOTConfig.from_dict({"bits": 4})
    with pytest.raises(TypeError, match="a HOTConfig, a dict or a preset name, not int"):
        apply_hot(nn.Linear(64, 64), 4)


def test_values_assigned_later_are_checked():
    config = HOTConfig()
    config.rank = 99
    model = nn.Linear(64, 64)
    with pytest.raises(ValueError, match="rank=99"):
        apply_hot(model, config)
    assert type(model) is nn.Linear


def test_plan_labels_and_overrides():
    """The last matching override wins; labels name what matters."""
    config = HOTConfig(overrides={"*.q": {"rank": 4, "activation_format": "hla_int8"}, "a.*": {"rank": 2}})
    assert config.plan() == Plan()
    assert config.plan(lambda p: True).rank == 2
    assert config.plan(lambda p: p == "*.q").label() == "INT8 per_token / hla_int8 r=4"
    assert Plan(None, activation_format="none").exact and not Plan(None).exact
    assert "exact" in Plan(None).label()


@pytest.mark.parametrize("name", PRESET_PLANS)
def test_storage(name, tmp_path):
    """to_dict holds JSON types only; hot_config.json gives back an equal configuration, patterns and all."""
    config = HOTConfig.from_preset(
        name, include=["*.q_proj", "*.up_proj"], exclude=["model.layers.0.*"], overrides={"*.q_proj": {"rank": 4}}
    )
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()
    assert HOTConfig.from_dict(config.to_dict()) == config
    path = config.save_pretrained(tmp_path / "new" / "folder")
    assert path.name == CONFIG_NAME == "hot_config.json"
    assert HOTConfig.from_pretrained(path.parent) == config
    changed = config.to_dict()
    changed["overrides"]["*.q_proj"]["rank"] = 9
    assert config.overrides["*.q_proj"]["rank"] == 4


def test_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No hot_config.json in .*save_pretrained"):
        HOTConfig.from_pretrained(tmp_path)
    path = tmp_path / CONFIG_NAME
    path.write_text("{not json")
    with pytest.raises(ValueError, match="not valid JSON"):
        HOTConfig.from_pretrained(tmp_path)
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match="dictionary of its fields"):
        HOTConfig.from_pretrained(tmp_path)
    path.write_text('{"rank": 40}')
    with pytest.raises(ValueError, match="1 to 16"):
        HOTConfig.from_pretrained(tmp_path)


def test_dict_and_name_reach_the_layers():
    """What a user may pass as the configuration: an object, a dict, a name, or nothing."""
    for value, plan in (
        (None, PRESET_PLANS["default"]),
        ("fast", PRESET_PLANS["fast"]),
        ({"activation_format": "int8"}, Plan(activation_format="int8")),
        (HOTConfig.smallest(), PRESET_PLANS["smallest"]),
    ):
        model = nn.Linear(64, 64)
        apply_hot(model, value)
        assert model.hot.plan == plan
        model(torch.randn(3, 64)).sum().backward()
        assert model.weight.grad is not None
