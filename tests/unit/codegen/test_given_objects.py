"""Objects that modules give to one another: generated code gives, and returns, their fields."""

from __future__ import annotations

import pytest

from tests.support.given_objects import BLOCK, MADE, MODEL, OF_STREAM, STREAM, TURN, save_given
from tests.support.odd_code import GENERATE, assert_translated, run_apart

GIVEN: dict[str, dict[str, str]] = {
    "dataclass": {},
    "named_tuple": {
        "head": "class State(NamedTuple):\n    cos: torch.Tensor\n    sin: torch.Tensor\n"
        "    scale: float = 0.5",
        "made": "State(angles.cos(), sin=angles.sin())",
        "turn": "cos, sin, _ = given\n"
        "q, k = rotate(q, cos, given.sin) * given.scale, rotate(k, given[0], sin)",
    },
    "namespace": {"made": "SimpleNamespace(cos=angles.cos(), sin=angles.sin(), causal=True)"},
    "own_class": {
        "head": "class State:\n    def __init__(self, angles, cache=None):\n"
        "        self.cos = angles.cos()\n        self.sin = angles.sin()\n"
        "        self.cache = cache\n\n    def turned(self, y):\n"
        "        return rotate(y, self.cos, self.sin)",
        "made": "State(angles)",
        "turn": "q, k = given.turned(q), given.turned(k)\nif given.cache is not None:\n"
        "    k, v = given.cache.update(k, v)",
    },
    "properties": {
        "head": "@dataclass\nclass State:\n    angles: torch.Tensor\n    scale: float = 0.5\n\n"
        "    @classmethod\n    def of(cls, angles):\n        return cls(angles=angles)\n\n"
        "    @property\n    def cos(self):\n        return self.angles.cos() * self.scale\n\n"
        "    @property\n    def sin(self):\n        return self.angles.sin() * self.scale",
        "made": "State.of(angles)",
    },
    "made_after": {
        "head": "@dataclass\nclass State:\n    angles: torch.Tensor\n\n    def __post_init__(self):\n"
        "        self.cos, self.sin = self.angles.cos(), self.angles.sin()",
        "made": "State(angles)",
    },
    "nested": {
        "head": "@dataclass\nclass Context:\n    rotary: Rotary\n    scale: float = 0.5\n"
        "    causal: bool = True",
        "made": f"Context(rotary={MADE})",
        "turn": TURN.replace("given", "given.rotary") + "\nq = q * given.scale\n"
        "if not given.causal:\n    raise ValueError",
    },
    "helpers": {
        "head": "def rotary_of(angles):\n    cos, sin = angles.cos(), angles.sin()\n"
        "    return Rotary(cos=cos, sin=sin)\n\n\ndef turned(q, k, rotary):\n"
        "    cos, sin = rotary.cos, rotary.sin\n"
        "    return rotate(q, cos, sin), rotate(k, cos, sin)",
        "made": "rotary_of(angles)",
        "turn": "q, k = turned(q, k, given)",
    },
    "as_keywords": {
        "block": BLOCK.replace("given", "**vars(given)"),
        "taken": "cos, sin",
        "turn": "q, k = rotate(q, cos, sin), rotate(k, cos, sin)",
    },
    "as_a_dict": {
        "block": BLOCK.replace("given", "asdict(given)"),
        "turn": "q, k = rotate(q, given['cos'], given['sin']), rotate(k, given['cos'], given['sin'])",
    },
    "by_keyword": {
        "model": MODEL.replace("layer(x, given)", "layer(x, given=given)"),
        "block": BLOCK.replace("given", "given=kwargs['given']"),
        "block_taken": "**kwargs",
        "taken": "*, given: Optional[Rotary] = None",
    },
    "another_one": {
        "head": STREAM,
        "model": OF_STREAM,
        "block": "x = given.x + self.attn(self.norm1(given.x), given.rotary)\n"
        "return replace(given, x=x + self.mlp(self.norm2(x)), depth=given.depth + 1)",
        "block_only": "given",
    },
    "lists": {
        "head": "@dataclass(frozen=True)\nclass Layer:\n    scale: float\n    causal: bool = True",
        "kept": "self.kept = [Layer(1.0 / (i + 1)) for i in range(config.num_hidden_layers)]",
        "model": "x = self.embed(input_ids)\nfor layer, given in zip(self.layers, self.kept):\n"
        "    x = layer(x, given)\nfor i, layer in enumerate(self.layers):\n"
        "    x = layer(x, self.kept[i])\nreturn self.norm(x)",
        "turn": "if given.causal:\n    q = q * given.scale",
    },
    "one_of_several": {
        "model": "x, angles = self.embed(input_ids), angles_of(position_ids, self.config)\n"
        "both = [Rotary((angles * s).cos(), (angles * s).sin()) for s in (1.0, 0.5)]\n"
        "for i, layer in enumerate(self.layers):\n    x = layer(x, both[i % 2])\n"
        "return self.norm(x)",
    },
    "picked_by_key": {
        "model": "x, angles = self.embed(input_ids), angles_of(position_ids, self.config)\n"
        "half = angles * 0.5\nboth = {'full': Rotary(angles.cos(), angles.sin()),"
        " 'local': Rotary(half.cos(), half.sin())}\n"
        "for layer in self.layers:\n    x = layer(x, both[layer.kind])\nreturn self.norm(x)",
    },
    "picked_by_condition": {
        "model": "x, angles = self.embed(input_ids), angles_of(position_ids, self.config)\n"
        "if self.config.rope_theta > 600:\n    one = Rotary(angles.cos(), angles.sin())\n"
        "else:\n    one = Rotary(angles.sin(), angles.cos())\n"
        "other = Rotary(one.cos * 0.5, one.sin * 0.5)\nfor i, layer in enumerate(self.layers):\n"
        "    x = layer(x, one if i % 2 == 0 else other)\nreturn self.norm(x)",
    },
    "in_some_layers": {
        "head": "@dataclass\nclass State(Rotary):\n    bias: Optional[torch.Tensor] = None\n"
        "    scale: float = 0.5",
        "made": "State(angles.cos(), angles.sin())",
        "block": "given = given if self.kind == 'full' else None\nif self.index == 1:\n"
        "    x = x + self.attn(self.norm1(x))\nelse:\n"
        "    x = x + self.attn(self.norm1(x), given=given)\nreturn x + self.mlp(self.norm2(x))",
        "taken": "given: Optional[State] = None",
        "turn": f"if given is not None:\n    {TURN}\n    q = q * given.scale",
    },
    "asked": {
        "head": "from functools import cached_property\n\n\nclass State:\n"
        "    def __init__(self, first, second):\n        self.first, self.second = second, first\n\n"
        "    def __getitem__(self, key):\n        return self.second if key == 0 else self.first\n\n"
        "    def __call__(self, y):\n        return rotate(y, *self.both)\n\n"
        "    @cached_property\n    def both(self):\n        return self[0], self.first",
        "made": "State(angles.cos(), angles.sin())",
        "turn": "q, k = given(q), rotate(k, given[0], given[1])",
    },
    "list_given": {
        "made": "[Rotary(angles.cos(), angles.sin()), Rotary(angles.sin(), angles.cos())]",
        "turn": "q, k = rotate(q, given[0].cos, given[1].cos), rotate(k, given[0].cos, given[-1].cos)",
    },
    "collected": {
        "head": "@dataclass\nclass Made:\n    hidden: torch.Tensor\n    size: torch.Tensor\n"
        "    states: list = field(default_factory=list)",
        "block": f"{BLOCK.replace('return x +', 'x = x +')}\n"
        "return Made(x, size=x.norm(dim=-1, keepdim=True))",
        "model": MODEL.replace("{made}", MADE)
        .replace("for layer", "outs = []\nfor layer")
        .replace(
            "x = layer(x, given)", "out = layer(x, given)\n    x = out.hidden\n    outs.append(out)"
        )
        .replace("norm(x)", "norm(x / sum(out.size for out in outs))"),
    },
    "changed_by_its_owner": {
        "head": f"{STREAM}\n\n    def add(self, x):\n        self.x = self.x + x\n"
        "        self.depth += 1",
        "model": OF_STREAM.replace(
            "    given = layer(given)",
            "    given.add(layer(given.x, given.rotary) / (1 + given.depth))\n    other = given\n"
            "    other.x = other.x * 0.5",
        ),
    },
    "results": {
        "head": "@dataclass\nclass Mixed:\n    hidden: torch.Tensor\n    size: torch.Tensor\n"
        "    cache: Any = None",
        "end": "return Mixed(self.out(y), size=y.norm(dim=-1, keepdim=True))",
        "block": "mixed = self.attn(self.norm1(x), given)\nx = x + mixed.hidden / (1.0 + mixed.size)\n"
        "if mixed.cache is not None:\n    x = x + mixed.cache\nreturn x + self.mlp(self.norm2(x))",
    },
}


REFUSED: dict[str, dict[str, str]] = {
    "changed_under_another_name": {
        "head": STREAM,
        "model": OF_STREAM.replace("for layer", "other = given\nfor layer")
        .replace("given = layer(given)", "given.x = layer(given.x, given.rotary)")
        .replace("given.x)", "other.x)"),
    },
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder = tmp_path_factory.mktemp("given")
    return run_apart(
        GENERATE, [save_given(folder / key, form) for key, form in (GIVEN | REFUSED).items()]
    )


@pytest.mark.parametrize("name", [*GIVEN])
def test_its_fields_are_given(name: str, found: dict[str, dict[str, object]]) -> None:
    made = found[name]
    assert_translated(made)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("changed_under_another_name", "given, which a loop changes, and which has another name"),
    ],
)
def test_a_change_that_another_one_would_miss_is_refused(
    name: str, said: str, found: dict[str, dict[str, object]]
) -> None:
    assert said in str(found[name].get("error")), found[name]
