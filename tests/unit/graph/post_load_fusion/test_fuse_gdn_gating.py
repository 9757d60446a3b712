"""The gates of a gated delta rule become one op, in the forms in which transformers' models write
them.
"""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.graph.fusion import apply, exported, random_state, targets
from tests.support.graph.harness import rmse

ops = torch.ops.onboard
HEADS, SIZE = 3, 4


class Rule(nn.Module):
    """A gated delta rule; `form` says how its gates are computed."""

    def __init__(self, form: str = "plain", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.form, self.dtype = form, dtype
        self.A_log, self.dt_bias = nn.Parameter(torch.ones(HEADS)), nn.Parameter(torch.ones(HEADS))

    def forward(self, x):
        x = x.to(self.dtype)
        heads, (a, b) = (
            x[..., : HEADS * SIZE].unflatten(-1, (HEADS, SIZE)),
            x[..., HEADS * SIZE :].chunk(2, -1),
        )
        beta = b.sigmoid()
        if self.form == "twice":  # as where eigenvalues may be negative
            beta = beta * 2.0
        if self.form == "early":
            heads = heads * beta.unsqueeze(-1)
        if self.form == "late":
            a = a * beta
        dt = (
            a + self.dt_bias.to(self.dtype)
            if self.form == "narrow"
            else a.float() + self.dt_bias.to(self.dtype)
        )
        dt = F.softplus(dt, beta=2.0) if self.form == "sharper" else F.softplus(dt)
        g = -self.A_log.to(self.dtype).float().exp() * dt
        if self.form == "other":
            beta = beta.tanh()
        return ops.torch_gated_delta_rule(heads, heads.cos(), heads.sin(), g, beta, None, True)


def _case(form: str, dtype: torch.dtype = torch.float32):
    model = Rule(form, dtype)
    model.load_state_dict(random_state(model, random.randrange(10**6)))
    gm, _, _ = apply(
        "cleanup_input_constraints", exported(model, 2, 3, HEADS * (SIZE + 2), device="cpu")
    )
    return gm, torch.randn(2, 5, HEADS * (SIZE + 2)) * 4


@pytest.mark.parametrize(
    ("form", "dtype", "folded"),
    [
        ("plain", torch.float32, True),
        ("plain", torch.bfloat16, False),
        ("twice", torch.bfloat16, True),
    ],
)
def test_both_gates_become_one_op(form, dtype, folded):
    gm, x = _case(form, dtype)
    expected = gm(x)
    gm = apply("fold_constants", gm)[0] if folded else gm
    gm, info, context = apply("fuse_gdn_gating", gm)
    assert (info.num_matches, context.facts) == (1, [])
    assert targets(gm).count("onboard.torch_fused_gdn_gating.default") == 1
    assert not {"softplus.default", "sigmoid.default"} & set(targets(gm))
    assert ("exp.default" in targets(gm)) != folded
    assert rmse(gm(x), expected) == 0, "as transformers computes it"


def test_a_gate_that_is_read_before_the_other_is_computed_early():
    gm, x = _case("early", torch.bfloat16)
    expected = gm(x)
    gm, info, _ = apply("fuse_gdn_gating", apply("fold_constants", gm)[0])
    assert info.num_matches == 1
    assert rmse(gm(x), expected) == 0


@pytest.mark.parametrize("form", ["sharper", "other", "narrow", "late"])
def test_other_gates_stay_and_are_a_fact(form):
    gm, x = _case(form, torch.bfloat16)
    expected, before = gm(x), sorted(targets(gm))
    gm, info, context = apply("fuse_gdn_gating", gm)
    assert info.num_matches == 0
    assert "gates of 1 delta rules have another form" in context.facts[0]
    assert sorted(targets(gm)) == before
    assert rmse(gm(x), expected) == 0
