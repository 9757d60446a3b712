"""Objects, lists and dicts that a module changes which is given them: generated modules return what
they change and somebody reads.
"""

from __future__ import annotations

import ast

import pytest

from tests.support.given_objects import BLOCK, MODEL, OF_STREAM, STREAM, TURN, save_given
from tests.support.odd_code import GENERATE, assert_translated, run_apart

_STATE = """@dataclass
class State:
    cos: torch.Tensor
    sin: torch.Tensor
    total: Any = 0.0
    v: Optional[torch.Tensor] = None
    weights: Any = None
    depth: int = 0
    states: list = field(default_factory=list)
"""
_SIZE = "x.norm(dim=-1, keepdim=True)"
_WEIGHTS = """
scores = q @ k.transpose(2, 3) / math.sqrt(self.size)
mask = torch.triu(torch.ones(t, t, dtype=torch.bool, device=x.device), diagonal=1)
given.weights = F.softmax(scores.masked_fill(mask, float("-inf")), dim=-1)
y = given.weights @ v
return self.out(y.transpose(1, 2).reshape(b, t, -1))
"""


_DICT = "{'cos': angles.cos(), 'sin': angles.sin(), 'aux': 0.0, 'n': 0, 'all': []}"
_OF_DICT = "cos, sin = given['cos'], given['sin']\nq, k = rotate(q, cos, sin), rotate(k, cos, sin)"
_LISTED = """
x, angles = self.embed(input_ids), angles_of(position_ids, self.config)
rotary, given = Rotary(angles.cos(), angles.sin()), {made}
for layer in self.layers:
    x = layer(x, rotary, given)
return self.norm({read})
"""
_BEFORE = BLOCK.replace("return x +", "x = x +")


def _model(made: str = "State(angles.cos(), angles.sin())", read: str = "x") -> str:
    return MODEL.replace("{made}", made).replace("norm(x)", f"norm({read})")


CHANGED: dict[str, dict[str, str]] = {
    "stream": {
        "head": STREAM,
        "model": OF_STREAM.replace("given = layer(given)", "layer(given)"),
        "block": "given.x = given.x + self.attn(self.norm1(given.x), given.rotary)\n"
        "given.x = given.x + self.mlp(self.norm2(given.x))",
        "block_only": "given",
    },
    "stream_returned": {
        "head": STREAM,
        "model": OF_STREAM,
        "block": "given.x = given.x + self.attn(self.norm1(given.x), given.rotary)\n"
        "given.x = given.x + self.mlp(self.norm2(given.x))\nreturn given",
        "block_only": "given",
    },
    "counted": {
        "head": _STATE,
        "model": _model(),
        "block": "given.depth += 1\nx = x + self.attn(self.norm1(x), given) / given.depth\n"
        "return x + self.mlp(self.norm2(x))",
    },
    "first_values": {
        "head": _STATE,
        "model": _model(),
        "turn": f"{TURN}\nif given.v is None:\n    given.v = v\nelse:\n    v = 0.5 * (v + given.v)",
    },
    "namespace": {
        "model": _model(
            "SimpleNamespace(cos=angles.cos(), sin=angles.sin(), residual=torch.zeros_like(x))",
            "x + given.residual",
        ),
        "block": "given.residual = given.residual + x\n"
        "x = self.attn(self.norm1(given.residual), given)\ngiven.residual = x + given.residual\n"
        "return self.mlp(self.norm2(given.residual))",
    },
    "by_attention": {
        "head": _STATE,
        "model": _model(read="x + given.total"),
        "end": "y = self.out(y)\ngiven.total = given.total + y.norm(dim=-1, keepdim=True)\nreturn y",
    },
    "by_its_method": {
        "head": f"{_STATE}\n    def add(self, x):\n        self.total = self.total + {_SIZE}\n"
        "        self.depth += 1",
        "model": _model(read="x + given.total / given.depth"),
        "block": BLOCK.replace("return", "given.add(x)\nreturn"),
    },
    "by_a_helper": {
        "head": f"{_STATE}\n\ndef record(state, x):\n    state.total = state.total + {_SIZE}",
        "model": _model(read="x + given.total"),
        "block": BLOCK.replace("return", "record(given, x)\nreturn"),
    },
    "in_some_layers": {
        "head": _STATE,
        "model": _model(read="x + given.total"),
        "block": BLOCK.replace(
            "return",
            f"if self.kind == 'full':\n    given.total = given.total + {_SIZE}\nreturn",
        ),
    },
    "weights_that_nobody_reads": {
        "head": _STATE,
        "model": _model(),
        "turn": f"{TURN}{_WEIGHTS}",
    },
    "in_an_object_of_it": {
        "head": "@dataclass\nclass Stats:\n    aux: Any = 0.0\n    count: int = 0\n\n\n@dataclass\n"
        "class State(Rotary):\n    stats: Stats = field(default_factory=Stats)",
        "model": _model(read="x + given.stats.aux / given.stats.count"),
        "block": "y = self.attn(self.norm1(x), given)\nx = x + y\n"
        "given.stats.aux = given.stats.aux + y.norm(dim=-1, keepdim=True)\n"
        "given.stats.count += 1\nreturn x + self.mlp(self.norm2(x))",
    },
    "by_name": {
        "head": _STATE,
        "model": _model(read="x + given.total"),
        "block": BLOCK.replace("return", f"setattr(given, 'total', given.total + {_SIZE})\nreturn"),
    },
    "before_an_early_return": {
        "head": _STATE,
        "model": _model(read="x + given.total"),
        "block": f"given.total = given.total + {_SIZE}\nif self.kind == 'local':\n"
        "    return x + self.mlp(self.norm2(x))\nx = x + self.attn(self.norm1(x), given)\n"
        "given.total = given.total * 0.5\nreturn x + self.mlp(self.norm2(x))",
    },
    "dict": {
        "model": _model(_DICT, "x + given['aux']"),
        "turn": _OF_DICT,
        "block": "y = self.attn(self.norm1(x), given)\nx = x + y\n"
        "given['aux'] += y.norm(dim=-1, keepdim=True)\nreturn x + self.mlp(self.norm2(x))",
    },
    "dict_updated": {
        "model": _model(_DICT, "x + given['aux'] / given['n']"),
        "turn": _OF_DICT,
        "block": "y = self.attn(self.norm1(x), given)\nx = x + y\ngiven.update("
        "{'aux': given['aux'] + y.norm(dim=-1, keepdim=True), 'n': given['n'] + 1})\n"
        "return x + self.mlp(self.norm2(x))",
    },
    "list_in_a_dict": {
        "model": _model(_DICT, "x + torch.stack(given['all']).mean(0)"),
        "turn": _OF_DICT,
        "block": BLOCK.replace("return", "given['all'].append(x)\nreturn"),
    },
    "entries_of_layers": {
        "head": "@dataclass\nclass State(Rotary):\n    kept: dict = field(default_factory=dict)",
        "model": _model(),
        "block": "given.kept[self.index] = x\nif self.index > 0:\n"
        f"    x = x + given.kept[self.index - 1]\n{BLOCK}",
    },
    "list": {
        "model": _LISTED.replace("{made}", "[]").replace(
            "{read}", "torch.stack(given).mean(0) + x"
        ),
        "block_taken": "given, states",
        "block": f"{_BEFORE}\nstates.append(x)\nreturn x",
    },
    "list_of_two": {
        "model": _LISTED.replace("{made}", "[x, x * 0.5]").replace(
            "{read}", "given[0] + given[1] + x"
        ),
        "block_taken": "given, states",
        "block": "states[0] = states[0] + self.attn(self.norm1(states[1]), given)\n"
        "states[1] = states[1] + self.mlp(self.norm2(states[0]))\nreturn x",
    },
    "list_of_an_object": {
        "head": _STATE,
        "model": _model(read="sum(given.states) + x"),
        "block": f"{_BEFORE}\ngiven.states.append(x)\nreturn x",
    },
    "list_that_nobody_reads": {
        "head": _STATE,
        "model": _model(),
        "block": f"{_BEFORE}\ngiven.states.append(x)\nreturn x",
    },
}

REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "removed": (
        {
            "model": _LISTED.replace("{made}", "[x]").replace("{read}", "given[0] + x"),
            "block_taken": "given, states",
            "block": f"{_BEFORE}\nstates.append(x)\nstates.remove(states[0])\nreturn x",
        },
        "remove(...) of a list or a dict, which depends on what the items are",
    ),
    "two_names": (
        {
            "head": STREAM,
            "model": OF_STREAM.replace("given = layer(given)", "layer(given)")
            .replace("for layer", "other = given\nfor layer")
            .replace("given.x)", "other.x)"),
            "block": "given.x = given.x + self.attn(self.norm1(given.x), given.rotary)\n"
            "given.x = given.x + self.mlp(self.norm2(given.x))",
            "block_only": "given",
        },
        "given, which a loop changes, and which has another name, too",
    ),
    "entries_that_come_to_be": (
        {
            "head": "from collections import defaultdict",
            "model": _LISTED.replace("{made}", "defaultdict(list)").replace(
                "{read}", "torch.stack(given['all']).mean(0) + x"
            ),
            "block_taken": "given, states",
            "block": f"{_BEFORE}\nstates['all'].append(x)\nreturn x",
        },
        "a defaultdict, whose entries come to be when they are read",
    ),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder = tmp_path_factory.mktemp("changed")
    forms = CHANGED | {key: form for key, (form, _) in REFUSED.items()}
    return run_apart(GENERATE, [save_given(folder / key, form) for key, form in forms.items()])


@pytest.mark.parametrize("name", [*CHANGED])
def test_who_gives_it_has_what_becomes_of_it(
    name: str, found: dict[str, dict[str, object]]
) -> None:
    assert_translated(found[name])


@pytest.mark.parametrize("name", [*REFUSED])
def test_what_cannot_be_told_is_refused(name: str, found: dict[str, dict[str, object]]) -> None:
    assert REFUSED[name][1] in str(found[name].get("error")), found[name]


@pytest.mark.parametrize("name", ["weights_that_nobody_reads", "list_that_nobody_reads"])
def test_what_nobody_reads_is_not_returned(name: str, found: dict[str, dict[str, object]]) -> None:
    tree = ast.parse(str(found[name]["text"]))
    given = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    assert given
    assert not any(isinstance(value, ast.Tuple) for value in given)
