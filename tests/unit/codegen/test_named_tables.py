"""Tables that a file looks the config's names up in, and enumerations of such names."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.enumerations import MembersAsValues
from onboard.codegen.translate.output.tidied import _use_values
from tests.unit.codegen.test_own_code import _made, _with_parts

Translate = Callable[..., tuple[Any, str, str]]
TOY = """
from enum import Enum
from transformers.activations import ClassInstantier

class Kind(Enum):
    plain = "plain"
    doubled = "twice"

SHORT = {"swiglu": "swish", "geglu": "gelu", "tanglu": "tanh"}
TABLE = ClassInstantier(
    {"swish": nn.SiLU, "gelu": (nn.GELU, {"approximate": "tanh"}), "tanh": nn.Tanh}
)

def base_of(name):
    if name in TABLE:
        return TABLE[name]
    raise ValueError("invalid")

def gated_of(name):
    if name in ("glu", "sigmoid_glu"):
        return nn.GLU()
    else:
        if name in SHORT:
            name = SHORT[name]
        elif name.endswith("_glu"):
            name = name[:-4]
        else:
            raise ValueError("invalid")
        base = base_of(name)
        made = Gated(base)
    return made

def is_gated(name):
    return name.endswith("glu")

def activation_of(name):
    return gated_of(name) if is_gated(name) else base_of(name)

class Gated(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        x = x.chunk(2, dim=-1)
        return x[0] * self.base(x[1])

class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.kind = Kind(config.kind)
        self.act = activation_of(config.act)
        width = 2 * config.size if is_gated(config.act) else config.size
        if self.kind == Kind.doubled:
            self.proj = nn.Linear(config.size, width)
        elif self.kind == Kind.plain:
            self.proj = nn.Linear(config.size, width, bias=False)

    def forward(self, x):
        y = self.act(self.proj(x))
        if self.kind == Kind.doubled:
            y = y * 2
        return y
"""

ASKED = """
class Halved(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.size

    def forward(self, x):
        return x / self.size

class Doubled(Halved):
    def forward(self, x):
        return x * self.size

TABLE = {"half": Halved, "double": Doubled}

class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        kind = config.kind
        self.kind = TABLE.get(KEY, OTHER)(config)

    def forward(self, x):
        return self.kind(x)
"""


@pytest.mark.parametrize("kind", ["half", "double", "another"])
@pytest.mark.parametrize("key", ["kind", "config.kind", "'half'", "'none'"])
@pytest.mark.parametrize("other", ["Halved", "Doubled"])
def test_modules_of_tables_that_are_asked_for_a_name(
    kind: str, key: str, other: str, translate: Translate
) -> None:
    config, toy = {"kind": kind, "size": 2}, ASKED.replace("KEY", key).replace("OTHER", other)
    state, _, _ = translate(toy, config, specialised=True)
    text = _with_parts(state)
    guards = [ast.unparse(item) for item in state.guards]
    assert "TABLE" not in text + " ".join(guards)
    assert bool(guards) == ("kind" in key)
    x = torch.randn(2, 6)
    assert torch.equal(_made(text, config)(x), _made(toy, config)(x))
    for another in {"half", "double", "another"} - {kind}:
        made = {"config": SimpleNamespace(kind=another), "kind": another}
        same = _made(toy, config | {"kind": another})(x).equal(_made(toy, config)(x))
        assert same or "kind" not in key or not all(eval(item, made) for item in guards)


@pytest.mark.parametrize("act", ["swiglu", "geglu", "tanglu"])
@pytest.mark.parametrize("kind", ["plain", "twice"])
def test_modules_of_tables_by_the_configs_names(act: str, kind: str, translate: Translate) -> None:
    config = {"size": 6, "act": act, "kind": kind}
    state, _, _ = translate(TOY, config, specialised=True)
    _use_values([*state.translator.states.values()], state.translator)
    text = _with_parts(state)
    guards = [ast.unparse(item) for item in state.guards]
    for name in ("TABLE", "SHORT", "Kind"):
        assert name not in text
        assert not any(name in guard for guard in guards)
    assert any(repr(act) in guard and "==" in guard for guard in guards)
    ours, original = _made(text, config), _made(TOY, config)
    ours.load_state_dict(original.state_dict())
    x = torch.randn(2, 6)
    assert torch.equal(ours(x), original(x))


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Kind(x) == Kind.a", "x == 1"),
        ("Kind(x) is not Kind.a", "x != 1"),
        ("x is None or y is True", "x is None or y is True"),
        ("Kind(x).value + Kind.b.value", "x + 2"),
        ("Kind.a.name", "'a'"),
        ("Other(x) == Other.a", "Other(x) == Other.a"),
    ],
)
def test_members_of_enumerations_are_written_as_their_values(text: str, plain: str) -> None:
    space: dict[str, Any] = {}
    exec("from enum import Enum\nKind = Enum('Kind', {'a': 1, 'b': 2})\nclass Other: pass", space)
    made = MembersAsValues(space).visit(ast.parse(text, mode="eval"))
    assert ast.unparse(made) == plain
