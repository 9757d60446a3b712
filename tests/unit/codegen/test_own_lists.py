"""Lists of modules of a class of their own, as people write experts and stacks of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]

INNER = """
class Inner(nn.Module):
    def __init__(self, size, scale):
        super().__init__()
        self.inner = nn.Linear(size, size)
        self.scale = scale

    def forward(self, x):
        return self.inner(x).tanh() * self.scale
"""
GIVEN = """
class Stack(nn.ModuleList):
    def __init__(self, config, scale):
        parts = [Inner(config.size, scale) for _ in range(config.count)]
        super().__init__(parts)
        self.config = config
"""
ADDED = """
class Stack(nn.ModuleList):
    def __init__(self, config, scale):
        super().__init__()
        for number in range(config.count):
            self.append(Inner(config.size, scale))
"""
INHERITED = """
class Stack(nn.ModuleList):
"""
IN_ORDER = """
class Stack(nn.Sequential):
    def __init__(self, config, scale):
        super().__init__(*[Inner(config.size, scale) for _ in range(config.count)])
"""
IN_ORDER_OF_TORCH = """
class Stack(nn.Sequential):
    def __init__(self, config, scale):
        super().__init__(nn.Linear(config.size, 7), nn.GELU(), nn.Linear(7, config.size))
        self.scale = scale
"""
IN_ORDER_BY_NUMBERS = """
class Stack(nn.Sequential):
    def __init__(self, config, scale):
        super().__init__()
        for number in range(config.count):
            self.add_module(str(number), Inner(config.size, number))
"""
IN_ORDER_AND_MORE = f"""{IN_ORDER_OF_TORCH}
    def forward(self, x):
        return x + super().forward(x)
"""
SUMS = """
    def forward(self, x, shift=0.5):
        if self.training:
            return x
        whole = self[0](x) * len(self)
        for part in self:
            whole = whole + part(x) + shift
        return self.doubled(whole)

    def doubled(self, x):
        return 2 * x
"""
TOY = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.parts = {made}

    def forward(self, x):
        return self.parts(x) - {read}
"""
OF_CLASS = "Stack(config, 3)"
OF_PARTS = "Stack([Inner(config.size, 2), Inner(config.size, 3)])"


def _toy(stack: str, made: str = OF_CLASS, read: str = "x") -> str:
    return INNER + stack + SUMS + TOY.format(made=made, read=read)


@pytest.mark.parametrize(
    ("stack", "made"),
    [
        (GIVEN, OF_CLASS),
        (ADDED, OF_CLASS),
        (INHERITED, OF_PARTS),
        (IN_ORDER, OF_CLASS),
        (INHERITED.replace("ModuleList", "Sequential"), OF_PARTS.replace("[", "").replace("]", "")),
    ],
)
def test_a_list_of_its_own_class_is_the_list_and_its_methods_are_written_where_they_are_called(
    stack: str, made: str, translate: Translate
) -> None:
    _compare(_toy(stack, made), translate)


@pytest.mark.parametrize(
    "stack", [IN_ORDER, IN_ORDER_OF_TORCH, IN_ORDER_BY_NUMBERS, IN_ORDER_AND_MORE]
)
@pytest.mark.parametrize("read", ["x", "self.parts[0](x).sum()"])
def test_modules_of_such_a_class_run_one_after_the_other(
    stack: str, read: str, translate: Translate
) -> None:
    _compare(INNER + stack + TOY.format(made=OF_CLASS, read=read), translate)


def _compare(text: str, translate: Translate) -> None:
    config = {"size": 5, "count": 2}
    state, init, forward = translate(text, config, specialised=True)
    assert "nn.ModuleList(" in init
    assert "Stack" not in init + forward
    classes = "\n".join(map(_written, state.translator.states.values()))
    torch.manual_seed(seed := int(torch.randint(2**31, ())))
    print(f"seed {seed}")
    expected, found = (_made(each, config).eval() for each in (text, classes))
    found.load_state_dict(expected.state_dict())
    x = torch.randn(2, 3, 5)
    assert torch.equal(found(x), expected(x))


@pytest.mark.parametrize(
    ("stack", "read", "reason"),
    [
        (GIVEN, "self.parts.config.size", "config, what a list of modules keeps"),
        (GIVEN.replace("self.config = config", "self.pop(0)"), "x", "constructor of Stack"),
    ],
)
def test_what_a_list_of_its_own_class_keeps_or_does_besides_is_refused(
    stack: str, read: str, reason: str, translate: Translate
) -> None:
    with pytest.raises(Untranslatable, match=reason):
        translate(_toy(stack, read=read), {"size": 5, "count": 2}, specialised=True)
