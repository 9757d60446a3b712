"""Config classes whose constructors give that of their base its arguments by position, as they could
in transformers 4.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from onboard.codegen.config_checks import check_same_values
from onboard.codegen.config_class import plain_config_class
from onboard.hf.old.config_arguments import take_by_position

NAMES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "hidden_act", "max_position_embeddings"),
    *("initializer_range", "rms_norm_eps", "use_cache", "pad_token_id", "bos_token_id"),
    *("eos_token_id", "pretraining_tp", "tie_word_embeddings", "rope_theta", "rope_scaling"),
    *("attention_bias", "attention_dropout", "mlp_bias", "head_dim"),
)
"""The arguments of LlamaConfig of transformers 4.47, in their order."""
CLASS = """
from transformers import LlamaConfig


class Made(LlamaConfig):
    model_type = "made"

    def __init__(self, {given}, rank=None, **kwargs):
        super().__init__({passed}, **kwargs)
        self.rank = hidden_size // 4 if rank is None else rank
"""
Made = Callable[[list[str]], Any]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    name = "positional_configuration"
    monkeypatch.syspath_prepend(tmp_path)

    def made(passed: list[str]) -> Any:
        defaults = LlamaConfig(rope_theta=2e4)
        values = {key: getattr(defaults, key, None) for key in NAMES}
        values |= {"rope_theta": 2e4, "rope_scaling": None}
        given = ", ".join(f"{key}={value!r}" for key, value in values.items())
        text = CLASS.format(given=given, passed=", ".join(passed))
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return importlib.import_module(name).Made

    yield made
    sys.modules.pop(name, None)


def test_arguments_by_position_are_those_of_their_names(made: Made) -> None:
    config_class = made([*NAMES])
    take_by_position(config_class)
    text = plain_config_class(config_class)
    seed = random.randrange(10**6)
    print("seed", seed)
    generator = random.Random(seed)
    sizes = {key: 32 * generator.randint(2, 30) for key in ("hidden_size", "vocab_size")}
    others = {"rope_theta": generator.uniform(1e3, 1e5), "mlp_bias": True, "head_dim": 8}
    values = sizes | others
    found = config_class(**values)
    assert {key: getattr(found, key) for key in values if key != "rope_theta"} == {
        key: value for key, value in values.items() if key != "rope_theta"
    }
    assert found.rope_parameters["rope_theta"] == values["rope_theta"]
    assert found.rank == values["hidden_size"] // 4
    check_same_values(config_class, text, values)


@pytest.mark.parametrize("swapped", [(1, 2), (17, 16)])
def test_arguments_in_another_order_are_not_taken(made: Made, swapped: tuple[int, int]) -> None:
    names = [*NAMES]
    one, other = swapped
    names[one], names[other] = names[other], names[one]
    config_class = made(names)
    take_by_position(config_class)
    with pytest.raises(ValueError, match="accepts only keyword"):
        config_class()
