"""What code of repositories tries, and tables of classes, in small modules."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from tests.unit.codegen.test_own_code import _made, _with_parts, _written

Translate = Callable[..., tuple[Any, str, str]]

TRIED = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        try:
            self.shift = config.shift
        except Exception as error:
            self.shift = 0.5
        else:
            self.shift = self.shift * 2
        finally:
            torch.backends.cudnn.deterministic = True
            self.size = config.size

    def forward(self, x):
        return x * self.size + self.shift
"""


@pytest.mark.parametrize("config", [{"size": 3.0}, {"size": 3.0, "shift": 4.0}])
def test_what_a_constructor_tries_comes_out_as_with_this_config(
    config: dict[str, float], translate: Translate
) -> None:
    state, init, _ = translate(TRIED, config, specialised=True)
    x = torch.randn(5)
    assert "try" not in init
    assert "cudnn" not in init
    assert torch.equal(_made(_written(state), config)(x), _made(TRIED, config)(x))
    guards = [*map(ast.unparse, state.guards)]
    assert guards == ([] if "shift" in config else ["not hasattr(config, 'shift')"])


LAYERS = """
class Part(nn.Module):
    def __init__(self, shifts, number):
        super().__init__()
        try:
            self.shift = shifts[number]
        except IndexError:
            self.shift = 0.0

    def forward(self, x):
        return x + self.shift


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.parts = nn.ModuleList([Part([1.0, 2.0], i) for i in range(config.parts)])

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x
"""


def test_what_fails_for_some_layers_only_is_refused(translate: Translate) -> None:
    with pytest.raises(Untranslatable, match="now and then"):
        translate(LAYERS, {"parts": 3}, specialised=True)


def test_what_is_tried_of_a_text_and_never_run_is_refused(translate: Translate) -> None:
    text = TRIED.replace(
        "return x * self.size + self.shift",
        "try:\n            return x * self.size\n        except IndexError:\n            return x",
    )
    with pytest.raises(Untranslatable, match="no small model comes to"):
        translate(text, {"size": 3.0}, specialised=True)


SEVERAL = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = 1.0
        try:
            self.size = config.size
            if config.shift:
                self.size = 777.0
            self.size = 888.0
        except Exception:
            pass

    def forward(self, x):
        return x * self.size
"""


def test_what_is_done_before_a_try_fails_stays_done(translate: Translate) -> None:
    config = {"size": 3.0}
    state, init, _ = translate(SEVERAL, config, specialised=True)
    assert "777" not in init
    assert "888" not in init
    x = torch.randn(5)
    assert torch.equal(_made(_written(state), config)(x), 3.0 * x)
    assert [*map(ast.unparse, state.guards)] == ["not hasattr(config, 'shift')"]


def test_what_fails_inside_a_statement_of_a_try_is_refused(translate: Translate) -> None:
    text = SEVERAL.replace("if config.shift:", "if config.size:").replace("777.0", "config.shift")
    with pytest.raises(Untranslatable, match="inside one of its statements"):
        translate(text, {"size": 3.0}, specialised=True)


TABLES = """
class Plus(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.size

    def forward(self, x):
        return x + self.size


class Times(Plus):
    def forward(self, x):
        return x * self.size


KINDS = {"first": [Plus, Times], "second": {"other": Plus}}


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.part = KINDS["first"][config.number](config)
        self.last = KINDS[config.kind]["other"](config)

    def forward(self, x):
        return self.last(self.part(x))
"""


def test_classes_are_taken_from_tables_in_tables(translate: Translate) -> None:
    config = {"size": 3.0, "number": 1, "kind": "second"}
    state, init, _ = translate(TABLES, config, specialised=True)
    assert "KINDS" not in init
    assert {"config.number == 1", "config.kind == 'second'"} == {*map(ast.unparse, state.guards)}
    states = state.translator.states.values()
    parts = [each for each in states if each.cls.__name__ in ("Plus", "Times")]
    x = torch.randn(5)
    ours = _made("\n\n\n".join([*map(_written, parts), _written(state)]), config)
    assert torch.equal(ours(x), _made(TABLES, config)(x))


CONVOLVED = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        size = config.size
        self.first = nn.Conv2d(size, 2 * size, (3, 1), padding=(config.pad, 0), groups=2)
        self.second = nn.Conv2d(2 * size, size, (2, 1), padding=(1, 0))

    def forward(self, x):
        seq, batch, size = x.transpose(0, 1).size()
        y = x.transpose(0, 1).view(seq, 1, batch, size).permute(2, 3, 0, 1)
        y = self.second(self.first(y)[:, :, :seq, :])
        y = y[:, :, :seq, :].permute(2, 3, 0, 1).contiguous()
        return y.view(seq, batch, size).transpose(0, 1)
"""


def test_a_convolution_in_two_dimensions_of_which_one_is_one_is_causal(
    translate: Translate,
) -> None:
    config = {"size": 4, "pad": 2}
    state, _, forward = translate(CONVOLVED, config, specialised=True)
    assert "self.first(" not in forward
    original, ours = _made(CONVOLVED, config), _made(_written(state), config)
    ours.load_state_dict(original.state_dict())
    x = torch.randn(2, 7, 4)
    torch.testing.assert_close(ours(x), original(x))


def test_one_that_looks_ahead_stays_as_it_is(translate: Translate) -> None:
    _, _, forward = translate(CONVOLVED, {"size": 4, "pad": 1}, specialised=True)
    assert forward.count("torch_causal_conv1d") == 1


NUMBERED = """
class Part(nn.Module):
    def __init__(self, config, number):
        super().__init__()
        self.chosen = config.chosen
        if config.has and number in self.chosen:
            from no_such_file import Other
            self.other = Other(config)
        else:
            self.other = None

    def forward(self, x):
        if self.other is not None:
            return self.other(x)
        return x + 1.0


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.parts = nn.ModuleList([Part(config, i) for i in range(config.parts)])

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x
"""


def test_a_side_that_no_layer_takes_is_asserted(translate: Translate) -> None:
    config = {"parts": 3, "has": True, "chosen": [3]}
    state, _, _ = translate(NUMBERED, config, specialised=True)
    states = [*state.translator.states.values()]
    part = next(each for each in states if each.cls.__name__ == "Part")
    x = torch.randn(5)
    assert torch.equal(_made(_with_parts(state), config)(x), x + 3.0)
    [guard] = map(ast.unparse, part.guards)
    assert guard.startswith("not (")
    assert "number in" in guard
