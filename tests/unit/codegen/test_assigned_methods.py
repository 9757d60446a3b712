"""Methods that a class has under another name, too: `forward = run`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]
TOY = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = nn.Linear(config.size, config.size)

BODY
"""
RUN = """
    def run(self, x):
        return self.inner(x).tanh() * 2
"""
FORWARD = """
    def forward(self, x):
        return self.inner(x) - x
"""
GIVEN = """
    forward = run
"""


@pytest.mark.parametrize(
    "body", [RUN + GIVEN, FORWARD + RUN + GIVEN, RUN + GIVEN + FORWARD, FORWARD + RUN]
)
def test_the_last_one_of_a_name_counts(body: str, translate: Translate) -> None:
    text, config = TOY.replace("BODY", body), {"size": 5}
    state, _, _ = translate(text, config, specialised=True)
    torch.manual_seed(seed := int(torch.randint(2**31, ())))
    print(f"seed {seed}")
    expected, found = (_made(each, config).eval() for each in (text, _written(state)))
    found.load_state_dict(expected.state_dict())
    x = torch.randn(2, 3, 5)
    assert torch.equal(found(x), expected(x))
