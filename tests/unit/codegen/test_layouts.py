"""Attention whose code has the sequence before the batch, or batch and heads in one dimension."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import onboard.ops  # noqa: F401
from onboard.codegen.translate.language.trees.syntax import name
from onboard.codegen.translate.language.values import Code, Mask
from onboard.codegen.translate.mechanisms.layouts.laid import Laid, heads_first
from tests.unit.codegen.test_own_code import _function, _made, _written

Translate = Callable[..., tuple[Any, str, str]]

MEGATRON = """
class Tables(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, length):
        powers = torch.arange(0, self.size, 2).float() / self.size
        angles = torch.einsum("i,j->ij", torch.arange(length).float(), 1.0 / 10**powers)
        both = torch.cat((angles, angles), dim=-1)
        return 1.5 * both.cos()[:, None, :], 1.5 * both.sin()[:, None, :]


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=x1.ndim - 1)


def turned(q, k, cos, sin, offset=0):
    cos, sin = cos[offset : q.shape[0] + offset, ...], sin[offset : q.shape[0] + offset, ...]
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.dim = config.hidden // config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.tables = Tables(self.dim)

    def forward(self, x, mask):
        x = x.transpose(0, 1)
        mixed = self.qkv(x).view(x.size(0), x.size(1), self.heads, 3 * self.dim)
        q, k, v = mixed.chunk(3, -1)
        sizes = (q.size(1), q.size(2), q.size(0), k.size(0))
        q = q.reshape(sizes[2], sizes[0] * sizes[1], -1)
        k = k.reshape(sizes[3], sizes[0] * sizes[1], -1)
        cos, sin = self.tables(q.shape[0])
        q, k = turned(q, k, cos, sin)
        ATTENTION
"""
FOLDED = """
        scores = SCORES
        scores = MASKED
        probs = nn.functional.softmax(scores.view(*sizes), dim=-1)
        sizes = (v.size(1), v.size(2), q.size(0), v.size(3))
        v = v.reshape(v.size(0), sizes[0] * sizes[1], -1)
        out = torch.bmm(probs.view(sizes[0] * sizes[1], sizes[2], -1), v.transpose(0, 1))
        out = out.view(*sizes).permute(2, 0, 1, 3).contiguous()
        return out.view(out.size(0), out.size(1), -1).transpose(0, 1)
"""
APART = """
        q, k = q.view(sizes[2], sizes[0], sizes[1], -1), k.view(sizes[3], sizes[0], sizes[1], -1)
        scores = SCORES / math.sqrt(self.dim)
        probs = (MASKED).softmax(-1)
        out = VALUES
        return out.reshape(out.shape[0], out.shape[1], -1).transpose(0, 1)
"""
BLOOM = """
class Tables(nn.Module):
    def __init__(self, size, precision=torch.half):
        super().__init__()
        self.size = size
        self.precision = precision
        self.longest = None
        self.cos = None

    def forward(self, x, length):
        if self.longest is None or length > self.longest:
            self.longest = length
            powers = torch.arange(0, self.size, 2).float() / self.size
            angles = torch.einsum("i,j->ij", torch.arange(self.longest).float(), 1.0 / 10**powers)
            both = torch.cat((angles, angles), dim=-1)
            self.cos, self.sin = both.cos()[:, None, :], both.sin()[:, None, :]
            if self.precision == torch.bfloat16:
                self.cos, self.sin = self.cos.bfloat16(), self.sin.bfloat16()
        return self.cos[:length, ...], self.sin[:length, ...]


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=x1.ndim - 1)


def turned(q, k, cos, sin, offset=0):
    cos, sin = cos[offset : q.shape[0] + offset, ...], sin[offset : q.shape[0] + offset, ...]
    k = (k * cos) + (rotate_half(k) * sin)
    return (q * cos) + (rotate_half(q) * sin), k


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.dim = config.hidden // config.heads
        self.beta = 0.0
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.tables = Tables(self.dim, precision=torch.bfloat16)

    def forward(self, x, mask):
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, self.heads, 3, self.dim).unbind(3)
        q = q.transpose(1, 2).reshape(b * self.heads, s, self.dim)
        k = k.permute(0, 2, 3, 1).reshape(b * self.heads, self.dim, s)
        v = v.transpose(1, 2).reshape(b * self.heads, s, self.dim)
        cos, sin = self.tables(v, length=k.shape[-1])
        q, k = turned(q.transpose(0, 1), k.permute(2, 0, 1), cos, sin)
        q, k = q.transpose(0, 1), k.permute(1, 2, 0)
        scores = torch.empty(b * self.heads, s, s, dtype=q.dtype)
        scores = torch.baddbmm(
            input=scores, batch1=q, batch2=k, beta=self.beta, alpha=1 / math.sqrt(self.dim)
        )
        scores = MASKED
        probs = nn.functional.softmax(scores.view(b, self.heads, s, s), dim=-1, dtype=torch.float32)
        out = torch.bmm(probs.view(b * self.heads, s, s), v)
        out = out.view(b, self.heads, s, self.dim).permute(0, 2, 1, 3)
        return out.reshape(b, s, self.heads * self.dim)
"""
SCALED = " / math.sqrt(self.dim)"
FORMS = {
    "bmm": (FOLDED, "torch.bmm(q.transpose(0, 1), k.transpose(0, 1).transpose(1, 2))" + SCALED, ""),
    "baddbmm": (
        FOLDED,
        "torch.baddbmm(torch.zeros(sizes[0] * sizes[1], sizes[2], sizes[3]), q.transpose(0, 1),"
        " k.permute(1, 2, 0), beta=0.0, alpha=1 / math.sqrt(self.dim))",
        "",
    ),
    "einsum of three": (
        FOLDED,
        "torch.einsum('bik,bkj->bij', q.transpose(0, 1), k.permute(1, 2, 0))" + SCALED,
        "",
    ),
    "einsum, sequence first": (
        FOLDED,
        "torch.einsum('ibk,jbk->bij', q, k)" + SCALED,
        "",
    ),
    "einsum of four": (
        APART,
        "torch.einsum('sbhd,tbhd->bhst', q, k)",
        "torch.einsum('bhst,tbhd->sbhd', probs, v)",
    ),
    "matmul": (
        APART,
        "torch.matmul(q.permute(1, 2, 0, 3), k.permute(1, 2, 3, 0))",
        "torch.matmul(probs, v.permute(1, 2, 0, 3)).permute(2, 0, 1, 3)",
    ),
}
MASKED = {
    "added": "scores + mask",
    "filled": "torch.masked_fill(scores, mask, torch.finfo(scores.dtype).min)",
}


def _text(form: str, masked: str = "added") -> str:
    if form == "keys turned before RoPE":
        return BLOOM.replace("MASKED", MASKED[masked])
    body, scores, values = FORMS[form]
    for word, code in (("SCORES", scores), ("VALUES", values), ("MASKED", MASKED[masked])):
        body = body.replace(word, code)
    return MEGATRON.replace("ATTENTION", body.strip())


@pytest.mark.parametrize("masked", MASKED)
@pytest.mark.parametrize("form", [*FORMS, "keys turned before RoPE"])
def test_attention_with_the_sequence_first_is_the_canonical_op(
    form: str, masked: str, translate: Translate
) -> None:
    text, fields = _text(form, masked), {"heads": 3, "hidden": 24}
    state, _, forward = translate(
        text, fields, specialised=True, counts_positions=True, mask=Mask()
    )
    assert "torch_attention" in forward
    assert "softmax" not in forward
    assert "mask" not in forward
    (tables,) = [each for cls, each in state.translator.states.items() if cls.__name__ == "Tables"]
    helpers = [_function(*item) for item in state.translator.functions.items()]
    parts = [*helpers, _written(tables), _written(state)]
    original, ours = _made(text, fields), _made("\n\n\n".join(parts), fields)
    ours.load_state_dict(original.state_dict())
    generator = torch.Generator().manual_seed(14)
    for batch, length in ((1, 5), (3, 7), (2, 1)):
        x = torch.randn(batch, length, 24, generator=generator)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        mask = later if masked == "filled" else torch.zeros(length, length).masked_fill(later, -1e9)
        positions = torch.arange(length).expand(batch, -1)
        assert torch.allclose(
            ours(x, position_ids=positions), original(x, mask), rtol=1e-5, atol=1e-6
        )
        # Rows of a batch may be at other positions: those of the tables are each row's own.
        later_rows = torch.cat([ours(row[None], position_ids=positions[:1] + 4) for row in x[:1]])
        both = ours(x, position_ids=torch.cat([positions[:1] + 4, positions[1:]]))
        assert torch.allclose(both[:1], later_rows, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dims", [((0, 2), (1,), (3,)), ((1, 2), (0,), (3,)), ((2,), (0, 1), (3,))])
def test_a_layout_is_what_its_code_computes(dims: Any) -> None:
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(15))
    value = Laid(name("x"), dims=dims, axes=4)
    seen = [axis for group in dims for axis in group]
    shape = [math.prod(x.shape[axis] for axis in group) for group in dims]
    assert torch.equal(_run(value, x), x.permute(seen).reshape(shape))
    first = heads_first(value, 3)
    if len(dims[0]) == 2:
        assert first is not None
        assert torch.equal(_run(first, x), x.permute(seen))
    else:
        assert first is None


def _run(value: Code, x: torch.Tensor) -> Any:
    return eval(ast.unparse(value.code()), {"x": x})
