"""Values that the first layer of a text leaves at its class, for the layers behind it."""

from __future__ import annotations

from pathlib import Path

from tests.support.odd_code import ATTENTION, GENERATE, run_apart, save_odd

_LEFT = """
if self.index == 0:
    Attention.first = v[:, :, :, : self.size // 2]
else:
    v = torch.cat((v[:, :, :, self.size // 2 :], Attention.first), dim=-1)
"""


def _saved(folder: Path, attention: str) -> Path:
    save_odd(folder, attention=attention)
    file = folder / "modeling_odd.py"
    text = file.read_text().replace(
        "class Attention(nn.Module):\n", "class Attention(nn.Module):\n    first = None\n\n"
    )
    text = text.replace("self.attn = Attention(config)", "self.attn = Attention(config, index)")
    old = "def __init__(self, config):\n        super().__init__()\n        self.heads"
    new = old.replace("config):", "config, index):").replace(
        "self.heads", "self.index = index\n        self.heads"
    )
    assert old in text
    file.write_text(text.replace(old, new))
    return folder


def test_what_a_layer_leaves_at_its_class_is_handed_from_layer_to_layer(tmp_path: Path) -> None:
    cut = ATTENTION.replace("inv = 1.0", f"{_LEFT}inv = 1.0")
    found = run_apart(GENERATE, [_saved(tmp_path / "odd_first", cut)])["odd_first"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert not found["recorded"]
    assert "between_layers: dict[str, torch.Tensor]" in found["text"]


def test_what_is_left_for_the_next_text_is_refused(tmp_path: Path) -> None:
    kept = _LEFT.replace("self.index == 0", "self.index == 3 or Attention.first is None")
    whole = kept.replace(
        "self.size // 2 :], Attention.first)",
        "self.size // 2 :], Attention.first.mean(2, True).expand(b, self.heads, t, -1))",
    )
    cut = ATTENTION.replace("inv = 1.0", f"{whole}inv = 1.0")
    found = run_apart(GENERATE, [_saved(tmp_path / "odd_kept", cut)])["odd_kept"]
    assert "error" in found
