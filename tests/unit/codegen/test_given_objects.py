"""Objects that modules give to one another: generated code gives, and returns, their fields."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.odd_code import GENERATE, assert_translated, run_apart, save_odd

_HEAD = """
from collections import namedtuple
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional


def rotate(y, cos, sin):
    first, second = y.chunk(2, -1)
    return (y * cos + torch.cat((-second, first), -1) * sin).to(y.dtype)


def angles_of(position_ids, config):
    size = config.hidden_size // config.num_attention_heads
    inv = 1.0 / config.rope_theta ** (torch.arange(0, size, 2, device=position_ids.device).float() / size)
    angles = position_ids[:, None, :, None].float() * inv
    return torch.cat((angles, angles), -1)


@dataclass
class Rotary:
    cos: torch.Tensor
    sin: torch.Tensor


"""
_TURN = "q, k = rotate(q, given.cos, given.sin), rotate(k, given.cos, given.sin)"
_ATTENTION = """
b, t, _ = x.shape
q, k, v = self.qkv(x).chunk(3, dim=-1)
q = q.view(b, t, self.heads, self.size).transpose(1, 2)
k = k.view(b, t, self.heads, self.size).transpose(1, 2)
v = v.view(b, t, self.heads, self.size).transpose(1, 2)
{turn}
y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
return self.out(y.transpose(1, 2).reshape(b, t, -1))
"""
_BLOCK = "x = x + self.attn(self.norm1(x), given)\nreturn x + self.mlp(self.norm2(x))"
_MODEL = """
x, angles = self.embed(input_ids), angles_of(position_ids, self.config)
given = {made}
for layer in self.layers:
    x = layer(x, given)
return self.norm(x)
"""
_MADE = "Rotary(angles.cos(), angles.sin())"
_STREAM = "@dataclass\nclass Stream:\n    x: torch.Tensor\n    rotary: Rotary\n    depth: int = 0"
_OF_STREAM = """
x, angles = self.embed(input_ids), angles_of(position_ids, self.config)
given = Stream(x, Rotary(angles.cos(), angles.sin()))
for layer in self.layers:
    given = layer(given)
return self.norm(given.x)
"""

Form = dict[str, str]
GIVEN: dict[str, Form] = {
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
        "made": f"Context(rotary={_MADE})",
        "turn": _TURN.replace("given", "given.rotary") + "\nq = q * given.scale\n"
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
        "block": _BLOCK.replace("given", "**vars(given)"),
        "taken": "cos, sin",
        "turn": "q, k = rotate(q, cos, sin), rotate(k, cos, sin)",
    },
    "as_a_dict": {
        "block": _BLOCK.replace("given", "asdict(given)"),
        "turn": "q, k = rotate(q, given['cos'], given['sin']), rotate(k, given['cos'], given['sin'])",
    },
    "by_keyword": {
        "model": _MODEL.replace("layer(x, given)", "layer(x, given=given)"),
        "block": _BLOCK.replace("given", "given=kwargs['given']"),
        "block_taken": "**kwargs",
        "taken": "*, given: Optional[Rotary] = None",
    },
    "another_one": {
        "head": _STREAM,
        "model": _OF_STREAM,
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
        "turn": f"if given is not None:\n    {_TURN}\n    q = q * given.scale",
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
        "block": f"{_BLOCK.replace('return x +', 'x = x +')}\n"
        "return Made(x, size=x.norm(dim=-1, keepdim=True))",
        "model": _MODEL.replace("{made}", _MADE)
        .replace("for layer", "outs = []\nfor layer")
        .replace(
            "x = layer(x, given)", "out = layer(x, given)\n    x = out.hidden\n    outs.append(out)"
        )
        .replace("norm(x)", "norm(x / sum(out.size for out in outs))"),
    },
    "changed_by_its_owner": {
        "head": f"{_STREAM}\n\n    def add(self, x):\n        self.x = self.x + x\n"
        "        self.depth += 1",
        "model": _OF_STREAM.replace(
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


def _save(folder: Path) -> Path:
    form = (GIVEN | REFUSED)[folder.name]
    attention = _ATTENTION.format(turn=form.get("turn", _TURN))
    if end := form.get("end"):
        start = attention.partition("return ")[0]
        attention = f"{start}y = y.transpose(1, 2).reshape(b, t, -1)\n{end}"
    model = form.get("model", _MODEL).replace("{made}", form.get("made", _MADE))
    bodies = {"attention": attention, "block": form.get("block", _BLOCK), "model": model}
    file = save_odd(folder, head=_HEAD + form.get("head", ""), **bodies) / "modeling_odd.py"
    text = file.read_text()
    before, attended, after = text.partition("class Attention(nn.Module):")
    attention, block, rest = after.partition("class Block(nn.Module):")
    attention = attention.replace("x, position_ids)", f"x, {form.get('taken', 'given')})", 1)
    taken = form.get("block_only") or f"x, {form.get('block_taken', 'given')}"
    rest = rest.replace("x, position_ids)", f"{taken})", 1)
    made = "        self.embed = nn.Embedding"
    kind = "        self.index = index\n"
    rest = rest.replace(kind, f"{kind}        self.kind = 'local' if index % 2 else 'full'\n", 1)
    rest = rest.replace(made, f"        {form.get('kept', 'pass')}\n{made}", 1)
    file.write_text(before + attended + attention + block + rest)
    return folder


REFUSED: dict[str, Form] = {
    "changed_by_a_layer": {
        "head": _STREAM,
        "model": _OF_STREAM.replace("given = layer(given)", "layer(given)"),
        "block": "given.x = given.x + self.attn(self.norm1(given.x), given.rotary)\n"
        "given.x = given.x + self.mlp(self.norm2(given.x))",
        "block_only": "given",
    },
    "changed_under_another_name": {
        "head": _STREAM,
        "model": _OF_STREAM.replace("for layer", "other = given\nfor layer")
        .replace("given = layer(given)", "given.x = layer(given.x, given.rotary)")
        .replace("given.x)", "other.x)"),
    },
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder = tmp_path_factory.mktemp("given")
    return run_apart(GENERATE, [_save(folder / name) for name in (*GIVEN, *REFUSED)])


@pytest.mark.parametrize("name", [*GIVEN])
def test_its_fields_are_given(name: str, found: dict[str, dict[str, object]]) -> None:
    made = found[name]
    assert_translated(made)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("changed_by_a_layer", "a change of Stream(...), which others have, too"),
        ("changed_under_another_name", "given, which a loop changes, and which has another name"),
    ],
)
def test_a_change_that_another_one_would_miss_is_refused(
    name: str, said: str, found: dict[str, dict[str, object]]
) -> None:
    assert said in str(found[name].get("error")), found[name]
