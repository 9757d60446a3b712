"""What constructors of repositories' code change of lists and configs that they have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from tests.support.odd_code import GENERATE, assert_translated, run_apart, save_odd
from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]

LISTED = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.sizes = [int(config.size * 0.4), int(config.size * 0.4)]
        self.sizes[1] += config.size - (self.sizes[0] + self.sizes[1])
        self.layer = nn.Linear(self.sizes[1], 2)

    def forward(self, x):
        first, second = x.split(self.sizes, dim=-1)
        return self.layer(second) * first.sum(-1, keepdim=True)
"""


@pytest.mark.parametrize("size", [5, 9])
def test_an_item_of_a_list_may_be_changed(translate: Translate, size: int) -> None:
    state, _, _ = translate(LISTED, {"size": size}, specialised=True)
    ours, theirs = _made(_written(state), {"size": size}), _made(LISTED, {"size": size})
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, size)
    assert torch.equal(ours(x), theirs(x))


TWICE = """

class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.Linear(config.size, config.size)
        self.parts = nn.ModuleList([Inner(config) for _ in range(2)])

    def forward(self, x):
        x = self.norm(x)
        return self.parts[0](x) + self.parts[1](x)
"""


def _assert_same(translate: Translate, text: str, sizes: dict[str, Any]) -> None:
    """What is written of a module and of its inner class computes what they do."""
    state, _, _ = translate(text, sizes, specialised=True)
    inner = [each for cls, each in state.translator.states.items() if cls.__name__ == "Inner"]
    ours = _made("\n\n\n".join(map(_written, [*inner, state])), sizes)
    theirs = _made(text, sizes)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 4)
    assert torch.equal(ours(x), theirs(x))


CHANGED = (
    """
class Inner(nn.Module):
    def __init__(self, config):
        super().__init__()
        if config.wide is None:
            wide = int(8 * config.size / 3)
            config.wide = 2 * ((wide + 1) // 2)
        self.layer = nn.Linear(config.size, config.wide)

    def forward(self, x):
        return self.layer(x)
"""
    + TWICE
)


def test_a_field_that_one_constructor_alone_reads_may_be_changed_there(
    translate: Translate,
) -> None:
    sizes = {"size": 4, "wide": None}
    _assert_same(translate, CHANGED, sizes)


FOR_METHODS = (
    """
class Inner(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layer = nn.Linear(config.size, config.size)
        self.config = config
        if config.norms is None and config.wide:
            config.norms = 2
        if config.norms == 2:
            self.norm = nn.Linear(config.size, config.size)

    def forward(self, x):
        if self.config.wide and self.config.norms == 2:
            x = self.norm(x)
        return self.layer(x)
"""
    + TWICE
)


@pytest.mark.parametrize("given", [(True, None), (False, None), (False, 2), (True, 1)])
def test_one_that_a_constructor_fills_in_is_what_the_methods_of_its_class_find(
    translate: Translate, given: tuple[bool, int | None]
) -> None:
    sizes = dict(zip(("wide", "norms"), given, strict=True)) | {"size": 4}
    _assert_same(translate, FOR_METHODS, sizes)


def test_one_that_others_read_may_not(translate: Translate) -> None:
    text = CHANGED.replace("return self.layer(x)", "return self.layer(x) * x.shape[-1]")
    text = text.replace("x = self.norm(x)", "x = self.norm(x) * self.config.wide")
    text = text.replace("self.norm =", "self.config = config\n        self.norm =")
    with pytest.raises(Untranslatable, match="an assignment to config.wide"):
        translate(text, {"size": 4, "wide": None}, specialised=True)


CHOSEN = """
from transformers.activations import ACT2FN


class Cut(nn.Module):
    def __init__(self, least):
        super().__init__()
        self.least = least

    def forward(self, x):
        return nn.functional.threshold(x, self.least, 0)


class Inner(nn.Module):
    def __init__(self, size, kind, least=None):
        super().__init__()
        self.layer = nn.Linear(size, size)
        if kind == "cut":
            self.act = Cut(least)
        else:
            self.act = ACT2FN[kind]

    def forward(self, x):
        return self.act(self.layer(x))


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.part = Inner(config.size, config.kind, config.least)

    def forward(self, x):
        return self.part(x)
"""


@pytest.mark.parametrize("kind", ["cut", "silu"])
def test_a_module_or_an_entry_of_a_table_is_what_the_config_says(
    translate: Translate, kind: str
) -> None:
    sizes = {"size": 4, "kind": kind, "least": 0.2}
    state, _, _ = translate(CHOSEN, sizes, specialised=True)
    states = state.translator.states
    assert ("Cut" in {cls.__name__ for cls in states}) == (kind == "cut")
    parts = [each for cls, each in states.items() if cls.__name__ in ("Cut", "Inner")]
    text = "\n\n\n".join(map(_written, sorted([*parts, state], key=lambda x: x.cls.__name__)))
    ours = _made(f"from transformers.activations import ACT2FN\n{text}", sizes)
    theirs = _made(CHOSEN, sizes)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 4)
    assert torch.equal(ours(x), theirs(x))


def test_a_softmax_that_is_made_where_it_is_called_is_the_function(translate: Translate) -> None:
    text = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layer = nn.Linear(config.size, config.size)

    def forward(self, x):
        return nn.Softmax(dim=-1)(self.layer(x))
"""
    state, _, forward = translate(text, {"size": 4}, specialised=True)
    assert "nn.Softmax" not in forward
    ours, theirs = _made(_written(state), {"size": 4}), _made(text, {"size": 4})
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 4)
    assert torch.equal(ours(x), theirs(x))


FILLED = """
        if "verbose" not in self.config.extra:
            self.config.extra["verbose"] = config.num_hidden_layers - 4
        self.scale = 2.0 if self.config.extra["verbose"] > 0 else 3.0
"""


@pytest.mark.parametrize("given", [{}, {"extra": {"name": "x", "verbose": 0}}])
def test_a_default_that_a_model_fills_into_a_default_of_its_config_stays_there(
    given: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_odd(
        tmp_path / "odd_filled", model=USUAL.replace("self.norm(x)", "self.norm(x) * self.scale")
    )
    code, config = folder / "modeling_odd.py", folder / "configuration_odd.py"
    before = "        self.embed = "
    code.write_text(code.read_text().replace(before, f"{FILLED.strip(chr(10))}\n{before}"))
    text = config.read_text().replace("class Odd", 'EXTRA = {"name": "x"}\n\n\nclass Odd')
    text = text.replace("norm_eps=1e-5,", "norm_eps=1e-5, extra=EXTRA,")
    text = text.replace(
        "        self.norm_eps =", "        self.extra = extra\n        self.norm_eps ="
    )
    config.write_text(text)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | given))
    made = run_apart(GENERATE, [folder])["odd_filled"]
    assert made.get("error") is None
    assert made["worst"] < 1e-5
    assert given or "self.scale = 2.0 if" in made["text"]
    assert "not in config.extra" not in made["text"]


USUAL = """
x = self.embed(input_ids)
for layer in self.layers:
    x = layer(x, position_ids)
return self.norm(x)
"""


FOR_EACH = """
        self.wide = getattr(config, "wide", False)
        layers = []
        for index in range(config.num_hidden_layers):
            config.wide = (index >= config.num_hidden_layers - 2) and self.wide
            layers.append(Block(config, index))
        config.wide = self.wide
        self.layers = nn.ModuleList(layers)
"""
_AT_ONCE = (
    "self.layers = nn.ModuleList([Block(config, i) for i in range(config.num_hidden_layers)])\n"
)


def _for_each(folder: Path, default: bool, **given: bool) -> Path:
    """Return a model whose layers find a field of the config as its constructor has put it there."""
    save_odd(
        folder,
        mlp="h = F.silu(self.gate(x)) * self.up(x)\nreturn self.down(2 * h if self.wide else h)",
    )
    code, values = folder / "modeling_odd.py", folder / "config.json"
    text = code.read_text()
    up = "        self.up = "
    for old, new in (
        (up, f'        self.wide = getattr(config, "wide", {default})\n{up}'),
        (_AT_ONCE, FOR_EACH.lstrip()),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    code.write_text(text)
    values.write_text(json.dumps(json.loads(values.read_text()) | given))
    return folder


@pytest.fixture(scope="module")
def for_each(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("each")
    models = [
        _for_each(folder / "odd_absent", default=False),
        _for_each(folder / "odd_off", default=False, wide=False),
        _for_each(folder / "odd_on", default=False, wide=True),
        _for_each(folder / "odd_other_default", default=True),
    ]
    return run_apart(GENERATE, models)


@pytest.mark.parametrize("name", ["odd_absent", "odd_off"])
def test_a_switch_that_layers_are_given_as_it_is_may_be_assigned(
    name: str, for_each: dict[str, Any]
) -> None:
    assert_translated(for_each[name])


@pytest.mark.parametrize("name", ["odd_on", "odd_other_default"])
def test_one_that_layers_differ_in_or_take_otherwise_may_not(
    name: str, for_each: dict[str, Any]
) -> None:
    assert "an assignment to config.wide" in for_each[name].get("error", "")
