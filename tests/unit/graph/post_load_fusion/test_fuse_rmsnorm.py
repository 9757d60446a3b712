"""Norms get their back end's op; a residual addition joins the norm after it."""

import random

import pytest
import torch
from torch import nn

import onboard.ops  # noqa: F401
from tests.support.graph.fusion import apply, exported, random_state, targets
from tests.support.graph.harness import rmse


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return torch.ops.onboard.torch_rmsnorm(x, self.weight, 1e-5)


class Residual(nn.Module):
    """Two residual additions, each used again after its norm; the first norm has no addition before
    it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm() for _ in range(3))
        self.mix = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        x = x + self.mix[0](self.norms[0](x))
        x = x + self.mix[1](self.norms[1](x))
        return self.norms[2](x)


class Several(nn.Module):
    """Additions that are no residual: a broadcast, a scaled one, a promoted one, one that is read
    before its norm.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm() for _ in range(4))

    def forward(self, x):
        a = self.norms[0](x + self.norms[0].weight)
        b = self.norms[1](torch.add(x, a, alpha=2))
        c = self.norms[2](a.double() + b)
        total = x + b
        early = total.tanh()
        return self.norms[3](total) + early + c


def _case(model):
    model.load_state_dict(random_state(model, random.randrange(10**6)))
    x = torch.randn(2, 3, 8)
    return exported(model, 2, 3, 8, device="cpu"), x, model(x).detach()


@pytest.mark.parametrize(
    ("backend", "facts"), [("torch", 0), ("auto", 0), ("flashinfer", 1), ("triton", 1)]
)
def test_every_norm_is_matched_and_a_missing_back_end_is_a_fact(backend, facts):
    gm, x, expected = _case(Residual())
    gm, info, context = apply("fuse_rmsnorm", gm, rmsnorm_backend=backend)
    assert info.num_matches == 3
    assert len(context.facts) == facts
    assert targets(gm).count("onboard.torch_rmsnorm.default") == 3
    assert rmse(gm(x), expected) <= 1e-6


def test_fields_have_the_documented_defaults():
    from onboard.graph.transform import get_transform

    fields = get_transform("fuse_rmsnorm").config_class(stage="post_load_fusion")
    assert (fields.rmsnorm_backend, fields.gated_rmsnorm_backend) == ("flashinfer", "triton")
    assert (
        get_transform("fuse_silu_mul").config_class(stage="post_load_fusion").backend
        == "flashinfer"
    )


def test_residual_additions_join_their_norms():
    gm, x, expected = _case(Residual())
    gm, info, _ = apply("fuse_add_rms_norm", gm)
    assert info.num_matches == 2
    assert targets(gm).count("onboard.torch_fused_add_rmsnorm.default") == 2
    assert targets(gm).count("add.Tensor") == 0
    assert rmse(gm(x), expected) <= 1e-6


def test_other_additions_stay():
    gm, x, expected = _case(Several())
    before = targets(gm)
    gm, info, _ = apply("fuse_add_rms_norm", gm)
    assert info.num_matches == 0
    assert targets(gm) == before
    assert rmse(gm(x), expected) <= 1e-6


class Cast(Residual):
    """Casts to the dtype that the sum has anyway, before its norm and before its next use."""

    def forward(self, x):
        for norm, mix in zip(self.norms, self.mix, strict=False):
            x = x + mix(norm(x.to(torch.float32)))
            x = x.to(torch.float32)
        return self.norms[2](x.to(torch.float32))


def test_identity_casts_do_not_hide_a_pair():
    gm, x, expected = _case(Cast())
    # The assertions that export puts before casts
    gm, _, _ = apply("cleanup_input_constraints", gm)
    gm, info, _ = apply("fuse_add_rms_norm", gm)
    assert info.num_matches == 2
    assert rmse(gm(x), expected) <= 1e-6


class ComputedWeight(nn.Module):
    """A norm whose weight is computed after the addition."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        total = x + x.tanh()
        return total * torch.ops.onboard.torch_rmsnorm(total, 1.0 + self.weight, 1e-5)


def test_a_computed_weight_is_read_where_it_is_known():
    gm, x, expected = _case(ComputedWeight())
    gm, info, _ = apply("fuse_add_rms_norm", gm)
    assert info.num_matches == 1
    assert rmse(gm(x), expected) <= 1e-6


def test_a_computed_weight_is_computed_once():
    gm, x, expected = _case(ComputedWeight())
    gm, info, _ = apply("fuse_rmsnorm", gm, rmsnorm_backend="torch")
    assert info.num_matches == 1
    assert "add.Tensor" in targets(gm)  # the residual one
    assert targets(gm).count("add.Tensor") == 1
    assert len(list(gm.parameters())) == 1
    assert rmse(gm(x), expected) <= 1e-6


def test_a_weight_that_depends_on_the_input_is_not_folded():
    class Dynamic(ComputedWeight):
        def forward(self, x):
            return torch.ops.onboard.torch_rmsnorm(x, self.weight + x[0, 0], 1e-5)

    gm, x, expected = _case(Dynamic())
    gm, _, _ = apply("fuse_rmsnorm", gm, rmsnorm_backend="torch")
    assert targets(gm).count("add.Tensor") == 1
    assert rmse(gm(x), expected) <= 1e-6


class Wide(nn.Module):
    """A residual stream in float32 over layers of 16 bits, as with `residual_in_fp32`; its casts
    may be read twice.
    """

    def __init__(self, dtype: torch.dtype, second_reader: bool = True) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm() for _ in range(3))
        self.dtype, self.second_reader = dtype, second_reader

    def forward(self, x):
        total = x.to(self.dtype)
        for norm in self.norms:
            low = total.to(self.dtype)
            normed = torch.ops.onboard.torch_rmsnorm(low, norm.weight.to(self.dtype), 1e-5)
            mixed = normed.tanh() + low if self.second_reader else normed.tanh()
            total = total.to(torch.float32) + mixed
        return total


def exact_wide(model: Wide, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute what `Wide` computes in float64, rounding where it does: a cast, the norm's result,
    the mixture.
    """
    total = x.to(dtype).double()
    for norm in model.norms:
        low, weight = total.to(dtype).double(), norm.weight.to(dtype).double()
        normed = (low * (low.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(
            dtype
        ).double() * weight
        mixed = normed.to(dtype).double().tanh().to(dtype).double()
        mixed = (mixed + low).to(dtype).double() if model.second_reader else mixed
        total = (total + mixed).float().double()
    return total


WIDE = [(torch.bfloat16, True, 1e-2), (torch.bfloat16, False, 1e-2), (torch.float16, True, 1e-3)]


@pytest.mark.parametrize(("dtype", "second_reader", "limit"), WIDE)
def test_a_sum_that_is_cast_joins_its_norm(dtype, second_reader, limit):
    model = Wide(dtype, second_reader)
    model.load_state_dict(random_state(model, random.randrange(10**6)))
    gm, _, _ = apply("cleanup_input_constraints", exported(model, 2, 3, 8, device="cpu"))
    x = torch.randn(2, 5, 8)
    before = gm(x)
    gm, _, _ = apply("fuse_rmsnorm", gm, rmsnorm_backend="torch")
    gm, info, _ = apply("fuse_add_rms_norm", gm)
    assert info.num_matches == 2, "the first norm has no sum before it"
    assert targets(gm).count("onboard.torch_fused_add_rmsnorm.default") == 2
    assert torch.equal(gm(x), before), "fusing on the torch back end rounds nothing else"
    assert rmse(gm(x).double(), exact_wide(model, x, dtype)) <= limit


class ReadEarly(nn.Module):
    """A sum whose cast is read before its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        low = (x + x.tanh()).bfloat16()
        early = self.weight * low.sin().sum(-1, keepdim=True)
        return torch.ops.onboard.torch_rmsnorm(low, early[0, 0], 1e-5)


def test_a_cast_that_is_read_before_the_norm_stays():
    gm, _, _ = apply("cleanup_input_constraints", exported(ReadEarly(), 2, 3, 8, device="cpu"))
    _, info, _ = apply("fuse_add_rms_norm", gm)
    assert info.num_matches == 0


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return torch.ops.onboard.torch_rmsnorm_gated(x, self.weight, x.tanh(), 1e-5, 8)


def test_a_gated_norm_without_its_back_end_is_a_fact():
    gm, info, context = apply(
        "fuse_rmsnorm", exported(Gated(), 2, 3, 8, device="cpu"), rmsnorm_backend="auto"
    )
    assert info.num_matches == 0
    assert context.facts == [
        "fuse_rmsnorm: norms with a gate: back end triton is not available here, torch is used"
    ]
    gm, _, context = apply("fuse_rmsnorm", _case(Residual())[0], rmsnorm_backend="auto")
    assert context.facts == [], "there is no gated norm"


class Sandwich(nn.Module):
    """A norm between casts, as models with weights around zero write it, in a residual stream of 16
    bits.
    """

    def __init__(
        self, inside: torch.dtype = torch.float32, behind: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self.inside, self.behind = inside, behind

    def forward(self, x):
        x = x.bfloat16()
        total = x + x.tanh()
        wide = total.to(self.inside)
        normed = torch.ops.onboard.torch_rmsnorm(wide, 1.0 + self.weight.float(), 1e-6)
        normed = normed.type_as(total) if self.behind == total.dtype else normed.to(self.behind)
        return normed.sin() + total


def test_a_norm_between_casts_is_one_op():
    model = Sandwich()
    model.load_state_dict(random_state(model, 3))
    gm, _, _ = apply("cleanup_input_constraints", exported(model, 2, 3, 8, device="cpu"))
    gm, info, _ = apply("fuse_rmsnorm", gm, rmsnorm_backend="torch")
    assert info.num_matches == 1
    assert targets(gm).count("onboard.torch_wide_rmsnorm.default") == 1
    assert not any("type_as" in target for target in targets(gm))
    gm, info, _ = apply("fuse_add_rms_norm", gm)
    assert info.num_matches == 1
    x = torch.randn(2, 5, 8)
    assert torch.equal(gm(x), model(x))


@pytest.mark.parametrize(
    "dtypes", [(torch.float64, torch.bfloat16), (torch.float32, torch.float16)]
)
def test_a_norm_between_other_casts_stays(dtypes: tuple[torch.dtype, torch.dtype]):
    gm, _, _ = apply(
        "cleanup_input_constraints", exported(Sandwich(*dtypes), 2, 3, 8, device="cpu")
    )
    gm, _, _ = apply("fuse_rmsnorm", gm, rmsnorm_backend="torch")
    assert targets(gm).count("onboard.torch_wide_rmsnorm.default") == 0


class GatedNorm(Norm):
    def forward(self, x):
        return torch.ops.onboard.torch_rmsnorm_gated(x, self.weight, x.tanh(), 1e-5, 8)


def test_a_gated_norm_stays_where_its_kernel_does_not_run():
    gm, x, expected = _case(GatedNorm())
    gm, info, _ = apply("fuse_rmsnorm", gm)
    assert info.num_matches == 0
    assert targets(gm).count("onboard.torch_rmsnorm_gated.default") == 1
    assert torch.equal(gm(x), expected)
