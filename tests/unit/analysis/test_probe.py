"""Each probe against modules written here, independently of the canonical ops, in all the ways that
they can differ.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from onboard.analysis.recognise.probe import probe_mlp, probe_norm, probe_rope, probe_rotary
from onboard.analysis.recognise.recorder import FunctionCall


class _Norm(nn.Module):
    def __init__(self, formula: str, size: int = 24) -> None:
        super().__init__()
        self.formula, self.small = formula, 1e-6
        if "weightless" not in formula:
            self.weight = nn.Parameter(torch.randn(size))
        if "bias" in formula:
            self.bias = nn.Parameter(torch.randn(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centre = x - x.mean(-1, keepdim=True) if "layer" in self.formula else x
        out = centre / (centre.square().mean(-1, keepdim=True) + self.small).sqrt()
        if "l2" in self.formula:
            out = x / (x.square().sum(-1, keepdim=True) + self.small).sqrt()
        if "outside" in self.formula:
            out = x / (x.square().mean(-1, keepdim=True).sqrt() + self.small)
        if "weightless" not in self.formula:
            out = out * (1 + self.weight if "offset" in self.formula else self.weight)
        return out + self.bias if "bias" in self.formula else out


@pytest.mark.parametrize(
    ("formula", "kind", "parameters"),
    [
        ("rms", "rmsnorm", {"eps": "small", "unit_offset": False}),
        ("rms offset", "rmsnorm", {"eps": "small", "unit_offset": True}),
        (
            "layer",
            "layernorm",
            {"eps": "small", "per_head": False, "weight": "self.weight", "bias": "None"},
        ),
        (
            "layer bias",
            "layernorm",
            {"eps": "small", "per_head": False, "weight": "self.weight", "bias": "self.bias"},
        ),
        (
            "layer weightless",
            "layernorm",
            {"eps": "small", "per_head": False, "weight": "None", "bias": "None"},
        ),
        ("l2 weightless", "l2norm", {"eps": "small"}),
    ],
)
def test_norms(formula: str, kind: str, parameters: dict[str, object]) -> None:
    finding = probe_norm(_Norm(formula))
    assert finding is not None
    assert (finding.kind, finding.parameters) == (kind, parameters)
    assert "rmse ratio" in finding.evidence[0]


def test_an_epsilon_in_another_place_is_no_known_norm() -> None:
    assert probe_norm(_Norm("rms outside")) is None


def test_a_layer_norm_with_a_weight_for_each_head() -> None:
    module = _Norm("layer")
    module.weight = nn.Parameter(torch.randn(3, 24))
    finding = probe_norm(module)
    assert finding is not None
    assert finding.parameters["per_head"] is True


def test_a_linear_layer_is_no_norm() -> None:
    assert probe_norm(nn.Linear(8, 8)) is None


class _Mlp(nn.Module):
    def __init__(self, kind: str, act: nn.Module) -> None:
        super().__init__()
        self.kind, self.act = kind, act
        self.third, self.first = (
            nn.Linear(12, 20),
            nn.Linear(12, 40 if kind == "gated, fused" else 20),
        )
        self.second = nn.Linear(20, 12)
        if kind != "gated":
            del self.third

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "gated":
            return self.second(self.third(x) * self.act(self.first(x)))
        hidden = self.first(x)
        if self.kind == "gated, fused":
            gate, up = hidden.split(20, dim=-1)
            return self.second(self.act(gate) * up)
        return self.second(self.act(hidden))


@pytest.mark.parametrize("kind", ["gated", "plain", "gated, fused"])
@pytest.mark.parametrize(
    ("name", "act"), [("silu", nn.SiLU()), ("gelu_new", nn.GELU("tanh")), ("relu", nn.ReLU())]
)
def test_mlps(kind: str, name: str, act: nn.Module) -> None:
    config = SimpleNamespace(to_dict=lambda: {"hidden_act": name, "model_type": "x"})
    finding = probe_mlp(_Mlp(kind, act), config)
    assert finding is not None
    assert finding.parameters == {"mlp": kind, "activation": name}


def test_an_activation_that_the_config_does_not_name_is_not_guessed() -> None:
    config = SimpleNamespace(to_dict=lambda: {"hidden_act": "silu"})
    assert probe_mlp(_Mlp("plain", nn.Tanh()), config) is None


def test_cos_and_sin_are_a_rotary_embedding() -> None:
    angles = torch.randn(2, 7, 8)
    assert probe_rotary((angles.cos() * 1.3, angles.sin() * 1.3))
    assert not probe_rotary((angles.cos(), angles.sin() * 1.1))
    assert not probe_rotary((angles, angles.clone()))


def _rotate(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate pairs of channels with a 2 x 2 matrix each, in float64; the rest of the channels
    passes.
    """
    size = 2 * angles.shape[-1]
    out = x.double().clone()
    for pair in range(angles.shape[-1]):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + size // 2)
        cos, sin = angles[:, None, :, pair].cos(), angles[:, None, :, pair].sin()
        out[..., a], out[..., b] = (
            x[..., a] * cos - x[..., b] * sin,
            x[..., a] * sin + x[..., b] * cos,
        )
    return out.float()


@pytest.mark.parametrize("rotary_pairs", [4, 3])
@pytest.mark.parametrize(
    ("interleaved", "repeat", "op"),
    [
        (False, "halves", "torch_rope_with_explicit_cos_sin"),
        (True, "pairs", "torch_rope_with_complex_freqs"),
        (True, "halves", "torch_rope_with_complex_freqs"),
    ],
)
def test_rope(rotary_pairs: int, interleaved: bool, repeat: str, op: str) -> None:
    q, k, angles = (
        torch.randn(2, 4, 5, 8),
        torch.randn(2, 1, 5, 8),
        torch.randn(2, 5, rotary_pairs).double(),
    )
    table = (
        torch.cat((angles, angles), -1) if repeat == "halves" else angles.repeat_interleave(2, -1)
    )
    outputs = [_rotate(x, angles, interleaved) for x in (q, k)]
    finding = probe_rope(
        FunctionCall("rope", [q, k, table.cos().float(), table.sin().float()], outputs)
    )
    assert finding is not None
    places = {"pairs": "side_by_side", "halves": "half_apart"}
    expected = {"op": op, "frequencies": places[repeat]} if interleaved else {"op": op}
    assert finding.parameters == expected


def test_rope_by_tables_with_each_frequency_once() -> None:
    q, k, angles = torch.randn(2, 4, 5, 8), torch.randn(2, 1, 5, 8), torch.randn(2, 5, 4).double()
    tables = [angles.cos().float(), angles.sin().float()]
    for interleaved, found in (
        (False, {"op": "torch_rope_with_explicit_cos_sin", "half_tables": True}),
        (True, None),  # tables of as many numbers would turn half of the channels
    ):
        outputs = [_rotate(x, angles, interleaved) for x in (q, k)]
        finding = probe_rope(FunctionCall("rope", [q, k, *tables], outputs))
        assert (finding and finding.parameters) == found


def test_rope_of_a_function_that_takes_truth_values_besides() -> None:
    q, k, angles = torch.randn(2, 4, 5, 8), torch.randn(2, 1, 5, 8), torch.randn(2, 5, 4).double()
    outputs = [_rotate(x, angles, interleaved=False) for x in (q, k)]
    table = torch.cat((angles, angles), -1)
    given = [q, k, table.cos().float(), table.sin().float()]
    finding = probe_rope(FunctionCall("rope", given, outputs, flags=(False,)))
    op = "torch_rope_with_explicit_cos_sin"
    assert finding is not None
    assert finding.parameters == {"op": op, "flags": (False,)}


@pytest.mark.parametrize("sin_first", [False, True])
@pytest.mark.parametrize("dim", [1, 2])
def test_rope_of_one_tensor(dim: int, sin_first: bool) -> None:
    x, angles = torch.randn(2, 4, 5, 8), torch.randn(2, 5, 3).double()
    turned = _rotate(x, angles, interleaved=True)
    tables = [angles.cos().float(), angles.sin().float()][:: -1 if sin_first else 1]
    given, output = (each if dim == 1 else each.transpose(1, 2) for each in (x, turned))
    finding = probe_rope(FunctionCall("turn", [given, *tables], [output]))
    assert finding is not None
    op = "torch_rope_with_complex_freqs"
    expected = {"op": op, "unsqueeze_dim": dim, "single": True, "sin_first": sin_first}
    assert finding.parameters == expected
    assert probe_rope(FunctionCall("turn", [given, *tables], [output + 0.01])) is None


def test_other_functions_of_four_tensors_are_no_rope() -> None:
    q, cos = torch.randn(2, 4, 5, 8), torch.randn(2, 5, 8)
    assert probe_rope(FunctionCall("f", [q, q, cos, cos], [q + 1, q])) is None


class _Choosy(nn.Module):
    """A norm, or an MLP, that takes one shape of texts, and raises an error for any other."""

    def __init__(self, error: type[Exception], *, linears: bool) -> None:
        super().__init__()
        self.error, self.small = error, 1e-6
        if linears:
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1:] != (5, 8):
            raise self.error("not of mine")
        return x


@pytest.mark.parametrize("error", [AssertionError, KeyError, NotImplementedError, OSError])
def test_what_refuses_a_probes_inputs_is_not_of_its_kind(error: type[Exception]) -> None:
    config = SimpleNamespace(to_dict=dict)
    assert probe_norm(_Choosy(error, linears=False)) is None
    assert probe_mlp(_Choosy(error, linears=True), config) is None
