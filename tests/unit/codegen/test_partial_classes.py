"""Classes of modules that constructors give some arguments before they make any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.output.emit import _class_text, _constructor_calls
from tests.unit.codegen.test_own_code import _made, _with_parts

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
    head = "from torch.nn import LayerNorm\n"
    ours, theirs = (
        _made(head + _with_parts(state), SIZES),
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


HANDED = """
class Norm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Centred(Norm):
    def forward(self, x, gain=2.0):
        return super().forward(x - x.mean(-1, keepdim=True)) * gain


class Block(nn.Module):
    def __init__(self, config, norm_layer=DEFAULT):
        super().__init__()
        BODY

    def make(self, size):
        self.norm1 = self.norm_layer(size)

    def made(self, size):
        return self.norm_layer(size)

    def forward(self, x):
        return x + self.norm1(x).tanh()


class Stage(nn.Module):
    def __init__(self, config, block, depth, **kwargs):
        super().__init__()
        self.blocks = nn.ModuleList([block(config, **kwargs) for _ in range(depth)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        norm = partial(Norm, eps=config.eps)
        self.first = Block(FIRST)
        self.last = Block(LAST)

    def forward(self, x):
        return self.last(self.first(x))


if __name__ != "builtins":
    from onboard.analysis.blocks.wrapper_classes import telling_wrappers_apart

    Toy.__init__ = telling_wrappers_apart(Toy.__init__, __name__)
"""
IMPORTED = "from functools import partial\n"
MADE = "self.norm1 = norm_layer(config.size)"
KEPT = "self.norm_layer = norm_layer; self."
BODIES = [MADE, KEPT + "make(config.size)", KEPT + "norm1 = self.made(config.size)"]


def _handed(
    translate: Translate, body: str, first: str, last: str, default: str, text: str = HANDED
) -> str:
    text = IMPORTED + text.replace("BODY", body).replace("DEFAULT", default)
    text = text.replace("FIRST", first).replace("LAST", last)
    state, _, _ = translate(text, SIZES, specialised=True)
    written = _with_parts(state)
    head = "from torch.nn import LayerNorm\n"
    ours, theirs = _made(head + written, SIZES), _made(text, SIZES)
    for parameter in theirs.parameters():
        parameter.data.uniform_(-1.0, 1.0)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(ours(x), theirs(x))
    assert "norm_layer(" not in written
    assert "partial" not in written
    return written


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    "given",
    [
        "nn.LayerNorm",
        "norm_layer=Norm",
        "partial(Norm, eps=0.5)",
        "norm_layer=partial(Norm, eps=config.eps)",
        "norm",
        "partial(nn.LayerNorm, eps=config.eps)",
    ],
)
def test_a_constructor_is_handed_a_class(body: str, given: str, translate: Translate) -> None:
    _handed(translate, body, f"config, {given}", f"config, {given}", "None")


@pytest.mark.parametrize(
    "made",
    [
        "Stage(config, Block, 2, norm_layer=norm)",
        "Stage(config, partial(Block, norm_layer=norm), depth=2)",
        "Stage(config, block=partial(Block, norm_layer=nn.LayerNorm), depth=2)",
    ],
)
def test_a_class_is_handed_on(made: str, translate: Translate) -> None:
    given = "config, nn.LayerNorm" if "LayerNorm" in made else "config, norm"
    text = HANDED.replace("self.first = Block(FIRST)", f"self.first = {made}")
    _handed(translate, MADE, "", given, "None", text)


def test_an_argument_of_a_partial_has_the_type_that_its_class_says(translate: Translate) -> None:
    text = HANDED.replace("BODY", MADE).replace("DEFAULT", "None")
    text = IMPORTED + text.replace("FIRST", "config, norm").replace("LAST", "config, norm")
    state, _, _ = translate(text, SIZES, specialised=True)
    block = state.attributes["first"].classes[0]
    translator = state.translator
    calls = _constructor_calls(translator)
    written = _class_text(translator.states[block], translator, state, calls)
    assert "norm_layer_eps: float" in written.methods[0].signature


@pytest.mark.parametrize("default", ["nn.LayerNorm", "Norm", "partial(Norm, eps=0.5)"])
def test_a_class_is_the_default_of_a_parameter(default: str, translate: Translate) -> None:
    _handed(translate, MADE, "config", "config", default)


def test_partials_of_one_class_differ_in_what_they_give(translate: Translate) -> None:
    written = _handed(
        translate, MADE, "config, partial(Norm, eps=0.5)", "config, partial(Norm, eps=2.0)", "None"
    )
    assert "norm_layer_eps" in written
    assert written.count("class Block") == 1


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("last", ["config, Centred", "config, partial(Centred, eps=config.eps)"])
def test_blocks_that_are_handed_different_classes_have_classes_of_their_own(
    body: str, last: str, translate: Translate
) -> None:
    written = _handed(translate, body, "config", last, "Norm")
    for name in ("BlockNorm", "BlockCentred"):
        assert f"class {name}(nn.Module)" in written


def test_classes_that_cannot_be_told_apart_are_refused(translate: Translate) -> None:
    body = "self.norm1 = nn.Sequential(*[norm_layer(config.size)])"
    with pytest.raises(Untranslatable, match="another class"):
        _handed(translate, body, "config, Norm", "config, Centred", "None")


def test_an_argument_of_a_partial_takes_no_name_that_is_there(translate: Translate) -> None:
    body = "norm_layer_eps = 2.0; " + MADE + "; self.norm1.eps = norm_layer_eps"
    with pytest.raises(Untranslatable, match="norm_layer_eps"):
        _handed(translate, body, "config, norm", "config, norm", "None")


IN_LISTS = [
    "self.norm1 = nn.Sequential(nn.Linear(config.size, config.size), norm_layer(config.size))",
    "self.norms = nn.ModuleList([norm_layer(config.size) for _ in range(2)]); self.norm1 = nn.GELU()",
    "self.norms = nn.ModuleList([norm_layer(config.size)]); self.norm1 = nn.GELU()",
]


@pytest.mark.parametrize("body", IN_LISTS)
@pytest.mark.parametrize(
    ("first", "last"), [("Norm", "nn.LayerNorm"), ("Centred", "norm"), ("nn.LayerNorm", "Centred")]
)
def test_blocks_that_make_modules_of_several_classes_in_lists_are_several_classes(
    body: str, first: str, last: str, translate: Translate
) -> None:
    through = "for norm in self.norms:\n            x = norm(x)\n        return x + self.norm1(x)"
    text = HANDED.replace("return x + self.norm1(x)", through) if "norms" in body else HANDED
    written = _handed(translate, body, f"config, {first}", f"config, {last}", "None", text)
    assert written.count("class Block") == 2


@pytest.mark.parametrize("made", ["partial(Norm, eps=0.5)", "partial(nn.LayerNorm, eps=0.25)"])
def test_a_file_may_have_such_a_class(made: str, translate: Translate) -> None:
    text = NORMED.replace("norm = MADE", "norm = Made").replace(
        "class Toy", f"Made = {made}\n\n\nclass Toy"
    )
    state, init, _ = translate(text, SIZES, specialised=True)
    assert "Made" not in init
    head = "from torch.nn import LayerNorm\n"
    ours, theirs = _made(head + _with_parts(state), SIZES), _made(text, SIZES)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(ours(x), theirs(x))
