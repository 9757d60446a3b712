"""Fields that config classes gained lately: a model file runs where the class has them, and where
it does not.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import CONFIG_MAPPING, GptOssConfig

from onboard.analysis.tiny.loaded_config import load_config
from onboard.analysis.tiny.tiny_config import tiny_config
from onboard.analysis.tiny.tiny_model import build_small
from onboard.hf.young_fields import YOUNG_FIELDS, plain_default, without_ignored, young_default
from onboard.modeling import load_model_file, registered_model
from onboard.verify.error import rmse_ratio
from onboard.verify.seeds import fresh_seed

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "models" / "modeling_gpt_oss.py"
TABLE = yaml.safe_load(YOUNG_FIELDS.read_text(encoding="utf-8"))
YOUNG = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def small(**values: Any) -> GptOssConfig:
    config = tiny_config(load_config({"model_type": "gpt_oss", **values}))
    for name, value in (YOUNG | values).items():
        setattr(config, name, value)
    return config


@pytest.fixture
def older_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class as 5.17 has it."""
    for name in YOUNG:
        monkeypatch.delattr(GptOssConfig, name)
        monkeypatch.delitem(GptOssConfig.__dataclass_fields__, name)


def loud(reference: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Fill a model with weights that reach the experts' limits and bends."""
    torch.manual_seed(seed)
    for parameter in reference.parameters():
        parameter.data.normal_(std=0.6)
    return reference


def logits_of_both(config: GptOssConfig, reference: torch.nn.Module) -> list[torch.Tensor]:
    load_model_file(FILE)
    ours = registered_model("GptOssConfig")(config)
    ours.load_state_dict(reference.state_dict())
    tokens, positions = torch.randint(1, 100, (2, 9)), torch.arange(9).expand(2, 9)
    with torch.no_grad():
        return [model(tokens, position_ids=positions).logits for model in (ours, reference)]


@pytest.mark.usefixtures("older_class")
def test_a_class_without_the_fields_gives_the_same_logits() -> None:
    print("seed", seed := fresh_seed())
    with pytest.MonkeyPatch.context() as newer:  # transformers' module here reads them
        for name, value in YOUNG.items():
            newer.setattr(GptOssConfig, name, value, raising=False)
        reference = loud(build_small(small()), seed)
    config = small()
    for name in YOUNG:
        vars(config).pop(name, None)
        assert not hasattr(config, name)
    ours, expected = logits_of_both(config, reference)
    assert rmse_ratio(ours, expected) <= 1e-5


@pytest.mark.parametrize("value", [{"swiglu_alpha": 0.4}, {"swiglu_limit": 0.3}])
def test_what_config_json_has_wins(value: dict[str, float]) -> None:
    print("seed", seed := fresh_seed())
    ours, expected = logits_of_both(small(**value), loud(build_small(small(**value)), seed))
    assert rmse_ratio(ours, expected) <= 1e-5
    default, _ = logits_of_both(small(), loud(build_small(small(**value)), seed))
    assert rmse_ratio(default, expected) > 1e-3


@pytest.mark.usefixtures("older_class")
def test_what_the_class_ignores_is_left_out_of_a_comparison_and_said() -> None:
    config = small(swiglu_limit=0.75)
    with pytest.warns(UserWarning, match="ignores swiglu_limit of GptOssConfig"):
        assert not hasattr(without_ignored(config), "swiglu_limit")


def test_a_class_that_has_the_fields_keeps_them() -> None:
    assert without_ignored(small(swiglu_limit=0.75)).swiglu_limit == 0.75


def test_only_listed_fields_have_a_default_in_files() -> None:
    assert {name: young_default(GptOssConfig(), name) for name in YOUNG} == YOUNG
    assert young_default(GptOssConfig(), "rms_norm_eps") is None


def test_the_table_is_of_the_oldest_release_and_of_the_one_that_is_tried() -> None:
    """`python scripts/young_fields.py` writes it anew."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    [tried] = re.findall(r"^transformers==(\S+)$", text, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [needed] = [each for each in project["dependencies"] if each.startswith("transformers")]
    oldest, newest = TABLE["releases"]
    assert newest == tried
    assert f">={oldest.removesuffix('.0')}," in needed


def test_every_field_of_the_table_is_there_with_a_plain_default() -> None:
    classes = {made.__name__: made for made in CONFIG_MAPPING.values()}
    parts = [part for made in classes.values() for part in made.sub_configs.values()]
    classes |= {part.__name__: part for part in parts}
    for name, fields in TABLE["fields"].items():
        assert all(plain_default(classes[name], field) is not None for field in fields), name
