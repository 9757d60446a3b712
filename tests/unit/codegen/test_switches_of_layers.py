"""What a layer's number decides, in its constructor or in its forward, is decided so in the generated
file, however far behind the first layer that begins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.odd_code import ATTENTION, GENERATE, assert_translated, run_apart, save_odd

_BLOCK = """
x = x + self.attn(self.norm1(x), position_ids)
if self.index % 4 == 3:
    x = x * 0.5
return x + self.mlp(self.norm2(x))
"""
_UNTURNED = ATTENTION.replace("q, k = turn(q), turn(k)", "if TEST:\n    q, k = turn(q), turn(k)")
_MADE = "        self.theta = config.rope_theta\n"
FORMS = {
    "constructor": ("self.turns", "self.turns = (index + 1) % 4 != 0", "(index + 1) % 4"),
    "forward": ("(self.index + 1) % 4 != 0", "self.index = index", "(self.index + 1) % 4"),
    "listed": ("self.index not in (3, 4)", "self.index = index", "self.index not in (3, 4)"),
}
"""Name -> the test in a forward, what a constructor keeps for it, and what the file has of it."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what comes of all models, in one process."""
    root = tmp_path_factory.mktemp("switches")
    folders = [save_odd(root / "switch_block", block=_BLOCK)]
    for key, (test, kept, _) in FORMS.items():
        folder = save_odd(root / f"switch_{key}", attention=_UNTURNED.replace("TEST", test))
        folders.append(_numbered(folder, kept))
    return run_apart(GENERATE, folders)


def _numbered(folder: Path, kept: str) -> Path:
    """Have a model's attention be given its layer's number, and keep something for it."""
    file = folder / "modeling_odd.py"
    begin, *rest = file.read_text().partition("class Attention(nn.Module):")
    text = "".join(rest).replace("(self, config):", "(self, config, index):", 1)
    text = text.replace(_MADE, f"{_MADE}        {kept}\n", 1)
    file.write_text(begin + text.replace("Attention(config)", "Attention(config, index)"))
    return folder


@pytest.mark.parametrize("key", FORMS)
def test_attention_without_positions_in_some_layers(made: dict[str, Any], key: str) -> None:
    found = made[f"switch_{key}"]
    assert_translated(found)
    assert FORMS[key][2] in found["text"]


def test_a_layer_that_does_something_else(made: dict[str, Any]) -> None:
    assert_translated(made["switch_block"])
    assert "self.index % 4 == 3" in made["switch_block"]["text"]
