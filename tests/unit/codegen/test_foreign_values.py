"""First values that constructors compute with other libraries than PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]
TOY = """
import numpy as np

class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.size
        self.half = config.size // 2
        self.table = {table}

    def _cosines(self):
        steps = np.arange(self.size)[:, None] * np.arange(self.half)[None]
        made = torch.from_numpy(np.cos(steps)).float()
        return nn.Parameter(made, requires_grad=False)

    def forward(self, x):
        return x @ self.table
"""
DIRECT = "nn.Parameter(torch.from_numpy(np.ones((config.size, self.half))).float())"


@pytest.mark.parametrize("table", ["self._cosines()", DIRECT])
def test_a_parameter_that_numpy_computes_is_one_of_its_shape(
    table: str, translate: Translate
) -> None:
    text = TOY.format(table=table).replace(
        "self.size = config.size\n", "self.size = config.size\n", 1
    )
    if table == DIRECT:
        text = text.replace("        self.size = config.size\n", "")
    state, init, _ = translate(text, {"size": 6}, specialised=True)
    assert "np" not in init
    for size in (6, 10):
        ours, original = (_made(each, {"size": size}) for each in (_written(state), text))
        ours.load_state_dict(original.state_dict())
        x = torch.randn(3, size)
        assert torch.equal(ours(x), original(x))


@pytest.mark.parametrize(
    ("half", "reason"),
    [("config.size", "size 0 is self.half or self.size"), ("3", "size 1 is none that")],
)
def test_a_size_that_several_numbers_or_none_may_be_is_refused(
    half: str, reason: str, translate: Translate
) -> None:
    text = TOY.format(table="self._cosines()").replace("config.size // 2", half)
    if half == "3":
        text = text.replace("np.arange(self.half)", "np.arange(3)")
    with pytest.raises(Untranslatable, match=reason):
        translate(text, {"size": 6, "other": 1}, specialised=True)


def test_what_is_no_parameter_is_not_left_out(translate: Translate) -> None:
    text = TOY.format(table="self._cosines()").replace(
        "nn.Parameter(made, requires_grad=False)", "made"
    )
    with pytest.raises(Untranslatable):
        translate(text, {"size": 6}, specialised=True)
