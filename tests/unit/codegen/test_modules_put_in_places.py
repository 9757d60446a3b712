"""Constructors that put other modules in places that names in the config say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from tests.unit.codegen.test_own_code import _made, _with_parts

Translate = Callable[..., tuple[Any, str, str]]
TOY = """
class LowRank(nn.Module):
    def __init__(self, inputs, outputs, rank, bias):
        super().__init__()
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=bias)

    def forward(self, x):
        return self.up(self.down(x))

class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.one = nn.Linear(config.size, config.size)
        self.two = nn.Linear(config.size, config.size, bias=False)

    def forward(self, x):
        return x + self.two(self.one(x).tanh())

class Inner(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.layers)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = Inner(config)
        self.ranks = config.ranks
        names = {{module: name for name, module in self.named_modules()}}
        found = {{}}
        stack = [self]
        while len(stack) > 0:
            module = stack.pop()
            for name, part in module.named_children():
                if isinstance(part, nn.Linear):
                    found[part] = {{"parent": module, "name": name, "path": names[part]}}
                else:
                    stack.append(part)
        for path, part in self.named_modules():
            if path in self.ranks:
                place = found[part]
                new = LowRank(part.in_features, part.out_features, self.ranks[path], part.bias is not None)
                {put}

    def forward(self, x):
        return self.inner(x)
"""
PUT = 'setattr(place["parent"], place["name"], new)'
HELPERS = "from onboard.modeling import put_in_place\n\n\n"


def _config(**ranks: int) -> dict[str, Any]:
    named = {f"inner.layers.{key[1:].replace('_', '.')}": rank for key, rank in ranks.items()}
    return {"size": 6, "layers": 3, "ranks": named, "word": ""}


def test_modules_are_put_where_the_config_says(translate: Translate) -> None:
    config = _config(_0_one=2, _1_two=3, _2_one=4)
    text = TOY.format(put=PUT)
    state, init, _ = translate(text, config, specialised=True)
    assert "while" not in init
    ours = _made(HELPERS + _with_parts(state), config)
    original = _made(text, config)
    ours.load_state_dict(original.state_dict())
    x = torch.randn(2, 6)
    assert torch.equal(ours(x), original(x))


def test_other_configs_have_them_elsewhere(translate: Translate) -> None:
    config = _config(_0_one=2, _1_two=3, _9_one=4)
    state, _, _ = translate(TOY.format(put=PUT), config, specialised=True)
    other = _config(_1_one=1, _2_two=2)
    ours = _made(HELPERS + _with_parts(state), other)
    original = _made(TOY.format(put=PUT), other)
    ours.load_state_dict(original.state_dict())
    x = torch.randn(2, 6)
    assert torch.equal(ours(x), original(x))


def test_a_place_whose_forward_knows_no_other_module_is_refused(translate: Translate) -> None:
    state, _, _ = translate(TOY.format(put=PUT), _config(_0_one=2), specialised=True)
    with pytest.raises(
        ValueError, match=r"inner\.layers\.1\.two has no other module: that is for Layer\.one"
    ):
        _made(HELPERS + _with_parts(state), _config(_1_two=2))


@pytest.mark.parametrize("ranks", [{}, {"_7_one": 2}])
def test_modules_that_no_small_model_has_are_refused_by_name(
    ranks: dict[str, int], translate: Translate
) -> None:
    with pytest.raises(Untranslatable, match="LowRank, which no small model has"):
        translate(TOY.format(put=PUT), _config(**ranks), specialised=True)


def test_a_search_whose_notes_are_read_later_is_refused(translate: Translate) -> None:
    later = TOY.format(put=PUT).replace(
        "    def forward(self, x):\n        return self.inner(x)", ""
    )
    later += "        self.count = len(found)\n\n    def forward(self, x):\n        return self.inner(x)\n"
    with pytest.raises(Untranslatable):
        translate(later, _config(_0_one=2), specialised=True)
