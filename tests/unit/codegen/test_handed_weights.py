"""Attention whose weights one module makes, and which another one multiplies with values."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from onboard.analysis.counterparts import weights_of
from onboard.errors import ProofError
from onboard.verify.block_outputs import compare_outputs
from tests.support.odd_code import GENERATE, run_apart, save_odd, with_rotary

_HEAD = """
class Weights(nn.Module):
    def __init__(self, size, heads):
        super().__init__()
        self.heads, self.each = heads, size // heads
        self.both = nn.Linear(size, 2 * size)

    def forward(self, x):
        b, t, _ = x.shape
        q, k = self.both(x).reshape(b, t, 2, self.heads, self.each).unbind(dim=2)
        scores = torch.einsum("bthd,bshd->bhts", q, k / math.sqrt(q.shape[-1]))
        mask = torch.triu(torch.full((t, t), -10000.0, device=x.device), 1)
        return torch.softmax(scores + mask.to(scores.dtype), dim=-1, dtype=q.dtype)
"""
_ATTENTION = """
b, t, _ = x.shape
v = self.qkv(x).view(b, t, self.heads, 3 * self.size).transpose(1, 2)
weights = self.rotary(x)
y = USE
return self.out(y[..., : self.size].transpose(1, 2).reshape(b, t, -1))
"""


def _found(folder: Path, use: str) -> dict[str, object]:
    save_odd(folder, head=_HEAD, attention=_ATTENTION.replace("USE", use))
    made = "Weights(config.hidden_size, self.heads)"
    return dict(run_apart(GENERATE, [with_rotary(folder, made)])[folder.name])


@pytest.mark.parametrize("use", ["weights @ v", "torch.matmul(weights, v)"])
def test_weights_of_another_module_attend(tmp_path: Path, use: str) -> None:
    found = _found(tmp_path / f"odd_weights_{len(use)}", use)
    assert found.get("error") is None, found["error"]
    assert float(str(found["worst"])) < 1e-5
    assert "torch_attention(" in str(found["text"])
    assert "softmax" not in str(found["text"])


def test_weights_that_are_changed_are_not_taken_for_those_of_attention(tmp_path: Path) -> None:
    found = _found(tmp_path / "odd_changed_weights", "(weights * weights) @ v")
    assert "torch_attention(" not in str(found.get("text"))


def test_queries_and_keys_are_compared_as_the_weights_that_they_make() -> None:
    generator = torch.Generator().manual_seed(seed := int.from_bytes(os.urandom(3), "big"))
    print("seed", seed)
    query, key = torch.randn(2, 4, 9, 8, generator=generator), torch.randn(2, 2, 9, 8)
    scores = query @ key.repeat_interleave(2, dim=1).transpose(2, 3)
    weights = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf")).softmax(-1)
    assert weights_of([query, key], weights) is not None
    given, error = compare_outputs("x", "X", (query, key), weights)
    assert given[0] is query
    assert error < 1e-6
    with pytest.raises(ProofError, match="differs"):
        compare_outputs("x", "X", (query, key * 1.01), weights)
    assert weights_of([query, key], weights[..., 1:]) is None
    assert weights_of([query, query, key], weights) is None
