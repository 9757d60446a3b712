"""Linears that take in what stands around them. Run by test_fuse_triton.py in a process with
TRITON_INTERPRET=1.
"""

import random

import pytest
import torch
from torch import nn

from onboard.errors import OnboardError
from onboard.graph.fx import nodes_of
from tests.support.graph.fusion import apply, context_for, exported, random_state, targets
from tests.support.graph.harness import rmse
from tests.support.ops import four_bits

ops = torch.ops.onboard
FUSED = "onboard.triton_fused_linear.default"


@pytest.fixture
def on_gpu(tmp_path):
    """A context that asks for the GPU's back ends; the interpreter runs them here."""
    context = context_for(tmp_path)
    context.device, context.dtype = torch.device("cuda"), torch.bfloat16
    return context


class Norm(nn.Module):
    def __init__(self, size=32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return ops.torch_rmsnorm(x, self.weight, 1e-3)


class Layers(nn.Module):
    """A layer in sequence, one in parallel that shares a norm, and a head that scales."""

    def __init__(self, activation: str = "silu") -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm() for _ in range(4))
        self.mixer, self.gate_up, self.shared = (
            nn.Linear(32, 32),
            nn.Linear(32, 128),
            nn.Linear(32, 32, bias=False),
        )
        self.up, self.down, self.head = (
            nn.Linear(32, 64),
            nn.Linear(64, 32, bias=False),
            nn.Linear(32, 40),
        )
        self.activation = activation

    def forward(self, x):
        x = x + self.mixer(self.norms[0](x))
        weights = self.gate_up.weight, self.down.weight, self.gate_up.bias
        x = ops.torch_fused_swiglu_mlp(self.norms[1](x), *weights, None, self.activation) + x
        y = self.norms[2](x)
        x = x + self.shared(y) + self.down(ops.torch_silu_and_mul(self.gate_up(y))) * 2
        return self.head(self.norms[3](x)) * 0.5


def _case(dtype=torch.bfloat16, activation="silu"):
    model = Layers(activation).to(dtype)
    model.load_state_dict(
        {k: v.to(dtype) for k, v in random_state(model, random.randrange(10**6)).items()}
    )
    x = torch.randn(2, 3, 32).to(dtype)
    expected = model.double()(x.double()).detach()
    return exported(model.to(dtype), 2, 3, 32, device="cpu", dtype=dtype), x, expected


def _arguments(gm, name):
    """The values of one argument of every fused linear, in order."""
    names = [argument.name for argument in ops.triton_fused_linear.default._schema.arguments]
    nodes = [node for node in gm.graph.nodes if node.target is ops.triton_fused_linear.default]
    return [node.args[names.index(name)] for node in nodes]


def test_linears_take_in_norms_gates_and_sums(on_gpu):
    gm, x, expected = _case()
    gm, info, _ = apply("fuse_linears", gm, on_gpu)
    assert info.num_matches == targets(gm).count(FUSED) == 7
    assert [bool(each) for each in _arguments(gm, "norm_weight")] == [
        True,
        True,
        False,
        False,
        False,
        False,
        True,
    ]
    assert [bool(each) for each in _arguments(gm, "residual")] == [
        True,
        False,
        True,
        True,
        False,
        False,
        False,
    ]
    assert _arguments(gm, "activation") == ["", "silu", "", "", "silu", "", ""]
    assert targets(gm).count("add.Tensor") == 1  # what is added is scaled first
    assert targets(gm).count("onboard.torch_rmsnorm.default") == 1  # two linears read it
    assert rmse(gm(x).double(), expected) <= 2e-2
    assert not on_gpu.facts


class WideSum(nn.Module):
    """A layer whose residual stream is float32, as Mamba 2's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.mixer, self.up = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        total = x.float() + self.mixer(x)
        return self.up(self.norm(total.to(x.dtype))).float() + total


def test_the_norm_of_a_wider_sum_is_fused_with_the_sum(on_gpu):
    model = WideSum().bfloat16()
    x = torch.randn(2, 3, 32).bfloat16()
    expected = model.double()(x.double())
    gm = exported(model.bfloat16(), 2, 3, 32, device="cpu", dtype=torch.bfloat16)
    for node in nodes_of(gm, torch.ops.aten._assert_tensor_metadata):
        gm.graph.erase_node(node)
    gm, _, _ = apply("fuse_linears", gm, on_gpu)
    assert _arguments(gm, "norm_weight") == [None, None]
    gm, info, _ = apply("fuse_add_rms_norm", gm, on_gpu)
    assert info.num_matches == 1
    assert rmse(gm(x).double(), expected.double()) <= 2e-2


def test_an_activation_without_a_kernel_keeps_its_block(on_gpu):
    gm, x, expected = _case(activation="tanh")
    gm, info, _ = apply("fuse_linears", gm, on_gpu)
    assert info.num_matches == 5
    assert targets(gm).count("onboard.torch_fused_swiglu_mlp.default") == 1
    assert rmse(gm(x).double(), expected) <= 2e-2


def test_float32_stays_the_librarys(on_gpu):
    gm, x, expected = _case(torch.float32)
    gm, info, _ = apply("fuse_linears", gm, on_gpu)
    assert info.num_matches == 0
    assert rmse(gm(x).double(), expected) <= 1e-5


def test_a_batch_invariant_graph_has_no_other_products(on_gpu):
    on_gpu.runtime = on_gpu.runtime.model_copy(update={"batch_invariant": True})
    gm, x, expected = _case(torch.float32)
    before = gm(x)
    for key in ("fuse_rmsnorm", "fuse_silu_mul", "fuse_linears"):
        gm, info, _ = apply(key, gm, on_gpu)
    gm, info, _ = apply("make_batch_invariant", gm, on_gpu)
    assert info.num_matches == targets(gm).count("onboard.invariant_fused_linear.default") == 7
    assert gm.code.count("ops.onboard.invariant_fused_linear") == 7
    assert rmse(gm(x), expected) < 1e-6
    assert rmse(before, expected) < 1e-6


def test_a_product_without_an_invariant_form_is_refused(on_gpu):
    gm, _, _ = _case()
    on_gpu.runtime = on_gpu.runtime.model_copy(update={"batch_invariant": True})
    with pytest.raises(
        OnboardError,
        match="batch_invariant: the graph has aten.linear.default, onboard.torch_fused",
    ):
        apply("make_batch_invariant", gm, on_gpu)


class Coded(nn.Module):
    """A gated block and what is behind it, in codes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.op = getattr(ops, f"torch_{kind}_linear")
        self.norm = Norm(64)
        self.up, self.down = (self.linear(kind, *sizes) for sizes in ((256, 64), (64, 128)))

    @staticmethod
    def linear(kind, outputs, inputs):
        if "fp8" in kind:
            weight = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
            scale = torch.rand(-(-outputs // 128), 1) if "fine" in kind else torch.rand(outputs)
            tensors = weight, scale / 20
        else:
            coded = four_bits.weight(kind, outputs, inputs, 16)
            tensors = coded.words, coded.scale, coded.whole * 10
        return nn.ParameterList(nn.Parameter(each, requires_grad=False) for each in tensors)

    def call(self, x, weight, scale, *whole):
        return self.op(x, weight, None, scale, *((None, whole[0]) if whole else ()))

    def forward(self, x):
        y = ops.torch_silu_and_mul(self.call(self.norm(x), *self.up))
        return x + self.call(y, *self.down)


@pytest.mark.drawn
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", ["fp8", "finegrained_fp8", "nvfp4"])
def test_linears_with_codes_take_in_what_stands_around_them(on_gpu, kind, own):
    """Also where their own transform has made them kernels before."""
    print(f"seed {(seed := random.randrange(10**6))}")
    torch.manual_seed(seed)
    gm = exported(Coded(kind), 2, 3, 64, device="cpu", dtype=torch.bfloat16)
    gm.norm.weight.data = gm.norm.weight.data.bfloat16()
    x = torch.randn(2, 3, 64).bfloat16()
    before = gm(x)
    form = f"onboard.triton_fused_{'four_bit' if kind == 'nvfp4' else 'fp8'}_linear.default"
    if own:
        gm, info, _ = apply(f"fuse_{kind}_linear", gm, on_gpu, backend="auto")
        assert info.num_matches == targets(gm).count(form) == 2
    gm, info, _ = apply("fuse_linears", gm, on_gpu)
    assert info.num_matches == 2
    assert targets(gm) == [form] * 2
    assert rmse(gm(x).float(), before.float()) < 3e-2
    assert not on_gpu.facts
