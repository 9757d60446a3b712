"""What stands in for flash-linear-attention computes what the canonical ops do, which work chunk by
chunk, and what code that calls it becomes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onboard.ops  # noqa: F401
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.hf.old import packages
from onboard.hf.old.fla import linear_attention_forms as forms
from onboard.verify.error import rmse_ratio
from tests.support.odd_code import GENERATE, assert_translated, run_apart, save_odd
from tests.unit.codegen.conftest import translate
from tests.unit.codegen.test_own_code import _made, _written

__all__ = ["translate"]
Translate = Callable[..., tuple[Any, str, str]]
Form = Callable[..., Any]
OPS = torch.ops.onboard


@pytest.fixture
def draw() -> Any:
    seed = random.randrange(2**31)
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return drawn


def _near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The ops have lengths of vectors in float32."""
    assert actual.shape == expected.shape
    assert rmse_ratio(actual, expected) < 1e-6


@pytest.mark.parametrize("normed", [True, False])
def test_delta_rules_are_the_ops(normed: bool, draw: Any) -> None:
    q, k, v = draw(2, 21, 2, 8), draw(2, 21, 2, 8) / 3, draw(2, 21, 2, 6)
    beta, decay, rates = draw(2, 21, 2).sigmoid(), -draw(2, 21, 2).exp(), -draw(2, 21, 2, 8).exp()
    cases: tuple[tuple[Form, Any, tuple[torch.Tensor, ...]], ...] = (
        (forms.chunk_gated_delta_rule, OPS.torch_gated_delta_rule, (q, k, v, decay, beta)),
        (forms.chunk_delta_rule, OPS.torch_delta_rule, (q, k, v, beta)),
        (forms.chunk_kda, OPS.torch_kda, (q, k, v, rates, beta)),
    )
    for form, op, tensors in cases:
        how: dict[str, Any] = {"use_qk_l2norm_in_kernel": normed}
        how |= {} if form is forms.chunk_kda else {"head_first": False}
        for scale in (None, 0.3):
            out, state = form(*tensors, scale=scale, **how)
            _near(out, op(*tensors, scale, normed))
            assert state is None
            first, middle = form(
                *(item[:, :9] for item in tensors), scale=scale, **how, output_final_state=True
            )
            rest, _ = form(
                *(item[:, 9:] for item in tensors), scale=scale, **how, initial_state=middle
            )
            _near(torch.cat((first, rest), dim=1), out)


def test_groups_of_heads_share_keys(draw: Any) -> None:
    q, k, v = draw(1, 9, 2, 8), draw(1, 9, 2, 8) / 3, draw(1, 9, 4, 6)
    beta, decay = draw(1, 9, 4).sigmoid(), -draw(1, 9, 4).exp()
    out, _ = forms.chunk_gated_delta_rule(q, k, v, decay, beta, head_first=False)
    _near(out, OPS.torch_gated_delta_rule(q, k, v, decay, beta))


def test_decaying_attention_is_the_op(draw: Any) -> None:
    q, k, v, slopes = draw(2, 21, 4, 8), draw(2, 21, 4, 8), draw(2, 21, 4, 6), draw(4).exp()
    expected = OPS.torch_lightning_attention(q * 8**-0.5, k, v, slopes)
    _near(forms.chunk_simple_gla(q, k, v, g_gamma=-slopes)[0], expected)
    _near(
        forms.chunk_simple_gla(q, k, v, g=-slopes.expand(2, 21, 4), head_first=False)[0], expected
    )


def test_texts_that_lie_one_after_the_other_are_read_alone(draw: Any) -> None:
    q, k, v, g = draw(1, 9, 2, 4), draw(1, 9, 2, 4), draw(1, 9, 2, 4), -draw(1, 9, 2).exp()
    ends = torch.tensor([0, 4, 9])
    read: Form = partial(forms.chunk_simple_gla, output_final_state=True)
    out, states = read(q, k, v, g, cu_seqlens=ends)  # which older versions do not take
    alone = [
        read(*(item[:, a:b] for item in (q, k, v, g)), head_first=False)
        for a, b in ((0, 4), (4, 9))
    ]
    _near(out, torch.cat([each for each, _ in alone], dim=1))
    _near(states, torch.cat([each for _, each in alone]))
    conv = forms.ShortConvolution(4, 3).double()
    x = draw(1, 9, 4)
    apart = [conv(x[:, a:b])[0] for a, b in ((0, 4), (4, 9))]
    _near(conv(x, cu_seqlens=ends)[0], torch.cat(apart, dim=1))


def test_arguments_without_a_form_are_refused(draw: Any) -> None:
    q, k, v, beta = draw(1, 3, 1, 4), draw(1, 3, 1, 4), draw(1, 3, 1, 4), draw(1, 3, 1)
    with pytest.raises(NotImplementedError, match="safe_gate"):
        forms.chunk_kda(q, k, v, q, beta, safe_gate=True)
    forms.chunk_kda(q, k, v, -q.exp(), beta, safe_gate=False)


def test_gates_may_be_made_decays_of_inside(draw: Any) -> None:
    q, k, v, g = (draw(2, 5, 2, 4) for _ in range(4))
    beta, rate, bias = draw(2, 5, 2), draw(2), draw(8)
    decays = -rate.exp().view(2, 1) * torch.log1p((g + bias.view(2, 4)).exp())
    inside = {"A_log": rate, "dt_bias": bias, "use_gate_in_kernel": True}
    _near(forms.chunk_kda(q, k, v, g, beta, **inside)[0], forms.chunk_kda(q, k, v, decays, beta)[0])


def test_gates_and_norms(draw: Any) -> None:
    g, rate, bias = draw(2, 3, 8), draw(1, 1, 2, 1), draw(8)
    expected = -rate.exp().view(2, 1) * torch.log1p((g + bias).exp()).view(2, 3, 2, 4)
    _near(forms.fused_kda_gate(g, rate, 4, g_bias=bias), expected)
    _near(forms.fused_kda_gate(g.view(2, 3, 2, 4), rate.flatten(), dt_bias=bias), expected)
    x = draw(2, 3, 8)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    for activation, gate in (("sigmoid", 1 / (1 + (-g).exp())), ("swish", g / (1 + (-g).exp()))):
        norm = forms.FusedRMSNormGated(8, eps=1e-5, activation=activation).double()
        nn.init.normal_(norm.weight)  # type: ignore[arg-type]
        _near(norm(x, g), normed * norm.weight * gate)
    plain = forms.RMSNorm(8, eps=1e-5).double()
    _near(plain(x), normed)
    other = draw(2, 3, 8)
    both, added = plain(x, other, True)
    _near(added, x + other)
    for found in (both, plain(x, other), plain(x + other, None, True)[0]):
        _near(found, plain(x + other))


@pytest.mark.parametrize("scale", [None, 0.3])
def test_linear_attention_with_decays_of_channels_is_the_op(scale: float | None, draw: Any) -> None:
    q, k, v = draw(2, 21, 3, 8), draw(2, 21, 3, 8), draw(2, 21, 3, 6)
    g, u = -draw(2, 21, 3, 8).exp(), draw(3, 8)
    factor = 8**-0.5 if scale is None else scale
    expected = OPS.torch_gated_linear_attention(q * factor, k, v, g)
    for form in (forms.chunk_gla, forms.fused_recurrent_gla):
        _near(form(q, k, v, g, scale=scale, head_first=False)[0], expected)
    rwkv6 = partial(forms.chunk_rwkv6, head_first=False)
    out, _ = rwkv6(q, k, v, g, u, scale)
    _near(out, OPS.torch_gated_linear_attention(q * factor, k, v, g, u))
    first, state = rwkv6(q[:, :9], k[:, :9], v[:, :9], g[:, :9], u, scale, None, True)
    rest, _ = rwkv6(q[:, 9:], k[:, 9:], v[:, 9:], g[:, 9:], u, scale, state)
    _near(torch.cat((first, rest), 1), out)


def test_arguments_that_versions_have_in_other_places_are_given_by_name_alone(draw: Any) -> None:
    """What follows the tensors was a chunk's length once, a state, or the scale: where it is `g_gamma`
    today a number would be taken for decays. Behind those of `fused_recurrent_kda` are its gate's.
    """
    q, beta = draw(1, 3, 2, 4), draw(1, 3, 2)
    cases: tuple[tuple[Form, tuple[torch.Tensor, ...]], ...] = (
        (partial(forms.chunk_delta_rule, head_first=False), (q, q, q, beta)),
        (partial(forms.chunk_gated_delta_rule, head_first=False), (q, q, q, beta, beta)),
        (partial(forms.chunk_simple_gla, head_first=False), (q, q, q, beta)),
        (forms.chunk_kda, (q, q, q, q, beta)),
    )
    for form, tensors in cases:
        form(*tensors)
        with pytest.raises(TypeError, match="positional"):
            form(*tensors, 16)
    with pytest.raises(NotImplementedError, match="gv: no form here"):
        forms.fused_recurrent_gla(q, q, q, q, q, head_first=False)
    with pytest.raises(NotImplementedError, match="a scale of -1"):
        forms.chunk_gla(q, q, q, q, -1, head_first=False)


def test_names_are_found_wherever_a_version_has_them() -> None:
    for full, form in (
        ("fla.ops.kda.chunk_kda", forms.chunk_kda),
        ("fla.ops.kda.fused_recurrent_kda", forms.chunk_kda),
        ("fla.ops.simple_gla.chunk.chunk_simple_gla", forms.chunk_simple_gla),
        ("fla.ops.rwkv6.recurrent_fuse.fused_recurrent_rwkv6", forms.chunk_rwkv6),
        ("fla.ops.gla.fused_chunk_gla", forms.chunk_gla),
        ("fla.ops.gla.fused_recurrent_gla", forms.fused_recurrent_gla),
        ("fla.modules.ShortConvolution", forms.ShortConvolution),
    ):
        module, _, name = full.rpartition(".")
        assert getattr(packages._Absent(module), name) is form


CALLS = """
from onboard.hf.old.fla.linear_attention_forms import chunk_kda, chunk_simple_gla
from onboard.hf.old.recurrent_forms import causal_conv1d_fn


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.size
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8 * 3).view(8, 3))
        self.register_buffer("slope", -torch.arange(1, 3) / 2, persistent=False)

    def forward(self, x):
        b, s, _ = x.shape
        x = causal_conv1d_fn(x.transpose(1, 2), self.weight, activation="silu").transpose(1, 2)
        q = x.view(b, s, 2, self.size)
        k, v = q.flip(-1), q.tanh()
        g, beta = -q.square(), q[..., 0].sigmoid()
        out, state = chunk_kda(q, k, v, g=g, beta=beta, output_final_state=True)
        decay = DECAY
        more, state = chunk_simple_gla(q=q, k=k, v=v, GIVEN, initial_state=None, head_first=False)
        return out + more
"""
GIVEN = {
    "g_gamma=decay": "self.slope.to(x.device)",
    "g=decay": "self.slope[None, None, :].expand(b, s, 2)",
    "g=self.slope[None, None, :].expand(b, s, 2), scale=0.7": "1",
}


@pytest.mark.parametrize("given", GIVEN)
def test_calls_become_the_ops(given: str, translate: Translate, draw: Any) -> None:
    text = CALLS.replace("GIVEN", given).replace("DECAY", GIVEN[given])
    state, _, forward = translate(text, {"size": 4}, specialised=True)
    for op in ("torch_kda", "torch_lightning_attention", "torch_causal_conv1d"):
        assert f"torch.ops.onboard.{op}(" in forward
    x = draw(2, 11, 8).float()
    original, ours = _made(text, {"size": 4}), _made(_written(state), {"size": 4})
    with torch.no_grad():
        assert rmse_ratio(ours(x), original(x)) < 1e-5


def test_decays_that_tokens_make_have_no_op(translate: Translate) -> None:
    text = CALLS.replace("GIVEN", "g=-q[..., 0].exp()").replace("DECAY", "1")
    with pytest.raises(Untranslatable, match="chunk_simple_gla with its argument g"):
        translate(text, {"size": 4}, specialised=True)


OF_CHANNELS = """
from onboard.hf.old.fla.linear_attention_forms import chunk_gla, chunk_rwkv6, fused_recurrent_gla


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.size
        self.first = nn.Parameter(torch.linspace(-1, 1, 2 * config.size).view(2, config.size))

    def forward(self, x):
        q = x.view(*x.shape[:2], 2, self.size)
        k, v, g = q.flip(-1), q.tanh(), -q.square()
        one, state = chunk_rwkv6(q, k, v, g, self.first, scale=1.0, head_first=False)
        two, state = chunk_gla(q, k, v, g, 0.5, head_first=False)
        three, state = fused_recurrent_gla(q=q, k=k, v=v, gk=g, head_first=False)
        return one + two + three
"""


def test_calls_with_decays_of_channels_become_the_op(translate: Translate, draw: Any) -> None:
    state, _, forward = translate(OF_CHANNELS, {"size": 4}, specialised=True)
    assert forward.count("torch.ops.onboard.torch_gated_linear_attention(") == 3
    x = draw(2, 11, 8).float()
    original, ours = _made(OF_CHANNELS, {"size": 4}), _made(_written(state), {"size": 4})
    with torch.no_grad():
        assert rmse_ratio(ours(x), original(x)) < 1e-5
    unsaid = OF_CHANNELS.replace("0.5, head_first=False", "0.5")
    with pytest.raises(Untranslatable, match="chunk_gla with heads or tokens first"):
        translate(unsaid, {"size": 4}, specialised=True)


SCANS = """
from onboard.hf.old.recurrent_forms import mamba_chunk_scan_combined, selective_scan_fn


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.rates = nn.Parameter(-torch.linspace(0.1, 2, 12).view(config.size, 3))
        self.heads = nn.Parameter(-torch.linspace(0.1, 2, 2))

    def forward(self, x):
        u, B = x.transpose(1, 2), x[..., :3].transpose(1, 2)
        y = selective_scan_fn(u, u.flip(1), self.rates, B, B.tanh(), delta_softplus=True)
        x = x.unflatten(-1, (2, 2))
        z = mamba_chunk_scan_combined(
            x, x[..., 0], self.heads, x, x.tanh(), 4, D=self.heads, dt_bias=self.heads, dt_softplus=True
        )
        return y.transpose(1, 2) + z.flatten(2)
"""


def test_scans_become_the_ops(translate: Translate, draw: Any) -> None:
    state, _, forward = translate(SCANS, {"size": 4}, specialised=True)
    assert "torch_selective_scan(" in forward
    assert "torch_ssm(" in forward
    x = draw(2, 11, 4).float()
    with torch.no_grad():
        expected = _made(SCANS, {"size": 4})(x)
        assert rmse_ratio(_made(_written(state), {"size": 4})(x), expected) < 1e-5


_NORMED = """
y = self.attn(self.norm1(x), position_ids)
y, x = self.norm2(y, x, True)
return x + self.mlp(y)
"""


def test_a_norm_of_a_sum_that_gives_both_is_translated(tmp_path: Path) -> None:
    head = "from fla.modules import RMSNorm\n"
    folder = save_odd(tmp_path / "odd_summed", head=head, block=_NORMED)
    file = folder / "modeling_odd.py"
    text = file.read_text()
    for norm in ("norm1", "norm2"):
        made = f"self.{norm} = Norm(config.hidden_size, config.norm_eps)"
        assert made in text
        text = text.replace(made, f"self.{norm} = RMSNorm(config.hidden_size, eps=config.norm_eps)")
    file.write_text(text)
    assert_translated(run_apart(GENERATE, [folder])["odd_summed"])
