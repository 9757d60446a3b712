"""Linears that share an input become one product: before loading through the plan alone, after it
group by group.
"""

import gc
import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import onboard.ops  # noqa: F401
from onboard.graph.weight_load.gemm_fusion import private_parameters
from onboard.graph.weight_load.parameters import Part, WeightPlan, joined_name, weight_plan
from onboard.graph.weight_load.safetensors_folder import Checkpoint
from tests.support.graph.fusion import apply, context_for, exported, random_state, targets
from tests.support.graph.harness import rmse


class Attention(nn.Module):
    """q (biased), k (biased when asked), v (no bias); views and transposes after the linears, as
    models have them.
    """

    def __init__(self, *, simple: bool = False, k_bias: bool = True) -> None:
        super().__init__()
        self.attn = nn.Module()
        self.attn.q_proj = nn.Linear(8, 12)
        self.attn.k_proj = nn.Linear(8, 4, bias=k_bias)
        self.attn.v_proj = nn.Linear(8, 4, bias=False)
        self.attn.o_proj = nn.Linear(12, 8)
        self.simple = simple

    def project(self, layer, x):
        return (
            torch.ops.onboard.torch_linear_simple(x, layer.weight, layer.bias)
            if self.simple
            else layer(x)
        )

    def forward(self, x):
        batch, length, _ = x.shape
        x = x.tanh()
        q, k, v = (
            self.project(layer, x)
            for layer in (self.attn.q_proj, self.attn.k_proj, self.attn.v_proj)
        )
        q = q.view(batch, length, 3, 4).view(batch, length * 3, 4).view(batch, length, 3, 4)
        k, v = (t.view(batch, length, 1, 4).transpose(1, 2) for t in (k, v))
        scores = (q.transpose(1, 2) @ k.transpose(2, 3)).softmax(-1)
        return self.attn.o_proj((scores @ v).transpose(1, 2).reshape(batch, length, 12)).abs()


def _case(model: nn.Module, *, loaded: bool, folder: Path, key: str = "fuse_gemms"):
    state = random_state(model, random.randrange(10**6))
    model.load_state_dict(state, strict=False)
    x = torch.randn(2, 3, 8)
    expected = model(x).detach()
    gm = exported(model, 2, 3, 8, device="cpu" if loaded else "meta")
    gm, info, _ = apply(key, gm)
    if not loaded:
        gm, _, _ = apply("load_weights", gm, context_for(folder, state))
    assert rmse(gm(x), expected) <= 1e-6
    assert rmse(gm(x[:1].repeat(5, 4, 1)), model(x[:1].repeat(5, 4, 1))) <= 1e-6
    return gm, info, state


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("simple", [False, True])
@pytest.mark.parametrize("k_bias", [False, True])
def test_q_k_v_become_one(tmp_path, loaded, simple, k_bias):
    gm, info, state = _case(Attention(simple=simple, k_bias=k_bias), loaded=loaded, folder=tmp_path)
    assert info.num_matches == 1
    assert sum("linear" in target for target in targets(gm)) == 2
    names = dict(gm.named_parameters())
    weight = names["attn.q_proj_k_proj_v_proj.weight"]
    assert torch.equal(weight, torch.cat([state[f"attn.{part}_proj.weight"] for part in "qkv"]))
    k_bias_values = state["attn.k_proj.bias"] if k_bias else torch.zeros(4)
    expected = torch.cat([state["attn.q_proj.bias"], k_bias_values, torch.zeros(4)])
    assert torch.equal(names["attn.q_proj_k_proj_v_proj.bias"], expected)
    assert not any("k_proj." in name and "q_proj" not in name for name in names)


class OtherUser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x) * self.b(x) + x


def test_an_input_with_other_users_is_for_mixed_children_only(tmp_path):
    _, info, _ = _case(OtherUser(), loaded=False, folder=tmp_path)
    assert info.num_matches == 0
    gm, info, _ = _case(OtherUser(), loaded=False, folder=tmp_path, key="fuse_gemms_mixed_children")
    assert info.num_matches == 1
    assert targets(gm).count("linear.default") == 1


class Kept(nn.Module):
    """Three pairs that must stay apart: a tied weight, a weight used twice, a computed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.a.weight
        self.c, self.d = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.e, self.f = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        y = self.a(x) * self.b(x)
        z = self.c(y) + self.d(y)
        w = self.c(z.relu()) * self.tied(z.tanh())
        return nn.functional.linear(w, self.e.weight * 2) + self.f(w)


@pytest.mark.parametrize("loaded", [False, True])
def test_shared_weights_stay_apart(tmp_path, loaded):
    gm, info, _ = _case(Kept(), loaded=loaded, folder=tmp_path, key="fuse_gemms_mixed_children")
    assert info.num_matches == 0
    assert targets(gm).count("linear.default") == 8


class Dtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.b = nn.Linear(8, 8, bias=False)
        self.c = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        simple = torch.ops.onboard.torch_linear_simple(x, self.c.weight, None)
        return self.a(x) + self.b(x) + simple


def test_different_ops_stay_apart(tmp_path):
    gm, info, _ = _case(Dtypes(), loaded=False, folder=tmp_path)
    assert info.num_matches == 1
    assert sum("linear" in target for target in targets(gm)) == 2


class SwiGLU(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 6, bias=bias), nn.Linear(8, 6, bias=False)
        self.down_proj = nn.Linear(6, 8, bias=bias)

    def forward(self, x):
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        return torch.ops.onboard.torch_swiglu_mlp(
            x, gate.weight, up.weight, down.weight, gate.bias, up.bias, down.bias, "gelu"
        )


@pytest.mark.parametrize("key", ["fuse_gemms", "fuse_swiglu"])
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_up_of_a_swiglu_become_one(tmp_path, key, loaded, bias):
    gm, info, _ = _case(SwiGLU(bias), loaded=loaded, folder=tmp_path, key=key)
    assert info.num_matches == 1
    assert targets(gm) == ["onboard.torch_fused_swiglu_mlp.default"]
    names = {"down_proj.weight", "gate_proj_up_proj.weight"}
    assert {name for name, _ in gm.named_parameters()} == names | (
        {"down_proj.bias", "gate_proj_up_proj.bias"} if bias else set()
    )


def test_plan_flattens_joins_of_joins():
    plan = WeightPlan()
    plan.joined("ab", [Part("a", 2), Part("b", 3)])
    plan.joined("abc", [Part("ab", 5), Part(None, 1), Part("c", 4)])
    assert plan.parts("abc") == ["a", "b", "c"]
    views = dict(plan.slices("abc", torch.arange(10)))
    assert {name: view.tolist() for name, view in views.items()} == {
        "a": [0, 1],
        "b": [2, 3, 4],
        None: [5],
        "c": [6, 7, 8, 9],
    }
    assert "ab" not in plan.joins


def test_plan_lives_with_the_graph():
    gm = exported(Attention(), 2, 3, 8)
    apply("fuse_gemms", gm)
    assert weight_plan(gm).parts("attn.q_proj_k_proj_v_proj.weight") == [
        f"attn.{p}_proj.weight" for p in "qkv"
    ]
    assert weight_plan(gm).parts("attn.q_proj_k_proj_v_proj.bias") == [
        "attn.q_proj.bias",
        "attn.k_proj.bias",
    ]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["l.0.q.weight", "l.0.k.weight"], "l.0.q_k.weight"),
        (["l.0.attn.q.weight", "l.0.mlp.up.weight"], "l.0.attn_q_mlp_up.weight"),
        (["q.weight", "k.weight"], "q_k.weight"),
        (["one", "two"], "joined.one"),
    ],
)
def test_joined_name(names, expected):
    assert joined_name(names) == expected


def test_joined_name_does_not_take_another_parameters():
    assert (
        joined_name(["a.gate.weight", "a.up.weight"], ["a.gate_up.weight"])
        == "a.gate_up_joined.weight"
    )


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of CPU storages that operators return and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def track(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not tensor.is_meta and not isinstance(tensor, FakeTensor):
            self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.storages = {
            key: entry for key, entry in self.storages.items() if not entry[0].expired()
        }
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.storages.values()))
        return tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        pytree.tree_map_only(torch.Tensor, self.track, out)
        return out


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(64, 96, bias=False) for _ in range(3)) for _ in range(3)
        )
        self.out = nn.ModuleList(nn.Linear(96, 64, bias=False) for _ in range(3))

    def forward(self, x):
        for (a, b, c), out in zip(self.layers, self.out, strict=True):
            x = out(a(x) * b(x) + c(x)).relu()
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_joined_weights_peaks_at_one_tensor_above_the_model(tmp_path, monkeypatch, dtype):
    """The checkpoint's tensor counts in full, although on the CPU it is only mapped."""
    gm, info, _ = apply("fuse_gemms", exported(Stack(), 2, 3, 64))
    assert info.num_matches == 3
    context = context_for(tmp_path, random_state(Stack(), 0))
    context.dtype = dtype
    live = LiveBytes()
    read = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda *args: live.track(read(*args)))
    with live:
        apply("load_weights", gm, context, shapes=False)
    final = sum(parameter.nbytes for parameter in gm.parameters())
    assert final == 12 * 64 * 96 * dtype.itemsize
    assert final <= live.peak <= final + 64 * 96 * 4 + 64


def test_joining_loaded_weights_peaks_at_one_group_above_the_model():
    gm = exported(Stack(), 2, 3, 64, device="cpu")
    gc.collect()  # the module that was exported
    total = sum(parameter.nbytes for parameter in gm.parameters())
    live = LiveBytes()
    for parameter in gm.parameters():
        live.track(parameter)
    del parameter
    with live:
        apply("fuse_gemms", gm, shapes=False)
    assert live.peak <= total + 3 * 64 * 96 * 4


def test_a_parameter_whose_second_name_was_cleaned_up_is_not_private():
    gm = exported(Dtypes(), 2, 3, 8)
    assert {"a.weight", "b.weight", "c.weight"} <= private_parameters(gm)
    gm.meta["tied_parameters"] = {"other.weight": "b.weight"}
    assert "b.weight" not in private_parameters(gm)
    assert "a.weight" in private_parameters(gm)
