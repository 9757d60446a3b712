"""What methods keep in a dict of the module's for their next call is made by each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]
TOY = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = nn.Linear(config.size, config.size)
        self.cos: dict = {}
        self.sin = dict()

    def tables(self, length, dtype):
BODY

    def forward(self, x):
        cos, sin = self.tables(x.shape[1], x.dtype)
        return self.inner(x) * cos + sin
"""
BOTH = """
        if length not in self.cos or length not in self.sin:
            angles = torch.ones(length)[:, None] * self.inner.weight[0]
            self.cos[length] = angles.cos().to(dtype)
            self.sin[length] = angles.sin().to(dtype)
        return self.cos[length], self.sin[length]
"""
ONE_BY_ONE = """
        if length not in self.cos:
            self.cos[length] = (torch.ones(length)[:, None] * self.inner.weight[1]).cos()
        if self.sin.get((length, dtype)) is None:
            self.sin[(length, dtype)] = (torch.ones(length)[:, None] * self.inner.weight[2]).sin()
        return self.cos[length], self.sin[length, dtype]
"""
RETURNED = """
        if dtype is not None and (length, dtype) in self.cos:
            return self.cos[length, dtype]
        angles = torch.ones(length)[:, None] * self.inner.weight[0]
        both = angles.cos(), angles.sin()
        if dtype is not None:
            self.cos[length, dtype] = both
        return both
"""
FOUND = RETURNED.replace(
    "(length, dtype) in self.cos:", "self.cos.get((length, dtype)) is not None:"
)
OTHER_KEY = BOTH.replace("self.sin[length]\n", "self.sin[length + 0]\n")
COUNTED = BOTH.replace("return self.cos[length]", "return len(self.cos) * self.cos[length]")
CONFIG = {"size": 5}


@pytest.mark.parametrize("body", [BOTH, ONE_BY_ONE, RETURNED, FOUND])
def test_each_call_makes_it(body: str, translate: Translate) -> None:
    text = TOY.replace("BODY", body.strip("\n"))
    state, _, _ = translate(text, CONFIG, specialised=True)
    written = _written(state)
    assert " in self." not in written
    assert ".get(" not in written
    torch.manual_seed(seed := int(torch.randint(2**31, ())))
    print(f"seed {seed}")
    expected, found = (_made(each, CONFIG).eval() for each in (text, written))
    found.load_state_dict(expected.state_dict())
    for length in (3, 7, 3):
        x = torch.randn(2, length, 5)
        assert torch.equal(found(x), expected(x))


@pytest.mark.parametrize("body", [OTHER_KEY, COUNTED])
def test_a_dict_that_is_asked_for_more_stays(body: str, translate: Translate) -> None:
    text = TOY.replace("BODY", body.strip("\n"))
    try:
        state, _, _ = translate(text, CONFIG, specialised=True)
    except Untranslatable:
        return
    assert "self.cos[" in _written(state)
