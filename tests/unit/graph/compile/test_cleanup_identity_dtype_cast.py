"""Casts that change nothing go; casts that do anything stay."""

import pytest
import torch
from torch import fx, nn

from tests.support.graph.fusion import apply, exported, targets

aten, prims = torch.ops.aten, torch.ops.prims
IDENTITIES = [
    (aten.to.dtype, (torch.float32,), {}),
    (aten.to.dtype, (torch.float32, True), {}),
    (aten._to_copy.default, (), {"dtype": torch.float32}),
    (
        aten._to_copy.default,
        (),
        {"dtype": torch.float32, "device": torch.device("cpu"), "layout": torch.strided},
    ),
    (aten._to_copy.default, (), {"memory_format": torch.preserve_format}),
    (prims.convert_element_type.default, (torch.float32,), {}),
]
CASTS = [
    (aten.to.dtype, (torch.float64,), {}),
    (aten.to.dtype, (torch.float32, False, True), {}),
    (aten.to.dtype, (torch.float32, False, False, torch.contiguous_format), {}),
    (aten._to_copy.default, (), {"dtype": torch.bfloat16}),
    (aten._to_copy.default, (), {"dtype": torch.float32, "memory_format": torch.contiguous_format}),
    (aten._to_copy.default, (), {"dtype": torch.float32, "device": torch.device("meta")}),
    (prims.convert_element_type.default, (torch.bfloat16,), {}),
]


class Tanh(nn.Module):
    def forward(self, x):
        return x.tanh()


def _graph(op, args, kwargs) -> fx.GraphModule:
    gm = exported(Tanh(), 2, 3, 8)
    tanh = next(node for node in gm.graph.nodes if node.op == "call_function")
    with gm.graph.inserting_after(tanh):
        cast = gm.graph.call_function(op, (tanh, *args), kwargs)
    tanh.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    gm.recompile()
    return gm


@pytest.mark.parametrize(("op", "args", "kwargs"), IDENTITIES)
def test_identities_are_removed(op, args, kwargs):
    gm, info, _ = apply("cleanup_identity_dtype_cast", _graph(op, args, kwargs))
    assert info.num_matches == 1
    assert targets(gm) == ["tanh.default"]
    x = torch.randn(2, 3, 8)
    assert torch.equal(gm(x), x.tanh())


@pytest.mark.parametrize(("op", "args", "kwargs"), CASTS)
def test_other_casts_stay(op, args, kwargs):
    gm, info, _ = apply("cleanup_identity_dtype_cast", _graph(op, args, kwargs))
    assert info.num_matches == 0
    assert len(targets(gm)) == 2


def test_without_known_dtypes_nothing_is_removed():
    gm = _graph(aten.to.dtype, (torch.float32,), {})
    for node in gm.graph.nodes:
        node.meta.pop("val", None)
    _, info, _ = apply("cleanup_identity_dtype_cast", gm, shapes=False)
    assert info.num_matches == 0
