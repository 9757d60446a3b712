"""A dict that the first layer makes, each layer fills and hands to the next: what a layer has left
there under its own number no other reads.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.odd_code import ATTENTION, GENERATE, run_apart, save_odd

_HEAD = """
import os
LOUD = os.environ.get("ODD_LOUD", False)


def say(*what):
    if LOUD:
        print(*what)
"""
_KEPT = """
say("seen", x.shape, MASK.shape)
found = memory.get(KEY, None) if memory is not None else None
x = x + self.recalled(x, found)
left = self.left(x, found)
if memory is None:
    memory = {}
memory[self.index] = left.detach()
"""
_METHODS = """
    def recalled(self, x, found):
        if found is None:
            return torch.zeros_like(x)
        return torch.matmul(F.elu(x) + 1, found)

    def left(self, x, found):
        new = torch.matmul(x.transpose(1, 2), x)
        return new if found is None else new + found


class Mlp(nn.Module):"""
_BLOCK = """
y, memory = self.attn(self.norm1(x), position_ids, memory)
x = x + y
outputs = (x + self.mlp(self.norm2(x)),)
if memory is not None:
    outputs += (memory,)
return outputs
"""
_MODEL = """
x, memory = self.embed(input_ids), None
for layer in self.layers:
    outputs = layer(x, position_ids, memory)
    x = outputs[0]
    memory = outputs[-1]
return self.norm(x)
"""


def _saved(folder: Path, key: str) -> Path:
    body, mask = ATTENTION.strip("\n"), "mask = torch.triu("
    kept = _KEPT.replace("MASK", "x").replace("KEY", key).strip("\n")
    assert mask in body
    attention = f"{kept}\n{body}, memory"
    save_odd(folder, head=_HEAD, attention=attention, block=_BLOCK, model=_MODEL)
    file = folder / "modeling_odd.py"
    text = file.read_text()
    for old, new in (
        (
            "class Attention(nn.Module):\n    def __init__(self, config)",
            "class Attention(nn.Module):\n    def __init__(self, config, index)",
        ),
        ("        self.theta =", "        self.index = index\n        self.theta ="),
        ("Attention(config)", "Attention(config, index)"),
        ("def forward(self, x, position_ids):", "def forward(self, x, position_ids, memory=None):"),
        ("class Mlp(nn.Module):", _METHODS.lstrip("\n")),
    ):
        assert old in text, old
        text = text.replace(old, new)
    file.write_text(text)
    return folder


def test_a_layer_finds_nothing_under_its_own_number(tmp_path: Path) -> None:
    found = run_apart(GENERATE, [_saved(tmp_path / "odd_entries", "self.index")])["odd_entries"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert "memory" not in found["text"]
    assert "def left" not in found["text"]
    assert not found["recorded"]


def test_what_a_layer_finds_under_the_number_of_another_is_kept(tmp_path: Path) -> None:
    """Such a model is translated as it is, or refused: what the layer before has left counts."""
    key = "self.index - 1"
    found = run_apart(GENERATE, [_saved(tmp_path / "odd_entry_before", key)])["odd_entry_before"]
    assert "error" in found or "torch.elu" in found["text"] or "F.elu" in found["text"]
