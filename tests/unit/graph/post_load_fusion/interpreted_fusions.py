"""Fusions on the triton back end. Run by test_fuse_triton.py in a process with
TRITON_INTERPRET=1.
"""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments
from onboard.graph.weight_load.parameters import move_buffers
from tests.support.drawing import some_of
from tests.support.graph.fusion import apply, exported, random_state, targets
from tests.support.graph.harness import rmse

ops = torch.ops.onboard


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return ops.torch_rmsnorm(x, self.weight, 1e-5)


class Layer(nn.Module):
    """Norms, q and k with a rotation, a matched and an unmatched gated block."""

    def __init__(self, activation: str, unsqueeze_dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm() for _ in range(2))
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 8)
        self.gate, self.up, self.down = nn.Linear(16, 12), nn.Linear(16, 12), nn.Linear(12, 16)
        self.gate_up = nn.Linear(16, 24)
        self.register_buffer("angles", torch.randn(64, 8), persistent=False)
        self.activation, self.unsqueeze_dim = activation, unsqueeze_dim

    def forward(self, x):
        batch, length, _ = x.shape
        angles = self.angles[:length][None].expand(batch, length, 8)
        hidden = self.norms[0](x)
        q, k = self.q(hidden).view(batch, length, 2, 8), self.k(hidden).view(batch, length, 1, 8)
        q, k = (t if self.unsqueeze_dim == 2 else t.transpose(1, 2) for t in (q, k))
        q, k = ops.torch_rope_with_explicit_cos_sin(
            q, k, angles.cos(), angles.sin(), self.unsqueeze_dim
        )
        q, k = (t if self.unsqueeze_dim == 2 else t.transpose(1, 2) for t in (q, k))
        x = x + (q * k).flatten(2)
        hidden = self.norms[1](x)
        gate, up, down = self.gate, self.up, self.down
        mlp = ops.torch_swiglu_mlp(
            hidden,
            gate.weight,
            up.weight,
            down.weight,
            gate.bias,
            up.bias,
            down.bias,
            self.activation,
        )
        first, second = self.gate_up(x + mlp).chunk(2, -1)
        return F.silu(first) * second


@pytest.fixture
def on_gpu(tmp_path) -> TransformContext:
    """A context that asks for the GPU's back ends; the interpreter runs them here."""
    from tests.support.graph.fusion import context_for

    context = context_for(tmp_path)
    context.device = torch.device("cuda")
    return context


class NormedHeads(nn.Module):
    """Two rotations; the heads of the first are normalised, those of the second by norms of two
    kinds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ParameterList(torch.randn(8) for _ in range(4))

    def forward(self, x):
        batch, length, _ = x.shape
        angles = x[..., :8]
        for first, second, eps in ((0, 1, 1e-5), (2, 3, 1e-3)):
            q, k = x.reshape(batch, length, 3, 8).split([2, 1], 2)
            q = ops.torch_rmsnorm(q, self.norms[first], 1e-5)
            k = ops.torch_rmsnorm(k, self.norms[second], eps)
            x = torch.cat(
                ops.torch_rope_with_explicit_cos_sin(q, k, angles.cos(), angles.sin(), 2), 2
            ).flatten(2)
        return x


def test_norms_of_one_kind_join_the_rotation(on_gpu):
    model, x = NormedHeads(), torch.randn(2, 3, 24)
    gm = exported(model, 2, 3, 24, device="cpu")
    gm, info, _ = apply("optimize_rope", gm, on_gpu)
    assert info.num_matches == 2
    assert [targets(gm).count(f"onboard.{op}.default") for op in NORM_ROPE] == [1, 1, 2]
    assert rmse(gm(x), model(x).detach()) <= 1e-5


NORM_ROPE = ("triton_norm_rope", "triton_rope_cached", "torch_rmsnorm")


def _case(activation: str = "gelu", unsqueeze_dim: int = 2):
    model = Layer(activation, unsqueeze_dim)
    model.load_state_dict(random_state(model, random.randrange(10**6)), strict=False)
    x = torch.randn(2, 3, 16)
    gm = exported(model, 2, 3, 16, device="cpu")
    move_buffers(gm, torch.device("cpu"))
    return gm, x, model(x).detach()


EXPECTED = {
    "fuse_rmsnorm": (2, "triton_rmsnorm"),
    "fuse_add_rms_norm": (1, "triton_fused_add_rmsnorm"),
    "fuse_swiglu": (1, "triton_fused_swiglu_mlp"),
    "fuse_silu_mul": (1, "triton_silu_and_mul"),
    "optimize_rope": (1, "triton_rope_cached"),
}


def test_every_fusion_uses_its_kernel_and_keeps_the_result(on_gpu):
    gm, x, expected = _case()
    apply("fuse_gemms", gm)
    for key, (matches, op) in EXPECTED.items():
        fields = {"rmsnorm_backend": "triton"} if key == "fuse_rmsnorm" else {}
        fields |= {"backend": "triton"} if key == "fuse_silu_mul" else {}
        gm, info, _ = apply(key, gm, on_gpu, shapes=key == "fuse_rmsnorm", **fields)
        assert info.num_matches == matches, key
        assert f"onboard.{op}.default" in targets(gm)
        assert rmse(gm(x), expected) <= 1e-6, key
    assert not any("torch_" in target for target in targets(gm))
    assert not on_gpu.facts


class Rotations(nn.Module):
    """Rotations of pairs of channels: complex, and de-interleaving; both of a part of each head."""

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, angle = (
            x[..., :30].view(batch, length, 3, 10),
            x[..., 30:40].view(batch, length, 1, 10),
            x[..., 40:43],
        )
        q, k = ops.torch_rope_with_complex_freqs(
            q, k, torch.polar(torch.ones_like(angle), angle), 2
        )
        both = torch.cat([angle, angle], -1)
        return torch.cat(ops.torch_rope_with_qk_interleaving(q, k, both.cos(), both.sin(), 2), 2)


def test_rotations_of_pairs_use_the_kernel(on_gpu):
    gm, x = exported(Rotations(), 2, 3, 44, device="cpu"), torch.randn(2, 4, 44)
    gm, info, _ = apply("optimize_rope", gm, on_gpu)
    assert info.num_matches == 2
    assert not on_gpu.facts
    assert [
        targets(gm).count(f"onboard.triton_rope_{form}.default")
        for form in ("pairs", "deinterleaved")
    ] == [1, 1]
    assert rmse(gm(x), Rotations()(x)) <= 1e-6


def test_a_rotation_in_float64_stays_and_is_a_fact(on_gpu):
    gm = exported(Rotations(), 2, 3, 44, device="cpu", dtype=torch.float64)
    gm, info, _ = apply("optimize_rope", gm, on_gpu)
    assert info.num_matches == 0
    assert "2 rotations have no fused kernel" in on_gpu.facts[0]


def test_lengths_and_gates_use_their_kernels(on_gpu):
    from tests.unit.graph.post_load_fusion.test_fuse_gdn_gating import _case as gated
    from tests.unit.graph.post_load_fusion.test_fuse_l2norm import Lengths

    gm, _, _ = apply("match_l2norm_pattern", exported(Lengths(), 2, 3, 16, device="cpu"))
    gm, info, _ = apply("fuse_l2norm", gm, on_gpu, backend="auto")
    assert (info.num_matches, targets(gm).count("onboard.triton_l2norm.default")) == (2, 2)
    x = torch.randn(2, 4, 16)
    assert rmse(gm(x), Lengths()(x)) <= 1e-6
    gm, x = gated("twice")
    expected = gm(x)
    gm, info, _ = apply("fuse_gdn_gating", gm, on_gpu)
    assert (info.num_matches, targets(gm).count("onboard.triton_fused_gdn_gating.default")) == (
        1,
        1,
    )
    assert rmse(gm(x), expected) <= 1e-6
    assert on_gpu.facts == []


@pytest.mark.parametrize("second_reader", [True, False])
def test_a_sum_that_is_cast_joins_its_norm(on_gpu, second_reader):
    from tests.unit.graph.post_load_fusion.test_fuse_rmsnorm import Wide, exact_wide

    model = Wide(torch.float16, second_reader)
    model.load_state_dict(random_state(model, random.randrange(10**6)))
    gm, _, _ = apply("cleanup_input_constraints", exported(model, 2, 3, 8, device="cpu"))
    gm, _, _ = apply("fuse_rmsnorm", gm, on_gpu, rmsnorm_backend="triton")
    gm, info, _ = apply("fuse_add_rms_norm", gm, on_gpu)
    assert info.num_matches == 2
    assert targets(gm).count("onboard.triton_fused_add_rmsnorm.default") == 2
    x = torch.randn(2, 5, 8)
    assert rmse(gm(x), exact_wide(model, x, torch.float16)) <= 1e-3


def test_a_rotation_in_another_layout_stays_and_is_a_fact(on_gpu):
    gm, x, expected = _case(unsqueeze_dim=1)
    gm, info, _ = apply("optimize_rope", gm, on_gpu)
    assert info.num_matches == 0
    assert "1 rotations have no fused kernel" in on_gpu.facts[0]
    assert rmse(gm(x), expected) <= 1e-6


def test_an_activation_without_a_kernel_stays_on_torch_and_is_a_fact(on_gpu):
    gm, x, expected = _case(activation="tanh")
    gm, info, _ = apply("fuse_swiglu", gm, on_gpu)
    assert info.num_matches == 1
    assert "onboard.torch_fused_swiglu_mlp.default" in targets(gm)
    assert on_gpu.facts == ["fuse_swiglu: activation tanh has no kernel, torch is used"]
    assert rmse(gm(x), expected) <= 1e-6


def test_an_explicit_triton_back_end_is_used_where_it_runs():
    gm, x, expected = _case()
    gm, _, context = apply("fuse_rmsnorm", gm, rmsnorm_backend="triton")
    assert not context.facts
    assert targets(gm).count("onboard.triton_rmsnorm.default") == 2
    assert rmse(gm(x), expected) <= 1e-6


class Gated(nn.Module):
    """A gated norm in float32 with a cast behind it, and one without; a constant that is computed
    from a weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.decay = nn.Parameter(torch.zeros(16))

    def forward(self, x):
        x = x * -self.decay.exp()
        both = ops.torch_rmsnorm_gated(x, self.weight, x.tanh(), 1e-5, 8)
        return ops.torch_rmsnorm_gated(x, self.weight, None, 1e-5, 16).double() + both.to(
            torch.float64
        )


def test_gated_norms_take_the_cast_behind_them(on_gpu):
    model = Gated()
    model.load_state_dict(random_state(model, random.randrange(10**6)))
    gm, _, _ = apply("cleanup_input_constraints", exported(model, 2, 3, 16, device="cpu"))
    gm, info, _ = apply("fuse_rmsnorm", gm, on_gpu)
    assert info.num_matches == 2
    assert targets(gm).count("onboard.triton_fused_rmsnorm_gated.default") == 2
    assert not any(target.startswith(("to.", "_to_copy")) for target in targets(gm))
    x = torch.randn(2, 3, 16)
    assert rmse(gm(x), model(x)) <= 1e-6


def test_mixtures_and_routers_use_the_kernels(on_gpu):
    from tests.unit.graph.pattern_matcher.test_match_moe_routing import Model, biased
    from tests.unit.graph.post_load_fusion.test_fuse_moe import HIDDEN, Mixture

    for model in (Mixture(bias=True), Model(biased)):
        model.load_state_dict(random_state(model, random.randrange(10**6)), strict=False)
        gm, _, _ = apply("match_moe_routing_pattern", exported(model, 2, 3, HIDDEN, device="cpu"))
        gm, info, context = apply("fuse_moe", gm, on_gpu)
        assert info.num_matches == 1
        assert context.facts == []
        assert "onboard.triton_moe_fused.default" in targets(gm)
        x = torch.randn(2, 4, HIDDEN)
        assert rmse(gm(x), model(x)) <= 1e-6
    assert "onboard.triton_moe_router.default" in targets(gm)


@pytest.mark.parametrize("shared", [False, True])
def test_a_mixture_adds_what_is_there_before_it(shared, on_gpu):
    """A layer's hidden states, but not what shared experts bring, which are computed beside it."""
    from tests.unit.graph.post_load_fusion.test_fuse_moe import HIDDEN, Mixture

    class Around(Mixture):
        def __init__(self):
            super().__init__()
            self.shared = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x):
            return super().forward(x) + (self.shared(x) if shared else x)

    model = Around()
    gm, _, _ = apply("fuse_moe", exported(model, 2, 3, HIDDEN, device="cpu"), on_gpu)
    assert any(target.startswith("add") for target in targets(gm)) == shared
    x = torch.randn(2, 4, HIDDEN)
    assert rmse(gm(x), model(x)) <= 1e-6


CODED = {
    "ct_fp8_qwen3_moe": "fp8_moe",
    "hf_fp8_qwen3_moe": "finegrained_fp8_moe",
    "ct_w8a8_qwen3_moe": "int8_moe",
    "ct_w4a16_qwen3_moe": "int4_moe",
    "mxfp4_gpt_oss": "mxfp4_moe",
    "modelopt_nvfp4_qwen3_moe": "nvfp4_moe",
}


@pytest.mark.parametrize("variant", some_of(CODED, always=("mxfp4_gpt_oss",), by_chance=2))
def test_mixtures_with_codes_use_the_kernels(variant, tmp_path, monkeypatch):
    """With exact inputs: the interpreter's conversion to float8 cuts numbers off."""
    from onboard.graph.weight_load.experts import quantised_mixtures
    from tests.support import quantised
    from tests.unit.graph.weight_load.test_quantised_mixtures import error, model

    monkeypatch.setattr(quantised_mixtures, "how_inputs_are_quantised", lambda _: "")
    folder, op = quantised.FOLDER / variant, CODED[variant]
    ids = [3, 1, 4]
    key, codes = f"fuse_{op}", (f"quantize_{op}_from_config",)
    expected = model(folder, codes)
    fused = model(folder, codes, transforms={key: {"backend": "triton"}})
    assert [entry.num_matches > 0 for entry in fused.engine.history if entry.key == key] == [True]
    assert f"onboard.triton_{op}.default" in targets(fused.engine.gm)
    mixtures = [node for node in fused.engine.gm.graph.nodes if f"_{op}" in str(node.target)]
    assert mixtures
    assert all(arguments(node)["residual"] is not None for node in mixtures)
    assert error(fused.logits(ids), expected.logits(ids)) < 1e-5
