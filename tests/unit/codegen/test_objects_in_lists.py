"""Objects of plain classes that a module keeps in lists and dicts: what they keep is the module's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.odd_code import ATTENTION, GENERATE, assert_translated, run_apart, save_odd

HEAD = """
class Holder:
    def __init__(self, scale, size):
        self.scale = scale
        self.table = torch.arange(size).float().mul(0.01) if size else None

    def turned(self, x):
        return x * self.scale

    def shifted(self, x):
        return x + self.table
"""
MADE = {
    "by_name": "{'a': Holder(0.5, 0), 'b': Holder(2.0, config.hidden_size)}",
    "by_number": "[Holder(0.5, 0), Holder(2.0, config.hidden_size)]",
    "in_turn": "[Holder(0.5, config.hidden_size), Holder(1.5, config.hidden_size)]",
    "unpacked": "(Holder(0.5, 0), Holder(2.0, config.hidden_size))",
    "deep": "{'a': (Holder(0.5, 0), 'left'), 'b': [Holder(2.0, config.hidden_size)]}",
}
USED = {
    "by_name": "x = self.held['b'].shifted(self.held['a'].turned(x))",
    "by_number": "x = self.held[1].shifted(self.held[0].turned(x)) * self.held[1].scale",
    "in_turn": "for item in self.held:\n    x = item.shifted(item.turned(x))",
    "unpacked": "first, second = self.held\nx = second.shifted(first.turned(x))",
    "deep": "if self.held['a'][1] == 'left':\n    x = self.held['b'][0].shifted(self.held['a'][0].turned(x))",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder = tmp_path_factory.mktemp("holders")
    return run_apart(GENERATE, [_save(folder / name) for name in MADE])


def _save(folder: Path) -> Path:
    first, rest = ATTENTION.strip("\n").split("\n", 1)
    body = f"{first}\n{USED[folder.name]}\n{rest}"
    file = save_odd(folder, head=HEAD, attention=body) / "modeling_odd.py"
    behind = "        self.theta = config.rope_theta"
    text = file.read_text()
    file.write_text(text.replace(behind, f"{behind}\n        self.held = {MADE[folder.name]}"))
    return folder


@pytest.mark.parametrize("name", [*MADE])
def test_what_they_keep_is_the_modules_own(name: str, found: dict[str, dict[str, object]]) -> None:
    made = found[name]
    assert_translated(made)
    assert "Holder" not in str(made["text"])
