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
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder = tmp_path_factory.mktemp("changed")
    return run_apart(GENERATE, [save_given(folder / key, form) for key, form in CHANGED.items()])


@pytest.mark.parametrize("name", [*CHANGED])
def test_who_gives_it_has_what_becomes_of_it(
    name: str, found: dict[str, dict[str, object]]
) -> None:
    assert_translated(found[name])


def test_what_nobody_reads_is_not_returned(found: dict[str, dict[str, object]]) -> None:
    tree = ast.parse(str(found["weights_that_nobody_reads"]["text"]))
    given = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    assert given
    assert not any(isinstance(value, ast.Tuple) for value in given)
