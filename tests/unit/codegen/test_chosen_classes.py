"""A class of modules that a constructor chooses before it makes one: each layer has its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]
TEXT = """
class Tanh(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.inner = nn.Linear(config.size, config.size)

    def forward(self, x):
        return self.inner(x).tanh()


class Sigmoid(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.inner = nn.Linear(config.size, config.size, bias=False)

    def forward(self, x):
        return self.inner(x).sigmoid()


class Sine(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(config.size))

    def forward(self, x):
        return (x * self.scale).sin()


class Block(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        BODY

    def build(self, config, index):
        CHOICE
        return kind(config, index)

    def forward(self, x):
        return x + self.part(x)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.blocks = nn.ModuleList([Block(config, i) for i in range(config.layers)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""
TWO = """
if config.kinds[index] == 0:
    kind = Tanh
else:
    kind = Sigmoid
"""
THREE = """
if config.kinds[index] == 0:
    kind = Tanh
elif config.kinds[index] == 1:
    kind = Sigmoid
else:
    kind = Sine
"""
EXPRESSION = "kind = Tanh if config.kinds[index] == 0 else Sigmoid"


@pytest.mark.parametrize("kinds", [[0, 1, 0], [1, 1, 1], [0, 1, 2]])
@pytest.mark.parametrize("choice", [TWO, THREE, EXPRESSION])
@pytest.mark.parametrize("method", [False, True])
def test_layers_have_the_class_that_their_constructor_chose(
    kinds: list[int], choice: str, method: bool, translate: Translate
) -> None:
    config = {"size": 4, "layers": 3, "kinds": kinds}
    choice = "\n        ".join(choice.strip().splitlines())
    made = "self.part = self.build(config, index)"
    body = made if method else f"{choice}\n        self.part = kind(config, index)"
    text = TEXT.replace("BODY", body).replace("CHOICE", choice)
    state, _, _ = translate(text, config, specialised=True)
    others = [each for each in state.translator.states.values() if each.cls is not state.cls]
    written = "\n\n\n".join([*map(_written, others), _written(state)])
    ours, original = _made(written, config), _made(text, config)
    ours.load_state_dict(original.state_dict())
    generator = torch.Generator().manual_seed(seed := int.from_bytes(os.urandom(3), "big"))
    print("seed", seed)
    x = torch.randn(2, 3, 4, generator=generator)
    assert torch.equal(ours(x), original(x))
