"""Settings that a constructor makes for its layer, of the config and of the layer's number."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.odd_code import GENERATE, assert_translated, run_apart, save_odd

HEAD = """
from dataclasses import dataclass, replace
from types import SimpleNamespace


@dataclass
class Settings:
    size: int
    scale: float = 1.0
    number: int = 0


def settings_of(config, layer_id):
    return Settings(config.hidden_size, scale=1.0 / (layer_id + 1) ** 0.5, number=layer_id)
"""
MADE = {
    "by_a_helper": "settings = settings_of(config, layer_id=index)\nself.scale = settings.scale",
    "kept": "self.settings = settings_of(config, index)\nself.scale = 1.0",
    "in_a_namespace": "self.settings = SimpleNamespace(scale=0.5 if index % 2 == 0 else 1.5)\n"
    "self.scale = 2.0",
    "changed": "self.settings = replace(settings_of(config, 0), scale=0.5 if index < 2 else 1.0)\n"
    "self.scale = self.settings.number + 1",
    # What a variable holds when they are made counts
    "before_another": "which = index\nsettings = SimpleNamespace(scale=1.0 / (which + 1))\n"
    "which = 3\nself.scale = settings.scale + which",
}
BLOCK = """
x = x + self.attn(self.norm1(x), position_ids) * self.scale{kept}
return x + self.mlp(self.norm2(x))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder = tmp_path_factory.mktemp("settings")
    return run_apart(GENERATE, [_save(folder / name) for name in MADE])


def _save(folder: Path) -> Path:
    made = MADE[folder.name]
    kept = " * self.settings.scale" if "self.settings" in made else ""
    file = save_odd(folder, head=HEAD, block=BLOCK.format(kept=kept)) / "modeling_odd.py"
    behind = "        self.index = index\n"
    lines = "".join(f"        {line}\n" for line in made.splitlines())
    text = file.read_text()
    file.write_text(text.replace(behind, behind + lines))
    return folder


@pytest.mark.parametrize("name", [*MADE])
def test_each_layer_has_its_own(name: str, found: dict[str, dict[str, object]]) -> None:
    made = found[name]
    assert_translated(made)
    assert "Namespace" not in str(made["text"])
