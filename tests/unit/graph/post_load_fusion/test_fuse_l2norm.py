"""Scaling to length one gets its back end's op, from transformers' own function on."""

import pytest
import torch
from torch import nn
from transformers.models.qwen3_next.modeling_qwen3_next import l2norm

from onboard.graph.transform import get_transform
from tests.support.graph.fusion import apply, exported, targets


class Lengths(nn.Module):
    def forward(self, x):
        return l2norm(l2norm(x, eps=1e-2) * 3, eps=1e-3)


@pytest.mark.parametrize(
    ("backend", "facts"), [("torch", 0), ("auto", 0), ("fla", 1), ("triton", 1)]
)
def test_every_scaling_is_matched_and_a_missing_back_end_is_a_fact(backend, facts):
    gm, info, _ = apply("match_l2norm_pattern", exported(Lengths(), 2, 3, 16))
    assert info.num_matches == 2
    gm, info, context = apply("fuse_l2norm", gm, backend=backend)
    assert info.num_matches == 2
    assert len(context.facts) == facts
    assert targets(gm).count("onboard.torch_l2norm.default") == 2
    x = torch.randn(2, 4, 16)
    torch.testing.assert_close(gm(x), Lengths()(x), rtol=1e-6, atol=1e-6)


def test_fields_have_the_documented_default():
    assert get_transform("fuse_l2norm").config_class(stage="post_load_fusion").backend == "fla"
