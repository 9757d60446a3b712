"""Buffers that a constructor fills: what it draws is a weight, what it computes a table, and a variance
is not negative.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from onboard.analysis.tiny.random_weights import note_drawn, randomize
from tests.support.odd_code import GENERATE, run_apart, save_odd

_HEAD = """
class Words(nn.Module):
    def __init__(self, count, size):
        super().__init__()
        self.register_buffer("weight", torch.empty(count, size))
        nn.init.xavier_normal_(self.weight)

    def forward(self, ids):
        return F.embedding(ids, self.weight)
"""


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", nn.init.xavier_normal_(torch.empty(5, 4)))
        self.register_buffer("decay", torch.arange(20.0).view(5, 4))
        self.register_buffer("noise", torch.randn(5, 4), persistent=False)


def test_drawn_buffers_are_weights_and_computed_ones_are_not() -> None:
    one, other = _Words(), _Words()
    noise = one.get_buffer("noise").clone()
    for model in (one, other):
        note_drawn(model, _Words)
        randomize(model, seed=3)
    torch.testing.assert_close(one.weight, other.weight)
    torch.testing.assert_close(one.decay, torch.arange(20.0).view(5, 4))
    torch.testing.assert_close(one.noise, noise)


def test_a_model_whose_embeddings_are_a_buffer_does_not_draw_random_numbers(tmp_path: Path) -> None:
    folder = save_odd(tmp_path / "odd_words", head=_HEAD)
    file = folder / "modeling_odd.py"
    file.write_text(file.read_text().replace("self.embed = nn.Embedding(", "self.embed = Words("))
    found = run_apart(GENERATE, [folder])["odd_words"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5


def test_variances_of_norms_over_the_batch_are_positive(tmp_path: Path) -> None:
    normed = """
y = self.down(F.silu(self.gate(x)) * self.up(x))
b, t, c = y.shape
return self.bn(y.reshape(-1, c)).view(b, t, c)
"""
    folder = save_odd(tmp_path / "odd_batch", mlp=normed)
    file, behind = folder / "modeling_odd.py", "        self.down ="
    made = "        self.bn = nn.BatchNorm1d(config.hidden_size)\n"
    file.write_text(file.read_text().replace(behind, made + behind))
    found = run_apart(GENERATE, [folder])["odd_batch"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert "nn.BatchNorm1d(" in found["text"]
