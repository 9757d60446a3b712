"""What code of transformers 4 means by names and methods that mean something else today, or nothing."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, PreTrainedModel

from onboard.analysis.repository import _imported_from_transformers
from onboard.analysis.repository_classes import bring_up_to_date
from onboard.analysis.tiny.tiny_config import tiny_config
from onboard.hf.old import interfaces, names

_CODE = """
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

class ThenConfig(PretrainedConfig):
    model_type = "then"

class ThenLM(PreTrainedModel):
    config_class = ThenConfig
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.linear = nn.Linear(4, 4)
        self.post_init()

    def forward(self, input_ids=None, **kwargs):
        return input_ids

    @classmethod
    def _check_and_enable_sdpa(cls, config, hard_check_only=False):
        config = super()._check_and_enable_sdpa(config, hard_check_only=hard_check_only)
        if not hard_check_only and config._attn_implementation == "sdpa":
            config._attn_implementation = CHOSEN
        return config
"""


def _imported(name: str, code: str, chosen: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a module of such code, beside what transformers 4 had for it."""
    key = "_check_and_enable_sdpa"
    old = interfaces._MEMBERS[PreTrainedModel][key]
    monkeypatch.setattr(PreTrainedModel, key, old, raising=False)
    module: Any = ModuleType(name)
    module.CHOSEN = chosen
    monkeypatch.setitem(sys.modules, name, module)
    exec(code, vars(module))
    return module


@pytest.mark.parametrize("chosen", ["eager", "sdpa"])
def test_a_class_gets_the_attention_that_it_chose(
    chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "repository_code_that_chooses"
    module = _imported(name, _CODE, chosen, monkeypatch)
    facts = bring_up_to_date(name, module.ThenConfig, module.ThenLM, {"model_type": "then"})
    assert any("chose eager" in fact for fact in facts) == (chosen == "eager")
    model = module.ThenLM._from_config(module.ThenConfig())
    assert model.config._attn_implementation == chosen


_NESTED = (
    _CODE
    + """
class InnerModel(PreTrainedModel):
    config_class = ThenConfig
    _supports_sdpa = False

    def __init__(self, config):
        super().__init__(config)
        self.chosen = config._attn_implementation
        self.linear = nn.Linear(4, 4)

class OuterLM(ThenLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = InnerModel(config)
"""
)


def test_a_model_within_that_takes_eager_attention_alone_decides_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "repository_code_with_a_model_within"
    module = _imported(name, _NESTED, "sdpa", monkeypatch)
    with pytest.raises(ValueError, match="scaled_dot_product_attention"):
        module.OuterLM(module.ThenConfig())
    facts = bring_up_to_date(name, module.ThenConfig, module.OuterLM, {"model_type": "then"})
    assert "InnerModel take eager attention alone; the whole model gets that" in facts
    assert module.OuterLM(module.ThenConfig()).model.chosen == "eager"


_TRAINED = """
class TrainedLM(ThenLM):
    supports_gradient_checkpointing = True

    def _set_gradient_checkpointing(self, {arguments}):
        raise AssertionError("nothing is trained")
"""


@pytest.mark.parametrize("arguments", ["module, value=False", "enable=True, function=None"])
def test_what_training_alone_recomputes_is_left_to_it(
    arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "repository_code_that_is_trained"
    module = _imported(name, _CODE + _TRAINED.format(arguments=arguments), "sdpa", monkeypatch)
    fields = {"gradient_checkpointing": (False,)}  # true, as a tuple: what code has by mistake
    with pytest.raises((AssertionError, TypeError)):
        module.TrainedLM(module.ThenConfig(**fields))
    bring_up_to_date(name, module.ThenConfig, module.TrainedLM, {"model_type": "then", **fields})
    config = module.ThenConfig(**fields)
    assert not any(model.is_gradient_checkpointing for model in [module.TrainedLM(config)] * 2)
    assert config.gradient_checkpointing == (False,)


def test_a_check_of_ropes_fields_leaves_them_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "rope_config_validation"
    module: Any = importlib.import_module("transformers.modeling_rope_utils")
    monkeypatch.setattr(module, key, getattr(module, key, None))
    [fact] = names.provide("transformers.modeling_rope_utils", [key])
    assert "stand-in" in fact
    config: Any = PretrainedConfig()
    config.rope_theta, config.rope_scaling = 100.0, None
    getattr(module, key)(config)
    assert config.rope_parameters is None
    assert names.provide("transformers.modeling_rope_utils", [key]) == []


def test_a_module_that_is_gone_may_lie_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("transformers.no_such", "transformers.no_such.deeper"):
        monkeypatch.setitem(sys.modules, key, ModuleType(key))
        del sys.modules[key]
    facts = names.provide("transformers.no_such.deeper", ["scan"])
    assert [fact.split(" ")[0] for fact in facts] == [
        "transformers.no_such.deeper",
        "transformers.no_such.deeper.scan",
    ]
    assert importlib.import_module("transformers.no_such.deeper").scan.name.endswith("deeper.scan")


def test_names_that_a_whole_module_is_asked_for_are_known() -> None:
    text = """
import transformers.cache_utils as caches
import transformers.utils

class Own(caches.OtherCache):
    def update(self):
        return caches.helper(self)
"""
    assert _imported_from_transformers(text) == [
        ("transformers.cache_utils", ["OtherCache", "helper"])
    ]


_OUTPUT = "CausalLMOutput(logits=input_ids.unsqueeze(-1).float())"
_TIES = "self._tied_weights_keys = ['linear.weight']"
_CHANGING = _CODE.replace("return input_ids", f"input_ids += 1\n        return {_OUTPUT}").replace(
    "self.post_init()", f"{_TIES}\n        self.post_init()"
)


def test_inputs_stay_and_lists_of_ties_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests of this process may have changed it
    monkeypatch.setattr(PreTrainedModel, "post_init", inspect.unwrap(PreTrainedModel.post_init))
    key = "_check_and_enable_sdpa"
    old = interfaces._MEMBERS[PreTrainedModel][key]
    monkeypatch.setattr(PreTrainedModel, key, old, raising=False)
    assert interfaces._without_listed_ties()
    assert interfaces._without_listed_ties() == []
    name = "repository_code_that_changes_inputs"
    module: Any = ModuleType(name)
    module.CHOSEN = "sdpa"
    monkeypatch.setitem(sys.modules, name, module)
    exec(_CHANGING, vars(module))
    bring_up_to_date(name, module.ThenConfig, module.ThenLM, {"model_type": "then"})
    model = module.ThenLM(module.ThenConfig())
    ids = torch.arange(6).view(1, 6)
    model(input_ids=ids)
    assert torch.equal(ids, torch.arange(6).view(1, 6))


class Inside(PretrainedConfig):
    """Refuses what every config has."""

    def __init__(self, width: int = 4096, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.width = width
        if kwargs.keys() - {"model_type", "transformers_version"}:
            raise ValueError(f"unknown: {kwargs}")


class Around(PretrainedConfig):
    """Has such a config inside."""

    model_type = "around"
    sub_configs = {"inside": Inside}

    def __init__(self, hidden_size: int = 4096, inside: Any = None, **kwargs: Any) -> None:
        self.hidden_size = hidden_size
        self.inside = inside if isinstance(inside, Inside) else Inside(**(inside or {}))
        super().__init__(**kwargs)


def test_a_config_inside_may_refuse_what_every_config_has() -> None:
    config = Around(inside={"width": 3000}, dtype="float32")
    small: Any = tiny_config(config)
    assert small.hidden_size < config.hidden_size
    assert isinstance(small.inside, Inside)
    assert small.inside.width <= 3000
