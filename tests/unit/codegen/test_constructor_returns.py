"""Constructors that return before their end: model files have none, for what a file takes for granted is
asserted behind all of it, and what one side leaves is no less than the other's.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.skips import without_returns
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from tests.support.odd_code import ATTENTION, GENERATE, run_apart, save_odd, with_rotary
from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]

EITHER = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.bias = 0.5
        if config.plain:
            self.layer = nn.Linear(4, 4)
            if config.flat:
                return
            self.bias = config.size / 2
        else:
            self.layer = nn.Linear(4, 4, bias=False)
            self.bias = 2.0
        self.scale = config.size * 3

    def forward(self, x):
        return self.layer(x) + self.bias
"""


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("flat", [True, False])
def test_a_return_on_one_side_leaves_the_rest_to_the_other(
    plain: bool, flat: bool, translate: Translate
) -> None:
    config = {"plain": plain, "flat": flat, "size": 7}
    state, init, _ = translate(EITHER, config)
    assert "return" not in init
    ours, original = _made(_written(state), config), _made(EITHER, config)
    ours.load_state_dict(original.state_dict())
    x = torch.randn(2, 4)
    assert torch.equal(ours(x), original(x))


def _run(body: list[ast.stmt], values: dict[str, Any]) -> list[str]:
    said: list[str] = []
    text = ast.unparse(ast.Module(body, []))
    lines = "\n".join(f"    {line}" for line in text.splitlines()) or "    pass"
    scope: dict[str, Any] = {"say": said.append}
    exec(f"def run({', '.join(values)}):\n{lines}", scope)
    scope["run"](**values)
    return said


def test_what_runs_is_the_same() -> None:
    text = """
say("a")
if one:
    if two:
        say("b")
        return
    say("c")
elif two:
    return
say("d")
def inner():
    return 3
if one:
    return
else:
    say("e")
    return
say("never")
"""
    body = ast.parse(text).body
    made = without_returns(body)
    returns = [item for top in made for item in ast.walk(top) if isinstance(item, ast.Return)]
    assert [ast.unparse(item) for item in returns] == ["return 3"] * len(returns)
    for one in (True, False):
        for two in (True, False):
            values = {"one": one, "two": two}
            assert _run(made, values) == _run(body, values)
    assert without_returns(ast.parse("if one:\n    return\nelse:\n    return\nsay(1)").body) == []
    loop = ast.parse("for i in one:\n    if i:\n        return").body
    assert without_returns(loop) == loop
    value = ast.parse("if one:\n    return 3\nsay(1)").body
    assert without_returns(value) == value


def test_a_loop_that_returns_is_refused(translate: Translate) -> None:
    loop = "for _ in range(config.size):\n            if config.flat:\n                return"
    text = EITHER.replace("self.bias = 0.5", loop, 1)
    with pytest.raises(Untranslatable, match="a loop of which returns"):
        translate(text, {"plain": True, "flat": False, "size": 7})


BASE = """
class Base(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=config.plain)
        self.kind = "first"
        if config.flat:
            return
        self.kind = "second"


class Toy(Base):
    def __init__(self, config):
        super().__init__(config)
        self.more = nn.Linear(4, 4)

    def forward(self, x):
        x = self.more(self.layer(x))
        return x * 2 if self.kind == "first" else x
"""


@pytest.mark.parametrize("specialised", [True, False])
@pytest.mark.parametrize("flat", [True, False])
def test_what_follows_a_base_that_returns(
    flat: bool, specialised: bool, translate: Translate
) -> None:
    config = {"plain": True, "flat": flat}
    state, init, _ = translate(BASE, config, specialised=specialised)
    assert "return" not in init
    ours, original = _made(_written(state), config), _made(BASE, config)
    ours.load_state_dict(original.state_dict())
    x = torch.randn(2, 4)
    assert torch.equal(ours(x), original(x))


_ROTARY = """
class Rotary(nn.Module):
    def __init__(self, size, scaled=False, theta=10000.0):
        super().__init__()
        self.inv = 1.0 / theta ** (torch.arange(0, size, 2).float() / size)
        if not scaled:
            self.register_buffer("scale", None)
            return
        self.register_buffer("scale", torch.arange(size) / size)

    def forward(self, position_ids):
        angles = position_ids[:, None, :, None].float() * self.inv.to(position_ids.device)
        return angles if self.scale is None else angles * self.scale
"""


def test_no_constructor_of_a_file_returns_before_its_end(tmp_path: Path) -> None:
    first, rest = ATTENTION.index("inv = "), ATTENTION.index("cos, sin")
    attention = f"{ATTENTION[:first]}angles = self.rotary(position_ids)\n{ATTENTION[rest:]}"
    folder = save_odd(tmp_path / "odd_early", head=_ROTARY, attention=attention)
    with_rotary(folder, "Rotary(self.size, scaled=getattr(config, 'scaled', False))")
    found = run_apart(GENERATE, [folder])[folder.name]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    classes = [node for node in ast.parse(found["text"]).body if isinstance(node, ast.ClassDef)]
    made = {
        top.name: ast.unparse(node)
        for top in classes
        for node in top.body
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    }
    assert "return" not in "".join(made.values())
    assert made["Rotary"].count("self.register_buffer('scale'") == 2
