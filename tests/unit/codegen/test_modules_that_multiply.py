"""Attention whose products are those of modules without parts."""

from __future__ import annotations

from pathlib import Path

from tests.support.odd_code import ATTENTION, GENERATE, assert_translated, run_apart, save_odd

_PRODUCT = """

class Product(nn.Module):
    def forward(self, a, b):
        return a @ b
"""
_MADE = "        self.theta = config.rope_theta"


def test_products_of_modules_are_those_of_attention(tmp_path: Path) -> None:
    scores, values = "q @ k.transpose(2, 3)", "F.softmax(scores, dim=-1) @ v"
    assert scores in ATTENTION
    assert values in ATTENTION
    attention = ATTENTION.replace(scores, "self.first(q, k.transpose(2, 3))")
    attention = attention.replace(values, "self.second(F.softmax(scores, dim=-1), v)")
    folder = save_odd(tmp_path / "odd_products", head=_PRODUCT, attention=attention)
    file = folder / "modeling_odd.py"
    both = f"{_MADE}\n        self.first, self.second = Product(), Product()"
    file.write_text(file.read_text().replace(_MADE, both))
    found = run_apart(GENERATE, [folder])["odd_products"]
    assert_translated(found)
    assert "torch_attention" in found["text"]
