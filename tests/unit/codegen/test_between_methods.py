"""Modules whose methods leave something for one another; paths that one token takes beside those of
several; losses that layers hand up; compiled functions of other files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.odd_code import GENERATE, run_apart, save_odd

_SORTED = """
import torch


@torch.jit.script
def sorted_tokens(k: int, experts: int, weights: torch.Tensor, indices: torch.Tensor):
    zeros = torch.zeros([weights.size(0), experts], dtype=weights.dtype, device=weights.device)
    sizes = zeros.scatter(1, indices, 1).long().sum(0)
    order = indices.flatten().sort(0)[1]
    return weights.flatten()[order], order.div(k, rounding_mode="trunc"), sizes, order
"""
_HEAD = """
from .sorting_odd import sorted_tokens


class Stack(nn.Module):
    def __init__(self, experts, size, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width, size) * size**-0.5)
        self.experts = experts

    def forward(self, x, sizes):
        rows = x.split(sizes, dim=0)
        return torch.cat([F.linear(rows[i], self.weight[i]) for i in range(self.experts)], dim=0)


class Router(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.layer = nn.Linear(size, 4, bias=False)

    def forward(self, x):
        logits, indices = self.layer(x).topk(2, dim=1)
        self.loss = logits.logsumexp(-1).mean() if self.training else 0
        return logits.softmax(dim=1), indices


class Pairs(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.experts, self.chosen, self.size = 4, 2, config.hidden_size
        self.router = Router(config.hidden_size)
        self.first = Stack(4, config.hidden_size, 32)
        self.second = Stack(4, 32, config.hidden_size)

    def sort(self, x):
        weights, indices = self.router(x)
        self.shares, self.tokens, sizes, self.order = sorted_tokens(
            self.chosen, self.experts, weights, indices
        )
        self.sizes = sizes.tolist()
        return self.router.loss

    def map_one(self, x):
        b, t, _ = x.size()
        x = x.reshape(1, -1)
        self.weights, self.indices = self.router(x)
        made = []
        for i in range(self.chosen):
            expert = self.indices[0, i]
            made.append(F.linear(x, self.first.weight[expert]) FACTOR)
        return torch.cat(made, dim=0).view(b, t, self.chosen, -1), self.router.loss

    def map_several(self, x):
        b, t, size = x.size()
        x = x.reshape(-1, size)
        loss = self.sort(x)
        made = self.first(x[self.tokens], self.sizes)
        zeros = torch.zeros((b * t * self.chosen, 32), dtype=made.dtype, device=made.device)
        return zeros.index_add(0, self.order, made).view(b, t, self.chosen, -1), loss

    def map(self, x):
        b, t, _ = x.size()
        if b * t == 1:
            return self.map_one(x)
        else:
            return self.map_several(x)

    def reduce(self, x):
        b, t, k, width = x.size()
        if b * t == 1:
            made = [
                F.linear(x[0, 0, i], self.second.weight[self.indices[0, i]]) * self.weights[0, i]
                for i in range(self.chosen)
            ]
            return sum(made).view(b, t, self.size)
        x = x.reshape(-1, width)[self.order]
        made = self.second(x, self.sizes) * self.shares[:, None]
        zeros = torch.zeros((b * t, self.size), dtype=made.dtype, device=made.device)
        return zeros.index_add(0, self.tokens, made).view(b, t, self.size)

"""
_MLP = """
y, loss = self.pairs.map(x)
y = self.pairs.reduce(F.silu(y))
return y + self.down(F.silu(self.gate(x)) * self.up(x)), loss
"""
_BLOCK = """
x = x + self.attn(self.norm1(x), position_ids)
y, loss = self.mlp(self.norm2(x))
return x + y, loss
"""
_MODEL = """
x = self.embed(input_ids)
losses = 0
for layer in self.layers:
    x, loss = layer(x, position_ids)
    losses += loss
return self.norm(x)
"""


def _saved(folder: Path, *, factor: str = "") -> Path:
    """Return a model whose pairs of experts stand around an activation; one token's first layer
    times a `factor`.
    """
    head = _HEAD.replace(" FACTOR", factor)
    save_odd(folder, head=head, mlp=_MLP, block=_BLOCK, model=_MODEL)
    (folder / "sorting_odd.py").write_text(_SORTED)
    file, made = (
        folder / "modeling_odd.py",
        "class Mlp(nn.Module):\n    def __init__(self, config):\n",
    )
    begin = f"{made}        super().__init__()\n"
    text = file.read_text()
    assert begin in text
    file.write_text(text.replace(begin, f"{begin}        self.pairs = Pairs(config)\n"))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what comes of the model, and of one whose path of one token gives something else."""
    folder = tmp_path_factory.mktemp("methods")
    models = [_saved(folder / "odd_pairs"), _saved(folder / "odd_factor", factor=" * 1.5")]
    return run_apart(GENERATE, models)


def test_what_one_method_leaves_is_handed_to_another(made: dict[str, Any]) -> None:
    found = made["odd_pairs"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert not found["recorded"]
    assert 'between_methods["order"] = ' in found["text"]
    assert "self.pairs.reduce(F.silu(y), between_methods_of_pairs)" in found["text"]


def test_a_path_of_one_token_is_left_out_with_the_other_branch_kept(made: dict[str, Any]) -> None:
    assert "== 1" not in made["odd_pairs"]["text"]
    assert "def sorted_tokens(" in made["odd_pairs"]["text"]


def test_a_path_of_one_token_that_gives_something_else_is_refused(made: dict[str, Any]) -> None:
    assert "error" in made["odd_factor"]
