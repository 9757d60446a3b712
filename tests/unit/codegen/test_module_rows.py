"""Lists of lists of modules, as people write layers, in small modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]

PARTS = """
class Mixer(nn.Module):
    def __init__(self, size, scale):
        super().__init__()
        self.inner = nn.Linear(size, size)
        self.scale = scale

    def forward(self, x, shift):
        return self.inner(x).tanh() * self.scale + shift


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
"""
PAIRS = """
        self.layers = nn.ModuleList([])
        for number in range(config.layers):
            self.layers.append(nn.ModuleList([
                Mixer(config.size, number + 1),
                nn.Linear(config.size, config.size),
                Mixer(config.size, 2) if number % 2 == 0 else nn.Identity(),
            ]))

    def forward(self, x):
        for mixer, inner, _ in self.layers:
            x = x + mixer(x, 1.5)
            x = inner(x)
        return x
"""
COMPREHENDED = """
        self.layers = nn.ModuleList(
            [nn.ModuleList([nn.Linear(config.size, config.size), Mixer(config.size, 3)])
             for _ in range(config.layers)]
        )

    def forward(self, x):
        for number, layer in enumerate(self.layers[:-1]):
            norm, mixer = layer
            x = mixer(norm(x), number) + x
        return self.layers[-1][1](x, 0.5)
"""
TABLES = """
        layers = []
        for number in range(config.layers):
            scale = 0.5 + number
            assert scale > 0
            layers.append(nn.ModuleDict(
                {"mixer": Mixer(config.size, scale), "norm": nn.Linear(config.size, config.size)}
            ))
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["mixer"](layer.norm(x), 1)
        return x
"""
SEVERAL = """
        self.layers = nn.ModuleList()
        for number in range(config.layers):
            self.layers.append(nn.ModuleList([nn.Linear(config.size, config.size)]))
            self.layers.append(nn.ModuleList([nn.Linear(config.size, 1), nn.Identity()]))

    def forward(self, x):
        return self.layers[0][0](x)
"""


@pytest.mark.parametrize("text", [PAIRS, COMPREHENDED, TABLES], ids=["pairs", "made", "tables"])
def test_lists_of_lists_of_modules_are_written(translate: Translate, text: str) -> None:
    sizes = {"size": 8, "layers": 4}
    state, _, _ = translate(PARTS + text, sizes, specialised=True)
    parts = [each for cls, each in state.translator.states.items() if cls.__name__ != "Toy"]
    ours = _made("\n\n\n".join([*map(_written, parts), _written(state)]), sizes)
    theirs = _made(PARTS + text, sizes)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 8)
    torch.testing.assert_close(ours(x), theirs(x))


def test_lists_of_lists_of_several_lengths_are_refused(translate: Translate) -> None:
    with pytest.raises(Untranslatable, match="several lengths"):
        translate(PARTS + SEVERAL, {"size": 8, "layers": 2}, specialised=True)
