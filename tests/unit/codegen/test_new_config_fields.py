"""Fields that a constructor gives to a config that has none of that name."""

from __future__ import annotations

from pathlib import Path

from tests.support.odd_code import GENERATE, run_apart, save_odd

_MADE = "self.norm = Norm(config.hidden_size, config.norm_eps)\n        self.post_init()"
_MODEL = """
x = self.embed(input_ids)
for layer in self.layers:
    x = layer(x, position_ids)
return self.norm(x) * self.config.turns
"""


def _saved(folder: Path, *, asked: str = "") -> Path:
    save_odd(folder, model=_MODEL)
    file = folder / "modeling_odd.py"
    text = file.read_text().replace(_MADE, f"{_MADE}\n        config.turns = 3")
    file.write_text(text.replace("self.theta = config.rope_theta", f"self.theta = {asked or 100}"))
    return folder


def test_a_new_field_is_what_the_constructor_says_behind_it(tmp_path: Path) -> None:
    """But not where something made before asks whether it is there."""
    new = _saved(tmp_path / "odd_new")
    asked = _saved(tmp_path / "odd_asked", asked="100 if not hasattr(config, 'turns') else 7")
    found = run_apart(GENERATE, [new, asked])
    assert found["odd_new"].get("error") is None, found["odd_new"]["error"]
    assert found["odd_new"]["worst"] < 1e-5
    assert found["odd_new"]["recorded"] == []
    assert "config.turns" in found["odd_asked"].get("error", ""), found["odd_asked"]
