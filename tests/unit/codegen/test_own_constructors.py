"""What constructors of repositories' code are given and do, in small modules."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.hf.old.given_logits import giving_logits
from tests.unit.codegen.test_own_code import _made, _with_parts, _written

Translate = Callable[..., tuple[Any, str, str]]

SETTINGS = """
class Gate(nn.Module):
    def __init__(self, size, **kwargs):
        super().__init__()
        self.scale = kwargs.get("scale", 7.0)
        self.shift = kwargs.get("shift", 0.25)
        self.noisy = kwargs.get("noisy", False)
        self.layer = nn.Linear(size, size, bias=False)
        if self.noisy:
            self.noise = nn.Linear(size, size, bias=False)
            self.noise.weight.data = torch.zeros((size, size), requires_grad=True)

    def forward(self, x):
        return self.layer(x) * self.scale + self.shift


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        settings = {"scale": config.scale, "noisy": config.noisy}
        self.gate = Gate(config.size, **settings)

    def forward(self, x):
        return self.gate(x)
"""


@pytest.mark.parametrize("noisy", [False, True])
def test_settings_of_the_config_may_be_given_as_keywords_that_have_no_names(
    translate: Translate, noisy: bool
) -> None:
    sizes = {"size": 3, "scale": 0.5, "noisy": noisy}
    state, _, _ = translate(SETTINGS, sizes, specialised=True)
    gates = [each for cls, each in state.translator.states.items() if cls.__name__ == "Gate"]
    ours = _made("\n\n\n".join([*map(_written, gates), _written(state)]), sizes)
    theirs = _made(SETTINGS, sizes)
    assert ours.state_dict().keys() <= theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict(), strict=False)
    x = torch.randn(2, 3)
    assert torch.equal(ours(x), theirs(x))


TURNS = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        widths, layers = [], []
        for number in range(config.depth):
            if not isinstance(widths, list) or len(widths) >= config.different:
                if isinstance(widths, list):
                    widths = itertools.cycle(widths)
                width = next(widths)
            else:
                width = number + 2
                widths.append(width)
            layers.append(nn.Linear(config.size, width, bias=False))
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        return torch.cat([layer(x) for layer in self.layers], dim=-1)
"""


@pytest.mark.parametrize("depth", [2, 5])
def test_a_list_that_a_loop_makes_an_iterator_is_one_on_some_turns_only(
    translate: Translate, depth: int
) -> None:
    sizes = {"size": 3, "depth": depth, "different": 2}
    state, _, _ = translate(f"import itertools\n{TURNS}", sizes)
    ours = _made(f"import itertools\n{_written(state)}", sizes)
    theirs = _made(f"import itertools\n{TURNS}", sizes)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3)
    assert torch.equal(ours(x), theirs(x))


TAKEN_IN_TURN = """
class Plain(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.inner = nn.Linear(size, size, bias=False)

    def forward(self, x):
        return self.inner(x)


class Wide(nn.Module):
    def __init__(self, inner, size):
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.inner(x) * self.scale


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        kinds = [number % config.every == 0 for number in range(config.depth)]
        inner, others = [], []
        for wide in kinds:
            if wide:
                others.append(Plain(config.size))
            inner.append(Plain(config.size))
        inner = iter(inner)
        others = iter(others)
        layers = []
        for wide in kinds:
            if wide:
                taken = next(others)
                layers.append(Wide(taken, config.size))
                layers.append(taken)
            layers.append(next(inner))
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).sin()
        return x
"""


def test_layers_may_be_taken_from_iterators_in_turn(translate: Translate) -> None:
    sizes = {"size": 4, "depth": 5, "every": 2}
    state, _, _ = translate(TAKEN_IN_TURN, sizes, specialised=True)
    ours = _made(_with_parts(state), sizes)
    theirs = _made(TAKEN_IN_TURN, sizes)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 4)
    assert torch.equal(ours(x), theirs(x))
    assert len({*map(id, ours.parameters())}) == len({*map(id, theirs.parameters())})


def test_what_a_constructor_writes_into_a_buffer_is_not_dropped(translate: Translate) -> None:
    text = SETTINGS.replace(
        "self.noise.weight.data = torch.zeros((size, size), requires_grad=True)",
        "self.register_buffer('table', torch.ones(size), persistent=False)\n"
        "            self.table.data = torch.zeros(size)",
    ).replace("* self.scale", "* self.table * self.scale")
    with pytest.raises(Untranslatable):
        translate(text, {"size": 3, "scale": 0.5, "noisy": True}, specialised=True)


ASKING = """
_FAST = None
_ASKED = False


def look():
    global _FAST, _ASKED
    if _ASKED:
        return
    _ASKED = True
    try:
        from no_such_package import Norm
        _FAST = Norm
    except ImportError:
        _FAST = None


def fast():
    look()
    return _FAST


def made(size):
    kind = fast()
    return nn.Softplus(size) if kind is None else kind(size)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = made(config.size)

    def forward(self, x):
        return self.norm(x)
"""


def test_a_function_that_takes_nothing_gives_what_it_gave(translate: Translate) -> None:
    state, init, _ = translate(ASKING, {"size": 4}, specialised=True)
    assert "nn.Softplus(config.size)" in init
    x = torch.randn(2, 4)
    assert torch.equal(_made(_written(state), {"size": 4})(x), _made(ASKING, {"size": 4})(x))


def test_one_that_gives_something_else_each_time_does_not(translate: Translate) -> None:
    counting = ASKING.replace("    look()\n", "    global _ASKED\n    _ASKED += 1\n    look()\n")
    counting = counting.replace("return _FAST", "return _ASKED")
    counting = counting.replace("if kind is None else kind(size)", "if kind < 99 else None")
    with pytest.raises(Untranslatable, match="_ASKED"):
        translate(counting, {"size": 4}, specialised=True)


KEPT = """
class Settings:
    def __init__(self, width, heads=2, deep=3):
        self.width = width
        self.size = self.width // heads
        self.deep = deep


class Inner(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.settings = settings
        self.layers = nn.ModuleList(
            [nn.Linear(settings.width, settings.width) for _ in range(settings.deep)]
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).view(-1, 2, self.settings.size).flatten(1)
        return x


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = Inner(Settings(width=config.size, deep=config.layers))

    def forward(self, x):
        return self.inner(x)
"""


def test_settings_of_a_plain_class_are_read_from_the_config(translate: Translate) -> None:
    sizes = {"size": 6, "layers": 2}
    state, _, _ = translate(KEPT, sizes, specialised=True)
    parts = [each for cls, each in state.translator.states.items() if cls.__name__ == "Inner"]
    ours = _made("\n\n\n".join(map(_written, (*parts, state))), sizes)
    theirs = _made(KEPT, sizes)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 6)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize(
    "change",
    [
        ("self.deep = deep", "self.deep = deep\n        self.width += 2"),
        ("self.deep = deep", "self.deep = deep\n\n    def more(self):\n        return 1"),
    ],
)
def test_settings_that_are_more_than_kept_are_not(
    change: tuple[str, str], translate: Translate
) -> None:
    with pytest.raises(Untranslatable, match="Settings"):
        translate(KEPT.replace(*change), {"size": 6, "layers": 2}, specialised=True)


NAMED = """
from dataclasses import dataclass


@dataclass
class Out:
    hidden: torch.Tensor = None
    factor: float = 3.0
    loss: torch.Tensor = None


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.size

    def forward(self, x):
        out = Out(hidden=x * self.size)
        if out.loss is not None:
            return out.loss
        return out.hidden * out.factor
"""


def test_what_a_forward_gives_by_names_needs_no_class_of_transformers(translate: Translate) -> None:
    state, _, forward = translate(NAMED, {"size": 4}, specialised=True)
    assert "Out" not in forward
    x = torch.randn(2, 4)
    assert torch.equal(_made(_written(state), {"size": 4})(x), _made(NAMED, {"size": 4})(x))


TRAINED = """
class Inner(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, x):
        return self.layer(x)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner, self.size = Inner(config.size), config.size
        self.inner.requires_grad_(True)
        self.requires_grad_(config.size > 3)

    def forward(self, x):
        return self.inner(x)
"""


def test_which_weights_are_trained_is_left_out(translate: Translate) -> None:
    _, init, _ = translate(TRAINED, {"size": 4}, specialised=True)
    assert "requires_grad_" not in init


@dataclass
class _Plain:
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


@pytest.mark.parametrize("kind", [_Plain, SimpleNamespace, Namespace])
def test_logits_in_an_object_are_given_as_transformers_does(kind: Callable[..., Any]) -> None:
    logits = torch.randn(2, 5, 3)

    class Model:
        config = SimpleNamespace(vocab_size=3)

        @giving_logits
        def forward(self, input_ids: torch.Tensor) -> Any:
            return kind(logits=logits)

    output = Model().forward(torch.zeros(2, 5, dtype=torch.int64))
    assert isinstance(output, CausalLMOutput)
    assert output.logits is logits


ANSWERS = """
import argparse
from types import SimpleNamespace


class Answer:
    def __init__(self, first, second=None):
        "What is found."
        self.value = first
        self.loss = second


class Halved:
    def __init__(self, first, second=None):
        self.value = first / 2


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = nn.Linear(config.size, config.size)

    def found(self, x):
        return MADE

    def forward(self, x):
        found = self.found(x)
        return found.value if found.loss is None else found.loss
"""


@pytest.mark.parametrize(
    "made",
    [
        "Answer(self.inner(x))",
        "Answer(second=None, first=self.inner(x))",
        "SimpleNamespace(value=self.inner(x), loss=None)",
        "argparse.Namespace(loss=None, value=self.inner(x))",
    ],
)
def test_what_a_forward_returns_in_an_object_is_taken_by_its_names(
    made: str, translate: Translate
) -> None:
    text = ANSWERS.replace("MADE", made)
    state, _, _ = translate(text, {"size": 6}, specialised=True)
    written = _written(state)
    assert not {"Answer", "Namespace", "SimpleNamespace", "loss"} & set(re.findall(r"\w+", written))
    ours, theirs = _made(written, {"size": 6}), _made(text, {"size": 6})
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 6)
    torch.testing.assert_close(ours(x), theirs(x))


def test_what_the_constructor_of_an_object_computes_is_computed(translate: Translate) -> None:
    text = ANSWERS.replace("MADE", "Halved(self.inner(x))").replace("found.loss is None", "True")
    state, _, _ = translate(text, {"size": 6}, specialised=True)
    written = _written(state)
    assert "Halved" not in written
    ours, theirs = _made(written, {"size": 6}), _made(text, {"size": 6})
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 6)
    torch.testing.assert_close(ours(x), theirs(x))


NAMED_SUPER = """
class First(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.first = nn.Linear(config.size, config.size)


class Second(First):
    def __init__(self, config):
        super(Second, self).__init__(config)
        self.second = nn.Linear(config.size, config.size)


class Toy(Second):
    def __init__(self, config):
        super(BEHIND, self).__init__(GIVEN)
        self.own = nn.Linear(config.size, config.size)

    def forward(self, x):
        return self.own(x)
"""


def test_super_begins_behind_the_class_that_it_names(translate: Translate) -> None:
    for behind, given, made in (
        ("Toy", "config", {"first", "second"}),
        ("Second", "config", {"first"}),
        ("First", "", set()),
    ):
        text = NAMED_SUPER.replace("BEHIND", behind).replace("GIVEN", given)
        _, init, _ = translate(text, {"size": 4}, specialised=True)
        found = {name for name in ("first", "second", "own") if f"self.{name} = " in init}
        assert found == made | {"own"}


_TYING = """
class Inner(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.words = nn.Embedding(config.words, config.size)


class Toy(nn.Module):
    _tied_weights_keys = {"head.weight": "inner.words.weight"}

    def __init__(self, config):
        super().__init__()
        self.inner = Inner(config)
        self.table, self.other = self.inner.words, nn.Embedding(config.words, config.size)
        self.head = nn.Linear(config.size, config.words, bias=False)
        self.tie()

    def tie(self):
        self.head.weight = SOURCE.weight

    def forward(self, x):
        return self.head(self.table(x))
"""


def test_weights_are_tied_under_any_of_a_modules_names(translate: Translate) -> None:
    config = {"words": 7, "size": 4}
    for name in ("self.table", "self.inner.words"):
        _, init, _ = translate(_TYING.replace("SOURCE", name), config, specialised=True)
        assert "head.weight" not in init  # written for all ties at once
    with pytest.raises(Untranslatable, match=r"an assignment to self\.head\.weight"):
        translate(_TYING.replace("SOURCE", "self.other"), config, specialised=True)
