"""What stands in for functions of flash-linear-attention that serve RWKV-7 computes what the canonical
op does, and what code that calls them becomes.
"""

from __future__ import annotations

from textwrap import indent
from typing import Any

import pytest
import torch
from torch import nn

import onboard.ops  # noqa: F401
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.output.printer import print_block
from onboard.hf.old import packages
from onboard.hf.old.fla import rwkv7_forms as forms
from onboard.verify.error import rmse_ratio
from tests.unit.codegen.conftest import translate
from tests.unit.codegen.test_own_code import _made, _with_parts
from tests.unit.remote.test_linear_attention_forms import Translate, _near, draw

__all__ = ["draw", "translate"]
OPS = torch.ops.onboard


@pytest.mark.parametrize("scale", [None, 0.3])
def test_functions_are_the_op(scale: float | None, draw: Any) -> None:
    q, k, a, b, kk, rate = (draw(2, 21, 3, 8) / 3 for _ in range(6))
    v, g = draw(2, 21, 3, 6), -draw(2, 21, 3, 8).exp()
    expected = OPS.torch_dplr_delta_rule(q, k, v, a, b, g, scale)
    for form in (forms.chunk_dplr_delta_rule, forms.fused_recurrent_dplr_delta_rule):
        _near(form(q, k, v, a, b, g, scale)[0], expected)
    for form in (forms.chunk_rwkv7, forms.fused_recurrent_rwkv7):
        out, state = form(q, g, k, v, a, b, scale)
        _near(out, expected)
        assert state is None
        head, tail = (
            [x[:, :9] for x in (q, g, k, v, a, b)],
            [x[:, 9:] for x in (q, g, k, v, a, b)],
        )
        first, middle = form(*head, scale, None, True)
        rest, _ = form(*tail, scale, middle)
        _near(torch.cat((first, rest), 1), out)
    out = forms.fused_mul_recurrent_rwkv7(q, g, k, v, kk, rate, scale)[0]
    _near(out, OPS.torch_dplr_delta_rule(q, k, v, -kk, kk * rate, g, scale))
    _near(forms.chunk_rwkv7(q, g, k, v, a, b)[0], OPS.torch_dplr_delta_rule(q, k, v, a, b, g, 1.0))


def test_what_has_changed_between_versions_is_to_be_said(draw: Any) -> None:
    q = draw(1, 3, 2, 4)
    for form in (forms.fused_recurrent_rwkv7, forms.fused_recurrent_dplr_delta_rule):
        with pytest.raises(TypeError, match="'scale'"):
            form(q, q, q, q, q, q)
    with pytest.raises(NotImplementedError, match="reverse: no form here"):
        forms.fused_mul_recurrent_rwkv7(q, q, q, q, q, q, reverse=True)


def test_what_stands_around_the_recurrence(draw: Any) -> None:
    x, delta, rate, share, gate = (draw(2, 5, 8) for _ in range(5))
    shares = [draw(8) for _ in range(6)]
    for made, each in zip(forms.fused_addcmul_rwkv7(x, delta, *shares), shares, strict=True):
        assert made is not None
        _near(made, x + delta * each)
    assert forms.fused_addcmul_rwkv7(x, delta, *shares[:5])[-1] is None
    _near(forms.fused_k_rwkv7(x, rate, share), x * (1 + (rate - 1) * share))
    r, k, v, own = (*(draw(2, 5, 2, 4) for _ in range(3)), draw(2, 4))
    expected = torch.einsum("bthd,bthd,hd->bth", r, k, own)[..., None] * v
    _near(forms.gate_output_correction(x, r, k, own, v, gate), (x + expected.flatten(2)) * gate)
    _near(forms.l2_norm(x, 0.5), x / (x.norm(dim=-1, keepdim=True) ** 2 + 0.5).sqrt())
    before = torch.cat((torch.zeros(2, 1, 8), x[:, :-1]), 1)
    _near(forms.token_shift(x), before - x)
    assert forms.token_shift(x, output_cache=True)[1].equal(x[:, -1:])
    low = forms.LoRA(8, 6, 3, activation="tanh").double()
    first, last = (each for each in low.lora if isinstance(each, nn.Linear))
    _near(low(x), torch.tanh(x @ first.weight.T) @ last.weight.T + last.bias)


def test_names_are_found_wherever_a_version_has_them() -> None:
    for full, form in (
        ("fla.ops.rwkv7.chunk_rwkv7", forms.chunk_rwkv7),
        (
            "fla.ops.rwkv7.fused_recurrent.fused_mul_recurrent_rwkv7",
            forms.fused_mul_recurrent_rwkv7,
        ),
        ("fla.ops.generalized_delta_rule.chunk_dplr_delta_rule", forms.chunk_dplr_delta_rule),
        ("fla.modules.l2norm.l2norm", forms.l2_norm),
        ("fla.modules.token_shift.token_shift", forms.token_shift),
        ("fla.layers.rwkv6.LoRA", forms.LoRA),
    ):
        module, _, name = full.rpartition(".")
        assert getattr(packages._Absent(module), name) is form


CALLS = """
from onboard.hf.old.fla.rwkv7_forms import (
    LoRA, chunk_dplr_delta_rule, fused_addcmul_rwkv7, fused_k_rwkv7, fused_recurrent_rwkv7,
    gate_output_correction, l2_norm, token_shift,
)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.size
        self.low = LoRA(8, 8, 3)
        self.share = nn.Parameter(torch.linspace(-1, 1, 8))
        self.own = nn.Parameter(torch.linspace(-1, 1, 8).view(2, 4))

    def forward(self, x):
        b, s, _ = x.shape
        delta, _ = token_shift(x, None, output_cache=True)
        r, w, k, v, a, g = fused_addcmul_rwkv7(
            x, delta, self.share, self.share, self.share, self.share, self.share, self.share
        )
        k = fused_k_rwkv7(k, a, self.share)
        r, w, k, v, a = (y.view(b, s, 2, self.size) for y in (r, -self.low(w).exp(), k, v, a.sigmoid()))
        kk = l2_norm(k)
        start = torch.zeros(b, 2, self.size, self.size, device=x.device)
        one, _ = fused_recurrent_rwkv7(r, w, k, v, -kk, kk * a, SCALE initial_state=start)
        two, _ = chunk_dplr_delta_rule(r, k, v, -kk, kk * a, w, chunk_size=16, safe_gate=True)
        return gate_output_correction((one + two).flatten(2), r, k, self.own, v, g)
"""


def test_calls_become_the_op(translate: Translate, draw: Any) -> None:
    text = CALLS.replace("SCALE", "scale=1.0,")
    state, _, forward = translate(text, {"size": 4}, specialised=True)
    assert forward.count("torch.ops.onboard.torch_dplr_delta_rule(") == 2
    helpers = [
        f"def {key}({', '.join(made.parameters)}):\n{indent(print_block(made.body), '    ')}"
        for key, made in state.translator.functions.items()
    ]
    written = "\n\n".join((*helpers, _with_parts(state)))
    assert "torch.ops.onboard.torch_token_shift(" in written
    x = draw(2, 11, 8).float()
    original, ours = _made(text, {"size": 4}), _made(written, {"size": 4})
    ours.load_state_dict(original.state_dict())
    with torch.no_grad():
        assert rmse_ratio(ours(x), original(x)) < 1e-5
    with pytest.raises(Untranslatable, match="scale"):
        translate(CALLS.replace("SCALE", ""), {"size": 4}, specialised=True)


CHOSEN = """
from onboard.hf.old.fla.rwkv7_forms import ACTIVATIONS as ACT2FN
from onboard.hf.old.fla.rwkv7_forms import chunk_rwkv7, fused_recurrent_rwkv7


class Inner(nn.Module):
    def __init__(self, act="relu", mode="chunk"):
        super().__init__()
        self.act = ACT2FN[act]
        self.mode = mode

    def forward(self, x):
        mode = "fused" if x.shape[1] <= 8 else self.mode
        x = self.act(x).view(*x.shape[:2], 2, 4)
        turned = chunk_rwkv7 if mode == "chunk" else OTHER
        out, _ = turned(r=x, w=-x, k=x, v=x, a=-x, b=x, scale=1.0, initial_state=None)
        return out.flatten(2)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = Inner(config.act)

    def forward(self, x):
        return self.inner(x)
"""


def test_one_of_two_functions_that_compute_the_same_may_be_called(
    translate: Translate, draw: Any
) -> None:
    """And an activation be told by an argument that its module does not keep."""
    text, config = CHOSEN.replace("OTHER", "fused_recurrent_rwkv7"), {"act": "sqrelu"}
    state, _, _ = translate(text, config, specialised=True)
    written = _with_parts(state)
    assert written.count("torch.ops.onboard.torch_dplr_delta_rule(") == 1
    assert "'sqrelu': 'relu2'" in written
    for act in ("sqrelu", "relu"):
        made = f"from transformers.activations import ACT2FN\n{written}"
        original, ours = (_made(code, {"act": act}) for code in (text, made))
        for length in (5, 21):
            x = draw(2, length, 8) / 3
            _near(ours(x), original(x))
    other = CHOSEN.replace("OTHER", "(lambda **_: (x, None))")
    with pytest.raises(Untranslatable):
        translate(other, config, specialised=True)
