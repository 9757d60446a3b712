"""What stands in for functions of packages that are not installed computes what these say, each
beside a formula in float64 that is written out number by number.
"""

from __future__ import annotations

import math
import random
from importlib import metadata
from typing import Any

import pytest
import torch

from onboard.errors import OnboardError
from onboard.hf.old import attention_forms as attention
from onboard.hf.old import distributions, packages
from onboard.hf.old import recurrent_forms as recurrent
from onboard.hf.old.layers import norm_forms
from onboard.verify.error import rmse_ratio


@pytest.fixture
def draw() -> Any:
    seed = random.randrange(2**31)
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return drawn


def _near(actual: torch.Tensor, expected: torch.Tensor, within: float = 1e-6) -> None:
    assert actual.shape == expected.shape
    assert rmse_ratio(actual, expected) < within


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sees: Any, bias: Any = None
) -> torch.Tensor:
    """Return attention [batch, queries, heads, size], one query of one head after the other."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            kv = h * k.shape[2] // q.shape[2]
            for i in range(q.shape[1]):
                keys = [j for j in range(k.shape[1]) if sees(i, j)]
                scores = [float(q[b, i, h] @ k[b, j, kv]) * scale for j in keys]
                scores = [
                    s + (bias(h, i, j) if bias else 0.0) for s, j in zip(scores, keys, strict=True)
                ]
                total = sum(math.exp(s) for s in scores)
                for s, j in zip(scores, keys, strict=True):
                    out[b, i, h] += v[b, j, kv] * (math.exp(s) / total)
    return out


def test_flash_attention_is_attention(draw: Any) -> None:
    q, k, v = draw(2, 4, 4, 6), draw(2, 7, 2, 6), draw(2, 7, 2, 6)
    usual = 6**-0.5
    # The last query is as far as the last key.
    _near(
        attention.flash_attn_func(q, k, v, causal=True),
        _attention(q, k, v, usual, lambda i, j: j <= i + 3),
    )
    _near(
        attention.flash_attn_func(q, k, v, softmax_scale=0.7),
        _attention(q, k, v, 0.7, lambda i, j: True),
    )
    _near(
        attention.flash_attn_func(q, k, v, causal=True, window_size=(2, 0)),
        _attention(q, k, v, usual, lambda i, j: i + 3 - 2 <= j <= i + 3),
    )
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    _near(
        attention.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes),
        _attention(
            q, k, v, usual, lambda i, j: j <= i + 3, lambda h, i, j: -float(slopes[h]) * (i + 3 - j)
        ),
    )
    kv = torch.stack((k, v), dim=2)
    packed = attention.flash_attn_kvpacked_func(q, kv, causal=True)
    _near(packed, attention.flash_attn_func(q, k, v, causal=True), 1e-12)


def test_a_soft_cap_bounds_scores(draw: Any) -> None:
    q, k, v = draw(1, 3, 1, 4), draw(1, 3, 1, 4), draw(1, 3, 1, 4)
    scores = torch.tanh(torch.einsum("bihd,bjhd->bhij", q, k) * 0.5 / 1.5) * 1.5
    expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    _near(attention.flash_attn_func(q, k, v, softcap=1.5), expected)


def test_texts_one_after_the_other_see_themselves_alone(draw: Any) -> None:
    q, k, v = (draw(9, 2, 4) for _ in range(3))
    ends = torch.tensor([0, 2, 6, 9], dtype=torch.int32)
    out = attention.flash_attn_varlen_func(q, k, v, ends, ends, 4, 4, causal=True)
    for a, b in ((0, 2), (2, 6), (6, 9)):
        whole = _attention(q[None, a:b], k[None, a:b], v[None, a:b], 0.5, lambda i, j: j <= i)
        _near(out[a:b], whole[0])


def test_texts_of_one_length_are_a_batch(draw: Any) -> None:
    q, k, v = draw(6, 4, 4), draw(10, 2, 4), draw(10, 2, 4)
    ends = (torch.tensor([0, 3, 6]), torch.tensor([0, 5, 10]))
    out = attention.flash_attn_varlen_func(q, k, v, *ends, 3, 5, softmax_scale=0.7, causal=True)
    for text in range(2):
        rows, seen = slice(3 * text, 3 * text + 3), slice(5 * text, 5 * text + 5)
        own = (q[None, rows], k[None, seen], v[None, seen])
        _near(out[rows], _attention(*own, 0.7, lambda i, j: j <= i + 2)[0])


def test_padding_goes_and_comes_back(draw: Any) -> None:
    states, mask = draw(2, 4, 3), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    tokens, places, ends, longest = attention.unpad_input(states, mask)
    assert torch.equal(tokens, torch.cat((states[0, :2], states[1])))
    assert (ends.tolist(), longest) == ([0, 2, 6], 4)
    assert torch.equal(attention.index_first_axis(states.flatten(0, 1), places), tokens)
    back = attention.pad_input(tokens, places, 2, 4)
    assert torch.equal(back, states * mask.unsqueeze(-1))


@pytest.mark.parametrize("interleaved", [False, True])
def test_channels_turn(interleaved: bool, draw: Any) -> None:
    x, angles = draw(1, 5, 2, 8), draw(6, 3)
    expected = x.clone()
    for s in range(5):
        for c in range(3):
            first, second = (2 * c, 2 * c + 1) if interleaved else (c, c + 3)
            cos, sin = math.cos(angles[s, c]), math.sin(angles[s, c])
            a, b = x[0, s, :, first], x[0, s, :, second]
            expected[0, s, :, first], expected[0, s, :, second] = (
                a * cos - b * sin,
                a * sin + b * cos,
            )
    _near(attention.apply_rotary_emb(x, angles.cos(), angles.sin(), interleaved), expected)


def test_norms_and_xformers(draw: Any) -> None:
    x, weight = draw(2, 3, 4), draw(4)
    mean = torch.tensor([[[float((row**2).sum()) / 4] for row in rows] for rows in x])
    _near(norm_forms.rms_norm(x, weight, 0.1), x / (mean.double() + 0.1).sqrt() * weight)
    norm = norm_forms.RMSNorm(4, eps=0.1)
    assert torch.equal(norm(x), norm_forms.rms_norm(x, torch.ones(4), 0.1))
    q, k, v = draw(1, 5, 2, 4), draw(1, 5, 2, 4), draw(1, 5, 2, 4)
    causal = attention.memory_efficient_attention(q, k, v, attention.LowerTriangularMask())
    _near(causal, _attention(q, k, v, 0.5, lambda i, j: j <= i))
    bias = draw(1, 2, 5, 5)
    added = attention.memory_efficient_attention(q, k, v, bias, scale=0.3)
    told = _attention(q, k, v, 0.3, lambda i, j: True, lambda h, i, j: float(bias[0, h, i, j]))
    _near(added, told)


def test_norms_take_the_residual_stream_in(draw: Any) -> None:
    x, stream, weight, bias = draw(3, 5), draw(3, 5), draw(5), draw(5)
    total = x + stream
    out, kept = norm_forms.layer_norm_fn(x, weight, bias, stream, eps=0.1, prenorm=True)
    _near(out, torch.nn.functional.layer_norm(total, (5,), weight, bias, 0.1))
    _near(kept, total)
    alone = norm_forms.rms_norm_fn(x, weight, bias, eps=0.1)
    _near(alone, x / (x.pow(2).mean(-1, keepdim=True) + 0.1).sqrt() * weight + bias)
    half = [item.half() for item in (x, weight, bias, stream)]
    _, wide = norm_forms.rms_norm_fn(*half, prenorm=True, residual_in_fp32=True)
    assert torch.equal(wide, half[0].float() + half[3].float())


def test_convolutions_see_what_was(draw: Any) -> None:
    x, weight, bias = draw(2, 3, 7), draw(3, 4), draw(3)
    expected = torch.zeros_like(x)
    for i in range(7):
        expected[:, :, i] = bias
        for back in range(4):
            if i - back >= 0:
                expected[:, :, i] += x[:, :, i - back] * weight[:, 3 - back]
    _near(recurrent.causal_conv1d_fn(x, weight, bias), expected, 1e-12)
    silu = expected / (1 + torch.exp(-expected))
    _near(recurrent.causal_conv1d_fn(x, weight, bias, activation="silu"), silu, 1e-12)
    state = torch.zeros(2, 3, 4, dtype=x.dtype)
    steps = [
        recurrent.causal_conv1d_update(x[:, :, i], state, weight, bias, "silu") for i in range(7)
    ]
    _near(torch.stack(steps, dim=-1), silu, 1e-12)
    assert torch.equal(state, x[:, :, -4:])
    first, kept = recurrent.causal_conv1d_fn(x[:, :, :4], weight, bias, return_final_states=True)
    rest = recurrent.causal_conv1d_fn(x[:, :, 4:], weight, bias, initial_states=kept)
    _near(torch.cat((first, rest), dim=-1), expected, 1e-12)


def test_the_selective_scan_is_its_recurrence(draw: Any) -> None:
    u, delta, z = draw(2, 3, 5), draw(2, 3, 5), draw(2, 3, 5)
    a, b, c, d, bias = -draw(3, 4).abs(), draw(2, 4, 5), draw(2, 4, 5), draw(3), draw(3)
    expected = torch.zeros_like(u)
    states = torch.zeros(2, 3, 4, dtype=u.dtype)
    for n in range(2):
        for channel in range(3):
            for i in range(5):
                step = math.log1p(math.exp(float(delta[n, channel, i] + bias[channel])))
                total = 0.0
                for s in range(4):
                    state = math.exp(step * float(a[channel, s])) * float(states[n, channel, s])
                    state += step * float(b[n, s, i] * u[n, channel, i])
                    states[n, channel, s] = state
                    total += state * float(c[n, s, i])
                gate = float(z[n, channel, i])
                total += float(d[channel] * u[n, channel, i])
                expected[n, channel, i] = total * gate / (1 + math.exp(-gate))
    out, last = recurrent.selective_scan_fn(u, delta, a, b, c, d, z, bias, True, True)
    _near(out, expected, 1e-12)
    _near(last, states, 1e-12)


def test_the_scan_of_mamba_2_is_its_recurrence(draw: Any) -> None:
    x, dt, a = draw(2, 6, 4, 3), draw(2, 6, 4), -draw(4).abs()
    b, c, d, bias = draw(2, 6, 2, 5), draw(2, 6, 2, 5), draw(4), draw(4)
    expected = torch.zeros_like(x)
    for n in range(2):
        for h in range(4):
            state = torch.zeros(3, 5, dtype=x.dtype)
            for i in range(6):
                step = math.log1p(math.exp(float(dt[n, i, h] + bias[h])))
                step = min(max(step, 0.2), 1.1)
                state = state * math.exp(step * float(a[h]))
                state = state + step * torch.outer(x[n, i, h], b[n, i, h // 2])
                expected[n, i, h] = state @ c[n, i, h // 2] + d[h] * x[n, i, h]
    settings = {"D": d, "dt_bias": bias, "dt_softplus": True, "dt_limit": (0.2, 1.1)}
    _near(recurrent.mamba_chunk_scan_combined(x, dt, a, b, c, 4, **settings), expected, 1e-12)


def test_what_has_no_form_names_all_packages_that_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packages._FINDER, "packages", {"einops"})
    absent = packages._Absent("mamba_ssm.ops.selective_scan_interface")
    unknown = absent.mamba_inner_fn
    packages.stand_in("mamba_ssm")
    packages.stand_in("causal_conv1d.cpp")
    with pytest.raises(OnboardError, match="mamba_inner_fn, which is not here") as refused:
        unknown(1)
    assert refused.value.hint == "pip install causal-conv1d mamba-ssm"
    packages.stand_in("fla.ops")
    with pytest.raises(OnboardError) as refused:
        unknown(1)
    assert refused.value.hint is not None
    assert "flash-linear-attention" in refused.value.hint
    packages.stand_in("skimage.io")
    with pytest.raises(OnboardError) as refused:
        unknown(1)
    assert str(refused.value.hint).endswith(" scikit-image")  # its name where packages are
    assert absent.selective_scan_fn is recurrent.selective_scan_fn


@pytest.mark.parametrize("first", [True, False])
def test_groups_of_channels_are_normalised_with_a_gate(first: bool, draw: Any) -> None:
    x, z, weight = draw(2, 3, 8), draw(2, 3, 8), draw(8)
    gate = [[[v / (1 + math.exp(-v)) for v in row] for row in text] for text in z.tolist()]
    expected = torch.zeros_like(x)
    for b in range(2):
        for s in range(3):
            states = [float(x[b, s, c]) * (1.0 if first else gate[b][s][c]) for c in range(8)]
            for start in (0, 4):
                group = states[start : start + 4]
                size = math.sqrt(sum(v * v for v in group) / 4 + 0.01)
                for c in range(start, start + 4):
                    value = states[c] / size * float(weight[c])
                    expected[b, s, c] = value * (gate[b][s][c] if first else 1.0)
    given = {"z": z, "eps": 0.01, "group_size": 4, "norm_before_gate": first}
    _near(recurrent.rmsnorm_fn(x, weight, **given), expected)
    plain = x / (x.square().mean(-1, keepdim=True) + 0.01).sqrt() * weight + 1.0
    _near(recurrent.rmsnorm_fn(x, weight, torch.ones(8), eps=0.01), plain)


def test_what_is_installed_is_told_without_pkg_resources() -> None:
    forms = {name.rpartition(".")[2]: form for name, form in distributions.FORMS.items()}
    parse, found = forms["parse_version"], forms["get_distribution"]("torch")
    assert found.version == metadata.version("torch")
    assert parse("2.9") < parse("2.10.1") < found.parsed_version < parse("99")
    with pytest.raises(forms["DistributionNotFound"], match="no_such_package"):
        forms["get_distribution"]("no_such_package")
