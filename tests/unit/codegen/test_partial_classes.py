"""Classes of modules that constructors give some arguments before they make any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]

NORMED = """
from functools import partial
from torch.nn import LayerNorm


class Norm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        norm = MADE
        self.kind = norm
        self.first, self.last = norm(config.size), self.kind(config.size)

    def forward(self, x):
        return self.last(self.first(x).tanh())
"""
SIZES = {"size": 8, "eps": 0.25}


@pytest.mark.parametrize(
    "made",
    [
        "partial(Norm, eps=config.eps)",
        "partial(Norm, eps=0.5)",
        "partial(partial(Norm, eps=config.eps), eps=config.eps / 2)",
        "partial(Norm)",
        "partial(nn.LayerNorm, eps=config.eps, elementwise_affine=False)",
    ],
)
def test_a_class_with_some_arguments_makes_modules_with_all(
    made: str, translate: Translate
) -> None:
    text = NORMED.replace("MADE", made)
    state, init, _ = translate(text, SIZES, specialised=True)
    assert "partial" not in init
    parts = [each for each in state.translator.states.values() if each.cls is not state.cls]
    head = "from torch.nn import LayerNorm\n"
    ours, theirs = (
        _made(head + "\n\n".join(map(_written, [*parts, state])), SIZES),
        _made(text, SIZES),
    )
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(ours(x), theirs(x))


def test_such_a_class_is_no_value_of_generated_code(translate: Translate) -> None:
    text = NORMED.replace("MADE", "partial(Norm, eps=config.eps)").replace(
        "self.kind = norm", "self.kind = [norm, str(norm)][0]"
    )
    with pytest.raises(Untranslatable, match="Norm with some of its arguments"):
        translate(text, SIZES, specialised=True)
