"""Functions inside the functions of repositories: what they read and assign of those around them, and
lists of modules that a constructor fills anew.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from tests.unit.codegen.test_held_values import _same, _state
from tests.unit.codegen.test_own_code import _written

Translate = Callable[..., tuple[Any, str, str]]

ASSIGNING = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(config.size, config.size) for _ in range(config.layers)])

    def forward(self, x):
        seen = 0 * x
        passed = 0
        before = x + 1

        def run(weight):
            nonlocal x, seen
            before = x
            x = layer(x).tanh()
            seen += weight * before

        for layer in self.layers:
            run(0.5)
            passed = x * 2
        return seen + x + before + passed
"""
DEEPER = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layer = nn.Linear(config.size, config.size)

    def forward(self, x):
        y = x * 3

        def run(value):
            y = value + 1

            def inside():
                nonlocal x, y
                x = self.layer(x) + y
                y = y * 2

            inside()
            return y

        given = run(x)
        return given * x + y
"""
EARLY = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layer = nn.Linear(config.size, config.size)
        self.least = config.least

    def forward(self, x):
        y = x * 3

        def doubled():
            nonlocal y
            y = y + 1
            if x.shape[0] > self.least:
                return
            y = self.layer(y) * 2

        doubled()
        return y
"""
ELSEWHERE = """
class Around(nn.Module):
    def forward(self, x, function):
        x = x * 2
        function()
        return x


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.around = Around()

    def forward(self, x):
        y = x + 1

        def run():
            nonlocal y
            y = y * 3

        return self.around(x, run) + y
"""
ANEW = """
class Old(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.lin = nn.Linear(config.size, config.size)

    def forward(self, x):
        return self.lin(x), x


class New(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.lin = nn.Linear(config.size, config.size)
        kind = nn.Linear
        if config.sizes is not None and config.sizes[index] > 1 and config.scaled:
            kind = Scaled
        self.other = kind(config.size, config.size)

    def forward(self, x):
        return self.other(self.lin(x).tanh())


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Base(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([Old(config, i) for i in range(config.layers)])


class Toy(Base):
    def __init__(self, config):
        super().__init__(config)
        for i in range(len(self.layers)):
            self.layers[i] = New(config, i)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""


@pytest.mark.parametrize("least", [1, 9])
def test_what_follows_an_early_return_is_under_the_opposite_test(
    translate: Translate, least: int
) -> None:
    config = {"size": 4, "least": least}
    state, _, _ = translate(EARLY, config, specialised=True)
    _same(state, EARLY, config)


@pytest.mark.parametrize("text", [ASSIGNING, DEEPER])
def test_what_a_function_assigns_around_it_is_assigned_there(
    translate: Translate, text: str
) -> None:
    config = {"size": 4, "layers": 3}
    state, _, forward = translate(text, config, specialised=True)
    assert "nonlocal" not in forward
    _same(state, text, config)


def test_a_function_that_is_called_elsewhere_assigns_nothing_around_it(
    translate: Translate,
) -> None:
    with pytest.raises(Untranslatable, match="run, which assigns y around it"):
        translate(ELSEWHERE, {"size": 4}, specialised=True)


def test_a_list_whose_modules_are_all_replaced_is_one_of_the_new_ones(translate: Translate) -> None:
    config = {"size": 4, "layers": 3, "sizes": [1, 2, 1], "scaled": False}
    state, init, _ = translate(ANEW, config, specialised=True)
    assert "Old" not in init
    assert "range(config.layers)" in init
    new = _state(state, "New")
    assert list(map(ast.unparse, new.guards)) == ["not config.scaled"]
    _same(state, ANEW, config, _written(new))
