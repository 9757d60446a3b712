"""PyTorch's attention that is told to be causal, where the layer's forward was not recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]
TOY = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.query = nn.Linear(config.size, config.heads * 4)
        self.both = nn.Linear(config.size, 2 * config.kv_heads * 4)
        self.heads, self.kv_heads = config.heads, config.kv_heads

    def forward(self, x):
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, self.heads, 4).transpose(1, 2)
        key, value = self.both(x).view(batch, length, 2 * self.kv_heads, 4).transpose(1, 2).chunk(2, dim=1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, GIVEN)
        return mixed.transpose(1, 2).reshape(batch, length, -1)
"""
CONFIG = {"size": 5, "heads": 6}


@pytest.mark.parametrize("given", ["None, 0.0, is_causal=True", "is_causal=True, scale=0.7"])
@pytest.mark.parametrize("kv_heads", [1, 6])
def test_it_is_the_op(given: str, kv_heads: int, translate: Translate) -> None:
    text, config = TOY.replace("GIVEN", given), {**CONFIG, "kv_heads": kv_heads}
    state, _, left = translate(text, config, specialised=True)
    assert "torch_attention" in left
    assert "scaled_dot" not in left
    torch.manual_seed(seed := int(torch.randint(2**31, ())))
    print(f"seed {seed}")
    expected, found = (_made(each, config).eval() for each in (text, _written(state)))
    found.load_state_dict(expected.state_dict())
    x = torch.randn(2, 7, 5)
    torch.testing.assert_close(found(x), expected(x))


def test_what_is_not_told_so_stays(translate: Translate) -> None:
    text = TOY.replace("GIVEN", "None, 0.0")
    _, _, left = translate(text, {**CONFIG, "kv_heads": 6}, specialised=True)
    assert "scaled_dot" in left
