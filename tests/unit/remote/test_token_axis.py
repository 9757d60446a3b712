"""Heads before tokens, as the first versions of flash-linear-attention have them, or behind: what code
does not say its texts' lengths show, and nothing is guessed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onboard.hf.old.fla import linear_attention_forms as forms
from onboard.hf.old.fla import token_axis
from onboard.verify.error import rmse_ratio
from tests.support.odd_code import GENERATE, run_apart, save_odd
from tests.unit.codegen.conftest import translate
from tests.unit.codegen.test_own_code import _made, _written
from tests.unit.remote.test_linear_attention_forms import Translate, draw

__all__ = ["draw", "translate"]


@pytest.fixture(autouse=True)
def _nothing_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_axis, "_now", token_axis.Shown())


def _cases(draw: Any) -> list[tuple[Callable[..., Any], tuple[torch.Tensor, ...], Any]]:
    """Functions with tensors [2, 7, 3, ...] of each token, and what else they need."""
    q, k, v, g = draw(2, 7, 3, 4), draw(2, 7, 3, 4), draw(2, 7, 3, 5), -draw(2, 7, 3, 4).exp()
    beta = draw(2, 7, 3).sigmoid()
    return [
        (forms.chunk_gated_delta_rule, (q, k / 3, v, -beta, beta), ()),
        (forms.chunk_delta_rule, (q, k / 3, v, beta), ()),
        (forms.chunk_simple_gla, (q, k, v, -beta), ()),
        (forms.chunk_rwkv6, (q, k, v, g), (draw(3, 4),)),
        (forms.chunk_gla, (q, k, v, g), ()),
        (forms.fused_recurrent_gla, (q, k, v, g), ()),
    ]


def test_heads_first_is_the_same_with_both_axes_exchanged(draw: Any) -> None:
    for form, tensors, more in _cases(draw):
        out, state = form(*tensors, *more, head_first=False, output_final_state=True)
        turned = [item.transpose(1, 2) for item in tensors]
        other, same = form(*turned, *more, head_first=True, output_final_state=True)
        torch.testing.assert_close(other, out.transpose(1, 2))
        torch.testing.assert_close(same, state)


class _Model(nn.Module):
    """Attention of ids [batch, tokens] with three heads; what it says of their order is `told`."""

    def __init__(self, *orders: bool, padding: int = 0, **told: Any) -> None:
        super().__init__()
        self.orders, self.padding, self.told = orders, padding, told

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        assert input_ids is not None
        assert attention_mask is None or attention_mask.shape == input_ids.shape
        input_ids = nn.functional.pad(input_ids, (0, self.padding))
        x = input_ids[..., None, None] * torch.linspace(-1, 1, 12).view(3, 4)
        outs = [self.read(x, heads_first) for heads_first in self.orders]
        return torch.stack(outs).sum(dim=0)

    def read(self, x: torch.Tensor, heads_first: bool) -> torch.Tensor:
        """Return attention of x [batch, tokens, heads, size], which is like it."""
        x = x.transpose(1, 2) if heads_first else x
        out, _ = forms.chunk_gla(x, x.cos(), x.sin(), -x.square(), **self.told)
        return out.transpose(1, 2) if heads_first else out


def _watched(*orders: bool, padding: int = 0) -> _Model:
    cls: Any = type("_Watched", (_Model,), {})
    token_axis.watch(cls)
    model: _Model = cls(*orders, padding=padding)
    return model


@pytest.mark.parametrize("heads_first", [False, True])
def test_the_texts_length_shows_the_order(heads_first: bool) -> None:
    ids, like_heads = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]), torch.tensor([[3, 1, 4]])
    said, model = _Model(False, head_first=False), _watched(heads_first)
    with pytest.raises(NotImplementedError, match="nothing tells whether heads or tokens"):
        model(like_heads, past_key_values=[])
    assert token_axis.shown_by(type(model)) is None
    torch.testing.assert_close(model(input_ids=ids), said(ids))
    assert token_axis.shown_by(type(model)) is heads_first
    torch.testing.assert_close(model(like_heads), said(like_heads))
    x = torch.linspace(-1, 1, 48).view(1, 4, 3, 4)  # a part of the model by itself
    torch.testing.assert_close(model.read(x, heads_first), said.read(x, False))


@pytest.mark.parametrize("heads_first", [False, True])
def test_a_first_text_that_shows_nothing_is_read_twice_over(heads_first: bool) -> None:
    said, model = _Model(False, head_first=False), _watched(heads_first)
    text = torch.tensor([[3, 1, 4], [1, 5, 9]])
    torch.testing.assert_close(model(text, attention_mask=torch.ones_like(text)), said(text))
    assert token_axis.shown_by(type(model)) is heads_first


def test_an_order_that_nothing_shows_is_refused() -> None:
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with pytest.raises(NotImplementedError, match="nothing tells whether heads or tokens"):
        _Model(True)(ids)
    with pytest.raises(
        NotImplementedError, match="heads come first in some calls, tokens in others"
    ):
        _watched(True, False)(ids)
    padded = _watched(True, padding=3)
    with pytest.raises(NotImplementedError, match="neither axis has the text's length"):
        padded(ids)


_HEAD = """
from fla.ops.delta_rule import chunk_delta_rule
from fla.ops.gla import fused_chunk_gla, fused_recurrent_gla
from fla.ops.simple_gla import chunk_simple_gla
"""
_ATTENTION = """
b, t, _ = x.shape
q, k, v = self.qkv(x).chunk(3, dim=-1)
q, k, v = (y.view(b, t, self.heads, self.size)TURN for y in (q, k, v))
slopes = torch.linspace(-2.0, -0.5, self.heads, device=x.device)
if t > 1:
    y, state = fused_chunk_gla(q, k, v, F.logsigmoid(k), scale=1.0SAID)
else:
    y, state = fused_recurrent_gla(q, k, v, F.logsigmoid(k), scale=1.0SAID)
k = F.normalize(k, dim=-1)
y = y + chunk_delta_rule(q, k, v, v.mean(dim=-1).sigmoid()SAID)[0]
y = y + chunk_simple_gla(q, k, v, g=slopes[DECAY].expand(*v.shape[:3])SAID)[0]
return self.out(yTURN.reshape(b, t, -1))
"""
_ORDERS = {
    "tokens": {"TURN": "", "DECAY": "None, None, :"},
    "heads": {"TURN": ".transpose(1, 2)", "DECAY": "None, :, None"},
}


def _attention(order: str, said: str) -> str:
    code = _ATTENTION
    for key, word in (_ORDERS[order] | {"SAID": said}).items():
        code = code.replace(key, word)
    return code


def test_code_of_versions_with_either_order_is_translated(tmp_path: Path) -> None:
    folders = [
        save_odd(tmp_path / f"odd_{order}", head=_HEAD, attention=_attention(order, ""))
        for order in _ORDERS
    ]
    found = run_apart(GENERATE, folders)
    for folder in folders:
        made = found[folder.name]
        assert made.get("error") is None, made["error"]
        assert made["worst"] < 1e-5
        assert made["recorded"] == []
        for op in ("torch_delta_rule", "torch_lightning_attention", "torch_gated_linear_attention"):
            assert made["text"].count(op) == 1
        said = [fact for fact in made["facts"] if "heads before tokens" in fact]
        assert len(said) == (folder.name == "odd_heads")


_TOY = """
from onboard.hf.old.fla.linear_attention_forms import (
    chunk_delta_rule, chunk_gla as fused_chunk_gla, chunk_simple_gla, fused_recurrent_gla
)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.size = 4

    def qkv(self, x):
        return torch.cat((x, x.cos(), x.sin()), dim=-1)

    def out(self, x):
        return x * 2

    def forward(self, x):
BODY
"""


def test_orders_that_are_said_become_the_same_model_file(translate: Translate, draw: Any) -> None:
    """Only the code's own reading of its tensors differs."""
    x, config, made = draw(2, 11, 12).float(), {"heads": 3}, {}
    for order, said in (("tokens", ", head_first=False"), ("heads", ", head_first=True")):
        body = _attention(order, said).replace("F.", "nn.functional.")
        text = _TOY.replace("BODY", textwrap.indent(body, " " * 8))
        state, _, forward = translate(text, config, specialised=True)
        assert "head_first" not in forward
        made[order] = _made(_written(state), config)(x)
        assert rmse_ratio(made[order], _made(text, config)(x)) < 1e-5
    assert rmse_ratio(made["heads"], made["tokens"]) < 1e-6
