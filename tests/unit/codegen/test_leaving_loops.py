"""Loops that `break`, `continue`, `return` or go on while something holds, in constructors, what they
call, and forwards: they are run where all is known, or written as loops.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.cleanup import clean
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.vetting.model_text import vet_model_text
from tests.support.odd_code import GENERATE, assert_translated, run_apart, save_odd
from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]

_LAYERS = "self.layers = nn.ModuleList([Block(config, i) for i in range(config.num_hidden_layers)])"
_MLP = """self.gate = nn.Linear(config.hidden_size, {w}, bias=False)
self.up = nn.Linear(config.hidden_size, {w}, bias=False)
self.down = nn.Linear({w}, config.hidden_size, bias=False)"""
_OVER = "x = self.embed(input_ids)\nfor i, layer in enumerate(self.layers):\n"
_FOUND = """
def find_layers(model):
    for path in ("transformer.h", "model.layers", "layers"):
        obj, found = model, True
        for attr in path.split("."):
            if hasattr(obj, attr):
                obj = getattr(obj, attr)
            else:
                found = False
                break
        if found and isinstance(obj, nn.ModuleList) and len(obj) > 0:
            return obj
    raise AttributeError("no layers")
"""


def _wide(before: str, width: str) -> str:
    return f"{before}\n{_MLP.format(w=width)}"


CONSTRUCTED: dict[str, dict[str, str]] = {
    "broken_off": {
        "layers": "layers = []\nfor i in range(config.num_hidden_layers):\n    if i >= 4:\n"
        "        break\n    layers.append(Block(config, i))\nself.layers = nn.ModuleList(layers)"
    },
    "power": {
        "wide": _wide("width = 1\nwhile width < config.intermediate_size:\n    width *= 2", "width")
    },
    "multiple": {
        "wide": _wide(
            "self.width = int(8 * config.hidden_size / 3)\nwhile self.width % 32 != 0:\n"
            "    self.width += 1",
            "self.width",
        )
    },
    "found": {
        "head": _FOUND,
        "layers": f"{_LAYERS}\nself.count = len(find_layers(self))",
        "model": "x = self.embed(input_ids)\nfor layer in self.layers:\n"
        "    x = layer(x, position_ids)\nreturn self.norm(x) / self.count",
    },
    "kinds": {
        "layers": "kinds = []\nwhile len(kinds) < config.num_hidden_layers:\n"
        f"    kinds.extend(['full', 'half'])\nself.kinds = kinds[:config.num_hidden_layers]\n{_LAYERS}",
        "model": "x = self.embed(input_ids)\nfor kind, layer in zip(self.kinds, self.layers):\n"
        "    x = layer(x, position_ids) * (1.0 if kind == 'full' else 0.5)\nreturn self.norm(x)",
    },
    "divisor": {
        "wide": _wide(
            "for n in range(config.num_attention_heads - 1, 0, -1):\n"
            "    if config.intermediate_size % n == 0:\n        break\nself.n = n",
            "config.intermediate_size",
        ),
        "mlp": "return self.down(F.silu(self.gate(x)) * self.up(x)) / self.n",
    },
    "while_layers": {
        "layers": "self.layers = nn.ModuleList()\ni = 0\nwhile i < config.num_hidden_layers:\n"
        "    self.layers.append(Block(config, i))\n    i += 1"
    },
    "while_true": {
        "wide": _wide(
            "width = 16\nwhile True:\n    if width >= config.intermediate_size:\n"
            "        break\n    width += 48",
            "width",
        )
    },
    "nested": {
        "layers": "self.layers = nn.ModuleList()\ndepth = 0\nfor stage in range(3):\n"
        "    for j in range(2):\n        if depth >= config.num_hidden_layers:\n            break\n"
        "        self.layers.append(Block(config, depth))\n        depth += 1"
    },
    "or_else": {
        "wide": _wide(
            "for n in range(7, 1, -1):\n    if config.intermediate_size % n == 0:\n"
            "        break\nelse:\n    n = 1\nself.n = n",
            "config.intermediate_size",
        ),
        "mlp": "return self.down(F.silu(self.gate(x)) * self.up(x)) / self.n",
    },
}
RUN: dict[str, dict[str, str]] = {
    "stop": {
        "layers": f"{_LAYERS}\nself.stop = 4",
        "model": f"{_OVER}    if i == self.stop:\n        break\n    x = layer(x, position_ids)\n"
        "return self.norm(x)",
    },
    "by_layer": {
        "layers": f"{_LAYERS}\nself.stop = config.num_hidden_layers - 2",
        "model": f"{_OVER}    x = layer(x, position_ids)\n    if layer.index == self.stop:\n"
        "        break\nreturn self.norm(x)",
    },
    "counted": {
        "model": "x = self.embed(input_ids)\ni = 0\nwhile i < len(self.layers):\n"
        "    x = self.layers[i](x, position_ids)\n    i += 1\nreturn self.norm(x)"
    },
    "rounds": {
        "layers": f"{_LAYERS}\nself.rounds = 7",
        "model": "x = self.embed(input_ids)\nleft, i = self.rounds, 0\nwhile left > 0:\n"
        "    x = self.layers[i % len(self.layers)](x, position_ids)\n    i += 1\n    left -= 1\n"
        "return self.norm(x)",
    },
    "repeats": {
        "wide": _wide("self.repeats = 2", "config.intermediate_size"),
        "mlp": "y, n = self.gate(x), 0\nwhile n < self.repeats:\n    y = F.silu(y)\n    n += 1\n"
        "return self.down(y * self.up(x))",
    },
    "steps": {
        "wide": _wide("self.most, self.steps = 10, 3", "config.intermediate_size"),
        "mlp": "y = self.gate(x)\nfor step in range(self.most):\n    y = F.silu(y) + 0.1 * y\n"
        "    if step + 1 == self.steps:\n        break\nreturn self.down(y * self.up(x))",
    },
    "kept": {
        "layers": f"{_LAYERS}\nself.stop = 3",
        "model": f"kept = None\n{_OVER}    x = layer(x, position_ids)\n    if i == self.stop:\n"
        "        kept = x\n        break\n    x = x * 1.5\n"
        "return self.norm(x + (0.0 if kept is None else kept))",
    },
    "both": {
        "layers": f"{_LAYERS}\nself.stop, self.skip = 4, 1",
        "model": f"n = 0\n{_OVER}    if i > 0:\n        if i == self.skip:\n            x = x * 0.5\n"
        "            continue\n        n += 1\n    if i == self.stop:\n        x = x + n\n        break\n"
        "    x = layer(x, position_ids)\nreturn self.norm(x) * (n + 1)",
    },
}


def _save(folder: Path, form: Mapping[str, str]) -> Path:
    bodies = {key: form[key] for key in ("head", "mlp", "model") if key in form}
    file = save_odd(folder, **bodies) / "modeling_odd.py"
    text = file.read_text()
    made = {"layers": _LAYERS, "wide": _MLP.format(w="config.intermediate_size")}
    for key in made.keys() & form.keys():
        before, after = (textwrap.indent(each, " " * 8) for each in (made[key], form[key]))
        assert before in text
        text = text.replace(before, after)
    file.write_text(text)
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder = tmp_path_factory.mktemp("leaving")
    forms = CONSTRUCTED | RUN
    return run_apart(GENERATE, [_save(folder / key, form) for key, form in forms.items()])


@pytest.mark.parametrize("name", [*CONSTRUCTED, *RUN])
def test_loops_are_left_where_the_code_leaves_them(
    name: str, found: dict[str, dict[str, object]]
) -> None:
    assert_translated(found[name])


def test_no_guard_is_left_of_turns_that_were_taken_for_the_first(
    found: dict[str, dict[str, object]],
) -> None:
    assert "0 >= " not in str(found["nested"]["text"])


OF_VALUES = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        while x.norm() > 1:
            x = self.layer(x)
        return x
"""


def test_a_loop_that_goes_on_by_values_of_the_text_is_refused(translate: Translate) -> None:
    with pytest.raises(Untranslatable, match="as long as values of the text say"):
        translate(OF_VALUES, {"size": 4}, specialised=True)


LEAVING = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layer = nn.Linear(config.size, config.size)
        self.stop = config.stop

    def forward(self, x):
        found = x
        for i in range(6):
            x = self.layer(x)
            if i == self.stop:
                found = x * 2
                break
            found = x
            x = x + 1
        return found
"""


@pytest.mark.parametrize("stop", [0, 2, 9])
def test_what_a_turn_leaves_is_kept(translate: Translate, stop: int) -> None:
    sizes = {"size": 4, "stop": stop}
    state, _, _ = translate(LEAVING, sizes, specialised=True)
    ours, theirs = _made(_written(state), sizes), _made(LEAVING, sizes)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 4)
    assert torch.equal(ours(x), theirs(x))


def test_what_is_read_behind_a_break_is_no_dead_code() -> None:
    text = "for i in n:\n    if i:\n        v = i\n        break\n    v = 0\n    use(v)"
    assert "v = i" in "\n".join(map(ast.unparse, clean(ast.parse(text).body, frozenset({"v"}))))
    text = "while n:\n    n = n - 1\n    if n:\n        break\nx = 1"
    assert [*map(ast.unparse, clean(ast.parse(text).body, frozenset({"x"})))] == ["x = 1"]


def test_model_files_may_have_them() -> None:
    text = "import torch\n\n\ndef f(n: int) -> int:\n    while n % 4:\n        n = n + 1\n    return n\n"
    vet_model_text(text)
