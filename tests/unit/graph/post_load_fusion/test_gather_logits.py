"""Logits are computed only for the rows that are asked for, whatever follows the head row by
row.
"""

import random

import pytest
import torch
from torch import nn

from tests.support.graph.fusion import apply, exported, random_state, targets
from tests.support.graph.harness import rmse

HEADS = {
    "plain": lambda logits: logits,
    "scaled": lambda logits: logits * 0.3,
    "divided": lambda logits: logits / 7.0,
    "soft_cap": lambda logits: torch.tanh(logits / 3.0) * 3.0,
    "cast": lambda logits: (logits.double() * 2).float(),
    "cut": lambda logits: logits[..., :9],
}
NOT_ROW_BY_ROW = {
    "softmax_over_tokens": lambda logits: logits.softmax(1),
    "shifted": lambda logits: logits[:, 1:],
    "sum_of_two": lambda logits: logits + logits.flip(1),
}


class Model(nn.Module):
    def __init__(self, after) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.after = after

    def forward(self, x):
        return self.after(self.head(self.body(x).tanh()))


def _case(after):
    model = Model(after)
    model.load_state_dict(random_state(model, random.randrange(10**6)))
    return model, exported(model, 2, 5, 8, device="cpu")


@pytest.mark.parametrize("after", HEADS)
def test_rows_are_gathered_before_the_head(after):
    model, gm = _case(HEADS[after])
    gm, info, context = apply("gather_logits_before_lm_head", gm)
    assert info.num_matches == 1
    assert not context.facts
    assert [node.target for node in gm.graph.nodes if node.op == "placeholder"] == [
        "x",
        "logits_gather_indices",
    ]
    linears = [i for i, target in enumerate(targets(gm)) if target == "linear.default"]
    assert (
        linears[0] < targets(gm).index("onboard.gather_logits_before_lm_head.default") < linears[1]
    )
    for rows in ([4], [0, 2, 2, 6], list(range(7))):
        x = torch.randn(1, 7, 8)
        actual = gm(x=x, logits_gather_indices=torch.tensor(rows))
        assert rmse(actual, model(x).detach()[:, rows]) <= 1e-6


@pytest.mark.parametrize("after", NOT_ROW_BY_ROW)
def test_a_head_that_mixes_rows_stays_and_is_a_fact(after):
    model, gm = _case(NOT_ROW_BY_ROW[after])
    gm, info, context = apply("gather_logits_before_lm_head", gm)
    assert info.skipped
    assert info.num_matches == 0
    assert "not from a linear" in context.facts[0]
    x = torch.randn(2, 4, 8)
    assert rmse(gm(x), model(x).detach()) <= 1e-6
