"""Settings that the file itself has: objects that it makes when it is imported, classes' constants,
members of enumerations, tables that decorators fill, functions with some of their arguments.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.given_objects import BLOCK, MADE, MODEL, TURN, save_given
from tests.support.odd_code import GENERATE, assert_translated, run_apart

Edit = tuple[str, str]
_SETTINGS = "@dataclass\nclass Settings:\n    scale: float = 0.5\n    causal: bool = True\n\n\n"
_KIND = "self.kind = 'local' if index % 2 else 'full'"
_OF_KIND = "x = x + self.attn(self.norm1(x), given)\nif {test}:\n    x = x * 0.5\n" + (
    "return x + self.mlp(self.norm2(x))"
)
_ENUM = "from enum import Enum\n\n\nclass Kind({bases}):\n    FULL = 'full'\n    LOCAL = 'local'\n"
_MLP = "return self.down(F.silu(self.gate(x)) * self.up(x))"
_SQUARED = "\n\n\n{register}\ndef squared(x):\n    return F.relu(x).pow(2)\n"
_STATE = (
    "class State:\n    def __init__(self, cos, sin):\n        self.cos, self.sin = cos, sin\n\n"
)
_NORM = """NORMS = {}


def register(key):
    def inner(cls):
        NORMS[key] = cls
        return cls
    return inner


@register('rms')
class Rms(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
"""
_REGISTRY = """class Registry:
    def __init__(self):
        self.found = {}

    def register(self, key):
        def inner(function):
            self.found[key] = function
            return function
        return inner

    def get(self, key):
        return self.found[key]


ACTS = Registry()"""

FORMS: dict[str, tuple[dict[str, str], list[Edit]]] = {
    "object": (
        {
            "head": f"{_SETTINGS}DEFAULT = Settings(scale=0.7)",
            "turn": f"{TURN}\nif DEFAULT.causal:\n    q = q * DEFAULT.scale",
        },
        [],
    ),
    "object_in_a_constructor": (
        {"head": f"{_SETTINGS}DEFAULT = Settings(0.7)", "turn": f"{TURN}\nq = q * self.scale"},
        [
            (
                "self.theta = config.rope_theta",
                "self.theta = config.rope_theta\n        self.scale = DEFAULT.scale",
            )
        ],
    ),
    "table_of_objects": (
        {
            "head": f"{_SETTINGS}TABLE = {{'full': Settings(0.7), 'local': Settings(0.3)}}",
            "block": BLOCK.replace("given)", "given) * TABLE[self.kind].scale"),
        },
        [],
    ),
    "members": (
        {
            "head": _ENUM.format(bases="Enum"),
            "block": _OF_KIND.format(test="self.kind is Kind.FULL"),
        },
        [(_KIND, "self.kind = Kind.LOCAL if index % 2 else Kind.FULL")],
    ),
    "members_by_text": (
        {
            "head": _ENUM.format(bases="str, Enum"),
            "block": _OF_KIND.format(test="self.kind == Kind.FULL"),
        },
        [(_KIND, "self.kind = Kind('local' if index % 2 else 'full')")],
    ),
    "constants_of_a_class": (
        {
            "head": "class Settings:\n    width = 4\n    scale = 0.25",
            "turn": f"{TURN}\nq = q * Settings.scale / Settings.width",
        },
        [],
    ),
    "registered_classes": (
        {"head": _NORM},
        [
            (
                "self.norm1 = Norm(config.hidden_size, config.norm_eps)",
                "self.norm1 = NORMS['rms'](config.hidden_size, config.norm_eps)",
            )
        ],
    ),
    "registered_functions": (
        {"head": _REGISTRY + _SQUARED.format(register="@ACTS.register('squared')")},
        [(_MLP, "return self.down(ACTS.get('squared')(self.gate(x)) * self.up(x))")],
    ),
    "some_arguments": (
        {"head": "from functools import partial\n\nact = partial(F.gelu, approximate='tanh')"},
        [(_MLP, "return self.down(act(self.gate(x)) * self.up(x))")],
    ),
    "counts_as_true": (
        {
            "head": f"{_STATE}    def __bool__(self):\n        return self.cos is not None",
            "made": "State(angles.cos(), angles.sin())",
            "turn": f"if given:\n    {TURN}\nif not given:\n    q = q * 0.5",
        },
        [],
    ),
    "has_a_length": (
        {
            "head": f"{_STATE}    def __len__(self):\n        return 2",
            "made": "State(angles.cos(), angles.sin())",
            "turn": f"if len(given) == 2 and given:\n    {TURN}",
        },
        [],
    ),
    "equals": (
        {
            "head": "class Kind:\n    def __init__(self, name):\n        self.name = name\n\n"
            "    def __eq__(self, other):\n        return self.name == other.name\n\n\n"
            "@dataclass\nclass State(Rotary):\n    kind: Any = None",
            "made": "State(angles.cos(), angles.sin(), Kind('full'))",
            "turn": f"{TURN}\nif given.kind == Kind('full'):\n    q = q * 0.5",
        },
        [],
    ),
}


def _save(folder: Path) -> Path:
    form, edits = FORMS[folder.name]
    file = save_given(folder, {"model": MODEL.replace("{made}", form.get("made", MADE)), **form})
    text = (file / "modeling_odd.py").read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    (file / "modeling_odd.py").write_text(text)
    return file


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder = tmp_path_factory.mktemp("settings")
    return run_apart(GENERATE, [_save(folder / name) for name in FORMS])


@pytest.mark.parametrize("name", [*FORMS])
def test_what_the_file_says_is_known(name: str, found: dict[str, dict[str, object]]) -> None:
    assert_translated(found[name])
