"""Attention that courses write: one module a head, without a dimension of heads, and masks made step
by step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import onboard.ops  # noqa: F401
from onboard.analysis.tiny.tiny_sizes import VOCABULARY
from onboard.codegen.translate.output.printer import print_block
from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]

HEADS = """
class Head(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.key = nn.Linear(config.size, config.head, bias=False)
        self.query = nn.Linear(config.size, config.head, bias=False)
        self.value = nn.Linear(config.size, config.head, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(99, 99)))
        later = torch.triu(torch.ones(99, 99), diagonal=1)
        self.register_buffer("later", later, persistent=False)
        least = torch.triu(torch.full((1, 1, 99, 99), float("-inf")), diagonal=1)
        self.register_buffer("least", least, persistent=False)

    def forward(self, x):
        B, T, C = x.shape
        k, q = self.key(x), self.query(x)
        SCORES
        return torch.softmax(scores, dim=-1) @ self.value(x)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.words = nn.Embedding(config.words, config.size)
        self.heads = nn.ModuleList([Head(config) for _ in range(config.heads)])

    def forward(self, x=None, input_ids=None, position_ids=None, use_cache=None):
        x = self.words(input_ids if x is None else x)
        return torch.cat([head(x) for head in self.heads], dim=-1)
"""
MANNERS = {
    "buffer": """scores = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        scores = scores.masked_fill(self.tril[:T, :T] == 0, float("-inf"))""",
    "width of the text's vectors": """scores = q @ k.transpose(-2, -1) * C ** -0.5
        scores = scores.masked_fill(self.tril[:T, :T] == 0, float("-inf"))""",
    "hiding buffer": """scores = q @ k.transpose(1, 2)
        scores.masked_fill_(self.later.bool()[:T, :T], -torch.inf)
        scores = scores / k.shape[-1] ** 0.5""",
    "added buffer": """scores = q @ k.transpose(1, 2) / math.sqrt(4)
        scores = scores + self.least[0, 0, :T, :T]""",
    "drawn": """scores = torch.matmul(q, k.transpose(1, 2)) / math.sqrt(q.size(-1))
        tril = torch.tril(torch.ones(T, T, device=x.device))
        scores = scores.masked_fill(tril == 0, float("-inf"))""",
    "added": """mask = torch.triu(torch.ones(T, T, device=x.device), diagonal=1)
        mask = mask.masked_fill(mask == 1, float("-inf"))
        scores = (q @ k.transpose(-2, -1)) * 4 ** -0.5 + mask""",
    "in two steps": """seen = torch.tril(torch.ones(T, T, device=x.device))
        mask = seen.masked_fill(seen == 0, float("-inf")).masked_fill(seen == 1, 0.0)
        scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.size(-1))) + mask""",
}
SIZES = {"size": 12, "head": 4, "heads": 3, "words": VOCABULARY}


@pytest.mark.parametrize("manner", MANNERS)
def test_heads_one_by_one_become_attention(manner: str, translate: Translate) -> None:
    text = HEADS.replace("SCORES", MANNERS[manner])
    state, _, _ = translate(text, SIZES, specialised=True)
    parts = list(state.translator.states.values())
    forwards = [print_block(part.methods["forward"].body) for part in parts]
    assert sum("torch_attention" in forward for forward in forwards) == 1
    assert not any("softmax" in forward or "tril" in forward for forward in forwards)
    ours = _made("\n\n\n".join(_written(part) for part in reversed(parts)), SIZES)
    theirs = _made(text, SIZES)
    ours.load_state_dict(theirs.state_dict(), strict=False)
    ids = torch.randint(VOCABULARY, (2, 7))
    torch.testing.assert_close(ours(ids), theirs(ids))


def test_what_looks_ahead_or_keeps_another_triangle_does_not(translate: Translate) -> None:
    for manner in (
        MANNERS["drawn"].replace("tril == 0", "tril == 1"),
        MANNERS["drawn"].replace("torch.tril(", "torch.triu("),
        MANNERS["buffer"].replace("== 0", "== 1"),
        MANNERS["width of the text's vectors"].replace("C ** -0.5", "T ** -0.5"),
        MANNERS["buffer"].replace("self.tril[:T, :T] == 0", "self.tril[:T, :T].T == 0"),
    ):
        state, _, _ = translate(HEADS.replace("SCORES", manner), SIZES, specialised=True)
        forwards = [
            print_block(p.methods["forward"].body) for p in state.translator.states.values()
        ]
        assert not any("torch_attention" in forward for forward in forwards)


FOLDED = """
class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.head = config.size // config.heads
        self.key = nn.Linear(config.size, config.size)
        self.query = nn.Linear(config.size, config.size)
        self.value = nn.Linear(config.size, config.size)

    def apart(self, x, length, batch):
        return x.view(batch, length, self.heads, self.head).transpose(1, 2).contiguous()

    def forward(self, x):
        batch, length, _ = x.size()
        query = self.query(x) * self.head**-0.5
        key = self.apart(self.key(x), -1, batch)
        value = self.apart(self.value(x), -1, batch)
        shape = (batch * self.heads, -1, self.head)
        query = self.apart(query, length, batch).view(*shape)
        key = key.reshape(*shape)
        value = value.reshape(*shape)
        scores = torch.bmm(query, key.transpose(1, 2))
        tril = torch.tril(torch.ones(length, length, device=x.device))
        scores = scores.masked_fill(tril == 0, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        return torch.bmm(weights, value).view(batch, self.heads, length, self.head).transpose(1, 2).reshape(x.shape)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.words = nn.Embedding(config.words, config.size)
        self.attention = Attention(config)

    def forward(self, x=None, input_ids=None, position_ids=None, use_cache=None):
        x = self.words(input_ids if x is None else x)
        return self.attention(x)
"""


def test_heads_in_the_batch_are_not_taken_for_one_head(translate: Translate) -> None:
    state, _, _ = translate(FOLDED, SIZES, specialised=True)
    parts = list(state.translator.states.values())
    assert any("torch_attention" in print_block(p.methods["forward"].body) for p in parts)
    ours = _made("\n\n\n".join(_written(part) for part in reversed(parts)), SIZES)
    theirs = _made(FOLDED, SIZES)
    ours.load_state_dict(theirs.state_dict(), strict=False)
    ids = torch.randint(VOCABULARY, (2, 7))
    torch.testing.assert_close(ours(ids), theirs(ids))
