"""Rows of tables of positions that get more dimensions, and tables that the first text makes."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import name
from onboard.codegen.translate.language.values import Code
from onboard.codegen.translate.output.emit import _guard
from onboard.hf.old import einops_forms
from onboard.runtime.length_dependent_rope import length_dependent_rope
from onboard.testing import Call
from tests.unit.codegen.test_own_code import _made, _written
from tests.unit.codegen.test_own_tables import _agree_in_every_step

Translate = Callable[..., tuple[Any, str, str]]

SHAPED = """
from einops import rearrange


def beside(table, x):
    def fitting(table, x):
        ndim = x.ndim
        shape = [d if i == 1 or i == ndim - 1 else 1 for i, d in enumerate(x.shape)]
        return table.view(*shape)

    return fitting(table, x)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        angles = torch.outer(torch.arange(config.length).float(), 1.0 / torch.arange(1, config.size + 1))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("pairs", angles.cos().unflatten(1, (-1, 2)), persistent=False)
        self.register_buffer("wide", angles.cos()[None, None, :, :], persistent=False)
        self.learnt = nn.Parameter(angles.sin()[None])

    @staticmethod
    def cut(table, length):
        return table[:length]

    @classmethod
    def of(kind, table, length):
        return kind.cut(table, length)

    def forward(self, x, position_ids, offset=0):
        length = x.shape[1]
        rows = HOW
        return (AS_HEADS * rows).reshape(x.shape)
"""


@pytest.mark.parametrize(
    ("how", "as_heads"),
    [
        ("self.cos[:length].unsqueeze(0).unsqueeze(0)", "x.unsqueeze(1)"),
        ("self.cos[:length].unsqueeze(0)", "x"),
        ("self.learnt[:, :length]", "x"),
        ("self.learnt[:, :length, :]", "x"),
        ("self.wide[..., :length, :]", "x.unsqueeze(1)"),
        ("self.wide[..., length - x.size(1) : length, :]", "x.unsqueeze(1)"),
        ("self.cos[:length].view(1, 1, length, -1)", "x.unsqueeze(1)"),
        ("self.cos[:length].view(1, length, 1, -1)", "x.unsqueeze(2)"),
        ("self.cos[:length].to(x.dtype).reshape(1, length, -1)", "x"),
        ("self.of(self.cos, length)", "x"),
        ("beside(self.cos[:length], x.unsqueeze(2))", "x.unsqueeze(2)"),
        (
            "self.pairs[:length].view(1, x.size(1), 1, -1, 2).flatten(3)",
            "x.unsqueeze(2)",
        ),
        ('rearrange(self.cos[:length], "s d -> () () s d")', "x.unsqueeze(1)"),
        ('rearrange(self.cos[:length], "s d -> 1 s 1 d")', "x.unsqueeze(2)"),
    ],
)
def test_rows_that_get_dimensions_for_texts_and_heads_keep_those_of_each_text(
    how: str, as_heads: str, translate: Translate, monkeypatch: pytest.MonkeyPatch
) -> None:
    einops = ModuleType("einops")
    monkeypatch.setattr(einops, "rearrange", einops_forms.rearrange, raising=False)
    monkeypatch.setitem(sys.modules, "einops", einops)
    text = SHAPED.replace("HOW", how).replace("AS_HEADS", as_heads)
    sizes, given = {"size": 4, "length": 32}, Code(name("position_ids"))
    state, _, _ = translate(
        text, sizes, specialised=True, counts_positions=True, position_ids=given
    )
    _agree_in_every_step(state, text, sizes)


BESIDE_HEADS = """
def turned(x, cos):
    half = x.size(-1) // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * (1 - cos)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        angles = torch.outer(torch.arange(config.length).float(), 1.0 / torch.arange(1, config.size + 1))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.heads = config.heads

    def forward(self, x=None, position_ids=None, input_ids=None, use_cache=False):
        if x is None:
            x = nn.functional.one_hot(input_ids % 4, 4).float()
        cos = self.cos[: x.shape[1]]
        if self.heads:
            x = turned(torch.stack((x, -x), dim=1)[..., :4], cos).sum(1)
        else:
            x = turned(x, cos)
        return x
"""


@pytest.mark.parametrize("heads", [True, False])
def test_rows_are_beside_the_heads_of_what_they_are_multiplied_with(
    heads: bool, translate: Translate
) -> None:
    sizes = {"size": 4, "length": 32, "heads": heads}
    given = Code(name("position_ids"))
    state, _, _ = translate(
        BESIDE_HEADS, sizes, specialised=True, counts_positions=True, position_ids=given
    )
    assert ("unsqueeze(1)" in _agree_in_every_step(state, BESIDE_HEADS, sizes)) is heads


LATE = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size, self.length = config.size, config.length
        self.register_buffer("cos", None, persistent=False)

    def _make(self, device):
        angles = torch.outer(torch.arange(self.length).float(), 1.0 / torch.arange(1, self.size + 1))
        self.register_buffer("cos", angles.cos().to(device), persistent=False)

    def forward(self, x, position_ids, offset=0):
        if self.cos is None:
            self._make(x.device)
        return x * self.cos[offset : offset + x.shape[1]]
"""


def test_a_table_that_the_first_text_makes_is_made_for_each(translate: Translate) -> None:
    sizes, given = {"size": 4, "length": 32}, Code(name("position_ids"))
    state, _, _ = translate(
        LATE, sizes, specialised=True, counts_positions=True, position_ids=given
    )
    _agree_in_every_step(state, LATE, sizes)


HALVES = """
def turned(x, length):
    half = x.shape[-1] // 2
    angles = torch.einsum("i,j->ij", torch.arange(length).float(), 0.5 ** torch.arange(half))
    return x * torch.cat((angles.cos(), angles.sin()), dim=-1)


class Part(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x, past):
        if past is not None:
            x = x + past
        return turned(x, x.shape[1])


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.h = nn.ModuleList([Part() for _ in range(config.layers)])

    def forward(self, x, position_ids):
        pasts = tuple([None] * len(self.h))
        for i in range(len(self.h)):
            block, past = self.h[i], pasts[i]
            x = block(x, past)
        return x
"""


def test_half_of_a_size_is_no_number_of_positions_and_no_layer_has_a_past(
    translate: Translate,
) -> None:
    sizes, given = {"size": 4, "layers": 2}, Code(name("position_ids"))
    state, _, _ = translate(
        HALVES, sizes, specialised=True, counts_positions=True, position_ids=given
    )
    assert "past" not in _agree_in_every_step(state, HALVES, sizes)


KEPT_OUTPUT = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.size
        self.out = BaseModelOutputWithPast()

    def forward(self, x):
        self.out.__setitem__("last_hidden_state", x * self.size)
        self.out["past_key_values"] = None
        return self.out.last_hidden_state
"""


def test_an_output_that_a_model_keeps_and_fills_is_one_of_each_text(translate: Translate) -> None:
    state, _, forward = translate(KEPT_OUTPUT, {"size": 4}, specialised=True)
    assert "out" not in forward
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(3))
    assert torch.equal(_made(_written(state), {"size": 4})(x), 4 * x)


def test_complex_rows_of_a_table_are_those_of_each_text() -> None:
    rows = torch.polar(torch.ones(5, 3), torch.randn(5, 3))
    call = Call({"x": torch.zeros(2, 5, 4), "rows": rows}, [torch.zeros(2, 5, 4)])
    assert call._for_each_text(rows).shape == (2, 5, 3)
    assert call._for_each_text(rows[:4]).shape == (4, 3)
    pairs = torch.view_as_real(rows)
    assert call._for_each_text(pairs).shape == (2, 5, 3, 2)
    assert call._for_each_text(pairs[:4]).shape == (4, 3, 2)
    assert call._for_each_text(torch.zeros(5, 3, 3)).shape == (5, 3, 3)


def test_what_is_taken_for_granted_is_asked_of_the_config_by_its_name() -> None:
    condition = ast.parse("not self.config.use_moe", mode="eval").body
    assert ast.unparse(_guard(condition, name("params"))) == (
        "assert not params.use_moe, 'not covered: use_moe'"
    )


LONG = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.long, self.short = config.rope_scaling["long_factor"], config.rope_scaling["short_factor"]
        self.most = config.original_max_position_embeddings

    def forward(self, x, position_ids):
        seq_len = torch.max(position_ids) + 1
        if seq_len > self.most:
            factors = torch.tensor(self.long, dtype=torch.float32)
            scale = 3.0
        else:
            factors = torch.tensor(self.short, dtype=torch.float32)
            scale = 1.0
        return x * factors * scale
"""


def _long_config(most: int) -> dict[str, Any]:
    fields = {
        "rope_scaling": {"type": "su", "short_factor": [1.0, 2.0], "long_factor": [5.0, 7.0]},
        "original_max_position_embeddings": most,
    }
    return {**fields, "to_dict": lambda: fields}


def test_a_table_for_longer_texts_is_chosen_in_the_graph(translate: Translate) -> None:
    config, given = _long_config(64), Code(name("position_ids"))
    state, _, forward = translate(LONG, config, specialised=True, position_ids=given)
    assert "if " not in forward
    ours, theirs = _made(_written(state), config), _made(LONG, config)
    x, positions = torch.randn(3, 2), torch.arange(3).unsqueeze(0)
    graph = torch.export.export(ours, (x, positions)).module()
    for start in (0, 61, 62, 500):
        assert torch.equal(graph(x, positions + start), theirs(x, positions + start))


@pytest.mark.parametrize("change", [("> self.most", "> 2 * self.most"), ("scale = 1.0", "pass")])
def test_another_branch_of_longer_texts_stays_one(
    translate: Translate, change: tuple[str, str]
) -> None:
    config, given = _long_config(64), Code(name("position_ids"))
    text = LONG.replace(*change).replace("return x * factors * scale", "return x * factors")
    _, _, forward = translate(text, config, specialised=True, position_ids=given)
    assert "if " in forward


def test_two_lists_of_factors_make_a_table_depend_on_the_length() -> None:
    known = length_dependent_rope(_long_config(96)["to_dict"]())
    assert known is not None
    assert known.switch_length == 96
    assert length_dependent_rope({"rope_scaling": {"type": "su", "factor": 2.0}}) is None
    assert length_dependent_rope({"rope_scaling": 2.0}) is None


SEVERAL = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads

    def forward(self, x):
        batch, length, _ = x.shape
        q = x.view(batch, length, self.heads, -1).transpose(1, 2)
        mask = None
        is_causal = length > 1
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=is_causal)
"""


@pytest.mark.parametrize("length", ["length", "x.shape[1]", "q.size(-2)"])
def test_attention_that_is_causal_for_several_tokens_is_for_one(
    translate: Translate, length: str
) -> None:
    config, text = {"heads": 2}, SEVERAL.replace("length > 1", f"{length} > 1")
    state, _, forward = translate(text, config, specialised=True)
    assert "is_causal=True" in forward
    ours, theirs = _made(_written(state), config), _made(text, config)
    for tokens in (1, 5):
        x = torch.randn(2, tokens, 8)
        torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("change", ["batch > 1", "length > 2", "self.heads > 1"])
def test_attention_that_is_causal_for_another_reason_stays(
    translate: Translate, change: str
) -> None:
    text = SEVERAL.replace("length > 1", change)
    _, _, forward = translate(text, {"heads": 2}, specialised=True)
    assert "is_causal=True" not in forward
