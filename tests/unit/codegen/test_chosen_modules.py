"""Modules that a helper of constructors makes, of one class or another."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.odd_code import GENERATE, run_apart, save_odd

_HEAD = """
class Scaled(nn.Module):
    def __init__(self, size, wide):
        super().__init__()
        self.inner = nn.Linear(size, wide, bias=False)
        self.scale = nn.Parameter(torch.ones(wide))

    def forward(self, x):
        return self.inner(x) * self.scale


class Adapted(nn.Module):
    def __init__(self, config, size, wide):
        super().__init__()
        self.names = {}
        for index, adapter in enumerate(config.adapters):
            self.names[str(index)] = adapter

    def forward(self, x):
        raise NotImplementedError


def layer(name, config, index, size, wide):
    \"\"\"Makes one or another.\"\"\"
    if index in config.scaled and name in config.parts:
        if hasattr(config, "adapters"):
            return Adapted(config, size, wide)
        else:
            return Scaled(size, wide)
    return nn.Linear(size, wide, bias=False)

"""
_CHANGES = {
    "self.mlp = Mlp(config)": "self.mlp = Mlp(config, index)",
    "def __init__(self, config):\n        super().__init__()\n        self.gate": (
        "def __init__(self, config, index):\n        super().__init__()\n        self.gate"
    ),
    "self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)": (
        'self.gate = layer("gate", config, index, config.hidden_size, config.intermediate_size)'
    ),
    "self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)": (
        'self.up = layer("up", config, index, config.hidden_size, config.intermediate_size)'
    ),
}


def test_a_helper_makes_modules_of_one_class_or_another(tmp_path: Path) -> None:
    folder = save_odd(tmp_path / "odd_chosen", head=_HEAD)
    file = folder / "modeling_odd.py"
    text = file.read_text()
    for old, new in _CHANGES.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    file.write_text(text)
    config = json.loads((folder / "config.json").read_text())
    config |= {"scaled": [0, 2, 3], "parts": ["gate", "down"]}
    (folder / "config.json").write_text(json.dumps(config))
    found = run_apart(GENERATE, [folder])["odd_chosen"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert "class Scaled" in found["text"]
    assert "Adapted" not in found["text"]
