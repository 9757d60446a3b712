"""What constructors of config classes compute with libraries of numbers, written in plain Python."""

from __future__ import annotations

import importlib
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onboard.codegen.config_checks import check_same_values
from onboard.codegen.config_class import plain_config_class
from onboard.errors import OnboardError
from onboard.hf.old.own_configs import keep_own_steps

SCALED = """
from numbers import Number

import numpy as np
from transformers import PretrainedConfig


def divisible(v, divisor=8, least=None):
    if least is None:
        least = divisor
    new = max(least, int(v + divisor / 2) // divisor * divisor)
    if new < 0.9 * v:
        new += divisor
    return new


def heads_of(width, size):
    if width % size == 0:
        return width // size
    else:
        raise ValueError(f"{width} of {size}")


class Made(PretrainedConfig):
    model_type = "made"

    def __init__(
        self, layers=4, width=64, size=8, factors=1.0, skip=np.sqrt(0.5), heads=None, **kwargs
    ):
        self.layers, self.width, self.size, self.factors = layers, width, size, factors
        self.skip, self.log = skip, np.log(3.0)
        self.heads = heads_of(width, size) if heads is None else heads
        self.__post_init__()
        super().__init__(**kwargs)

    def __post_init__(self):
        if isinstance(self.factors, Number):
            widths = [divisible(self.width * self.factors, divisor=self.size)] * self.layers
        elif isinstance(self.factors, (tuple, list)) and len(self.factors) == 2:
            steps = [
                round(v, 2)
                for v in np.linspace(self.factors[0], self.factors[1], num=self.layers, dtype=float)
            ]
            widths = [divisible(self.width * m, divisor=self.size) for m in steps]
        else:
            raise NotImplementedError(f"{self.factors}")
        self.heads = [int(heads_of(width, self.size)) for width in widths]
        for index in range(len(widths)):
            assert self.heads[index] > 0
"""
_COUNT = itertools.count()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(tmp_path)

    def made(text: str) -> Any:
        name = f"numbers_configuration_{next(_COUNT)}"
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        config_class = importlib.import_module(name).Made
        keep_own_steps(config_class)
        return config_class

    yield made
    for name in [name for name in sys.modules if name.startswith("numbers_configuration_")]:
        del sys.modules[name]


def test_numbers_of_numpy_and_steps_of_its_own_are_written_out(made: Any) -> None:
    config_class = made(SCALED)
    text = plain_config_class(config_class)
    assert "np" not in text
    for _ in range(20):
        low = random.uniform(0.25, 1.0)
        values = {
            "layers": random.randint(1, 9),
            "width": 8 * random.randint(4, 40),
            "factors": random.choice([low, [low, low + random.uniform(0.0, 3.0)]]),
        }
        print(values)
        check_same_values(config_class, text, values)


def test_steps_of_its_own_come_where_its_constructor_says(made: Any) -> None:
    config = made(SCALED)(width=80, own=3)
    assert (config.heads, config.own) == ([10] * 4, 3)
    assert config.to_dict()["heads"] == [10] * 4


def test_steps_that_take_what_transformers_gives_stay(made: Any) -> None:
    text = """
from transformers import PretrainedConfig


class Made(PretrainedConfig):
    model_type = "made"
    width: int = 3

    def __post_init__(self, **kwargs):
        self.twice = 2 * self.width
        super().__post_init__(**kwargs)
"""
    config = made(text)(width=5, own=4)
    assert (config.twice, config.own) == (10, 4)


@pytest.mark.parametrize("change", ["np.median(3.0)", "np.log(-1.0)", "np.log(width)"])
def test_other_numbers_of_numpy_are_refused(made: Any, change: str) -> None:
    with pytest.raises(OnboardError, match="cannot be written anew"):
        plain_config_class(made(SCALED.replace("np.log(3.0)", change)))
