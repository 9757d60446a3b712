"""Attributes in which a forward records what nothing reads, and one that something does read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from tests.support.odd_code import GENERATE, run_apart, save_odd
from tests.unit.codegen.test_own_code import _made, _written

_HEAD = """

class Plain(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x):
        return self.up(x).sigmoid()
"""
_MODEL = """
x = self.embed(input_ids)
for layer in self.layers:
    x = layer(x, position_ids)
    RECORD
return self.norm(x)
"""
_MLP = """
y = F.silu(self.gate(x)) * self.up(x)
self.kept = (y,)
return self.down(y)
"""
_OF_SOME = "if isinstance(layer.mlp, Mlp):\n        "
_RECORDS = {
    "odd_added": f"{_OF_SOME}self.seen += layer.mlp.kept",
    "odd_put": f"{_OF_SOME}self.seen = (*self.seen, layer.mlp.kept)",
}
_READ = "return self.norm(x) + sum(y.mean() for y in self.seen)"


def _saved(folder: Path, body: str) -> Path:
    save_odd(folder, head=_HEAD, model=body, mlp=_MLP)
    file = folder / "modeling_odd.py"
    text = file.read_text().replace(
        "self.mlp = Mlp(config)", "self.mlp = Mlp(config) if index % 2 else Plain(config)"
    )
    made = "self.seen = ()\n        self.post_init()"
    file.write_text(text.replace("self.post_init()", made, 1))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what comes of the models."""
    folder = tmp_path_factory.mktemp("records")
    bodies = {key: _MODEL.replace("RECORD", record) for key, record in _RECORDS.items()}
    bodies["odd_read"] = bodies["odd_added"].replace("return self.norm(x)", _READ)
    return run_apart(GENERATE, [_saved(folder / key, body) for key, body in bodies.items()])


@pytest.mark.parametrize("name", _RECORDS)
def test_what_nothing_reads_is_left_out(name: str, made: dict[str, Any]) -> None:
    found = made[name]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert not found["recorded"]
    assert "seen" not in found["text"]


def test_what_something_reads_is_not(made: dict[str, Any]) -> None:
    """It depends on the text's length: no logits may."""
    assert "text" not in made["odd_read"], made["odd_read"]["text"]


KEPT = """
import inspect


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layer = nn.Linear(config.size, config.size)
        self.taken = inspect.signature(self.layer.forward).parameters

    def forward(self, x):
        return self.layer(x)
"""


def test_what_a_constructor_keeps_without_translation_nothing_may_read(
    translate: Callable[..., tuple[Any, str, str]],
) -> None:
    state, init, _ = translate(KEPT, {"size": 4}, specialised=True)
    assert "taken" not in init
    ours, theirs = _made(_written(state), {"size": 4}), _made(KEPT, {"size": 4})
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 4)
    assert torch.equal(ours(x), theirs(x))
    with pytest.raises(Untranslatable):
        translate(
            KEPT.replace("layer(x)", "layer(x) * len(self.taken)"), {"size": 4}, specialised=True
        )
