"""Tables with each frequency once or twice, and linear layers that are computed slice by slice."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.state import ClassState
from onboard.codegen.translate.language.trees.syntax import Untranslatable, name
from onboard.codegen.translate.language.values import Code
from onboard.codegen.translate.mechanisms.attention.canonical import rope

Translate = Callable[..., tuple[ClassState, str, str]]
SLICED = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.parts = config.parts
        self.proj = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        if {test}:
            {one}
        else:
            {other}
        return out
"""
WHOLE = "out = self.proj(x)"
SUM = """out = torch.zeros_like(x)
            for i in range(self.parts):
                out = out + nn.functional.linear(x[..., i : i + 1], {weight})"""
SLICE = SUM.format(weight="self.proj.weight[:, i : i + 1]")


@pytest.mark.parametrize(
    ("test", "one", "other", "guard"),
    [
        ("self.parts > 1", SLICE, WHOLE, "not config.parts > 1"),
        ("self.parts == 1", WHOLE, SLICE, "config.parts == 1"),
    ],
)
def test_the_whole_layer_is_taken_where_the_config_has_it_whole(
    translate: Translate, test: str, one: str, other: str, guard: str
) -> None:
    text = SLICED.format(test=test, one=one, other=other)
    state, _, forward = translate(text, {"parts": 1})
    assert forward == "return self.proj(x)"
    assert [ast.unparse(item) for item in state.guards] == [guard]


@pytest.mark.parametrize(
    ("parts", "one"),
    [
        (2, SLICE),  # the config has it in slices
        (1, SUM.format(weight="self.proj.weight")),  # these are no slices
    ],
)
def test_another_branch_stays(translate: Translate, parts: int, one: str) -> None:
    text = SLICED.format(test="self.parts > 1", one=one, other=WHOLE)
    state, _, forward = translate(text, {"parts": parts})
    assert forward.startswith("if self.parts > 1:")
    assert not state.guards


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Stand for a function of modeling code: the signature alone is read."""


def written(op: str, **how: Any) -> str:
    given = [Code(name(key)) for key in ("q", "k", "cos", "sin")]
    result: Any = rope(rotate, op, Args(given, {}, []), **how)
    return ast.unparse(result.expr)


@pytest.mark.parametrize("frequencies", ["side_by_side", "half_apart"])
def test_neighbouring_channels_are_turned_by_tables_with_each_frequency_twice(
    frequencies: str,
) -> None:
    code = written("torch_rope_with_complex_freqs", frequencies=frequencies)
    q, k, angles = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8), torch.randn(2, 5, 4)
    apart = frequencies == "half_apart"
    twice = torch.cat((angles, angles), -1) if apart else angles.repeat_interleave(2, -1)
    turned = eval(code, {"torch": torch, "q": q, "k": k, "cos": twice.cos(), "sin": twice.sin()})
    for x, found in zip((q, k), turned, strict=True):
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
        factors = torch.polar(torch.ones_like(angles).double(), angles.double())
        expected = torch.view_as_real(pairs * factors.unsqueeze(1)).flatten(-2)
        assert torch.allclose(found.double(), expected, atol=1e-5)


def test_tables_of_unknown_places_are_refused() -> None:
    with pytest.raises(Untranslatable, match="do not come from the rotary embedding"):
        written("torch_rope_with_complex_freqs")


def test_an_op_gets_tables_with_each_frequency_once_twice() -> None:
    code = written("torch_rope_with_explicit_cos_sin", half_tables=True)
    q, k, angles = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8), torch.randn(2, 5, 4)
    cos, sin = angles.cos(), angles.sin()
    turned = eval(code, {"torch": torch, "q": q, "k": k, "cos": cos, "sin": sin})
    for x, found in zip((q, k), turned, strict=True):
        pairs = torch.complex(*x.double().chunk(2, dim=-1))
        expected = pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(1).to(
            torch.complex128
        )
        assert torch.allclose(
            found.double(), torch.cat((expected.real, expected.imag), -1), atol=1e-5
        )
