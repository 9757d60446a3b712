"""An activation after a cached convolution is computed by it, with the values and the state of both
apart.
"""

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from onboard.graph.fx import arguments, nodes_of
from tests.support.graph.fusion import apply
from tests.support.graph.harness import rmse

ops = torch.ops.onboard
CHANNELS, KERNEL = 6, 4


class Convolution(nn.Module):
    def __init__(self, activation=None, after=None, read_twice=False) -> None:
        super().__init__()
        self.activation, self.after, self.read_twice = activation, after, read_twice
        self.weight, self.bias = (
            nn.Parameter(torch.randn(CHANNELS, 1, KERNEL)),
            nn.Parameter(torch.randn(CHANNELS)),
        )

    def forward(self, x, cu_seqlens, kv_lens, state_slots, batch_info_host, conv_cache):
        metadata = (cu_seqlens, kv_lens, state_slots, batch_info_host, conv_cache)
        conv = ops.torch_cached_causal_conv1d.default
        out = conv(
            x, self.weight, self.bias, *metadata, groups=CHANNELS, activation=self.activation
        )
        if self.after is not None:
            out = self.after(out) + (out if self.read_twice else 0)
        return out


def _inputs():
    lengths = torch.tensor([5, 3], dtype=torch.int32)
    starts = torch.tensor([0, 5, 8], dtype=torch.int32)
    info = torch.tensor([2, 8, 5, 9], dtype=torch.int32)
    caches = torch.randn(4, KERNEL - 1, CHANNELS)
    return (
        torch.randn(1, 8, CHANNELS),
        starts,
        lengths + torch.tensor([4, 0]).int(),
        torch.tensor([2, 1]),
        info,
        caches,
    )


def _graph(**options):
    return fx.symbolic_trace(Convolution(**options).requires_grad_(False))


@pytest.mark.parametrize(
    ("after", "name"),
    [(torch.ops.aten.silu.default, "silu"), (torch.ops.aten.relu.default, "relu")],
)
def test_the_activation_moves_into_the_convolution(after, name):
    gm, inputs = _graph(after=after), _inputs()
    plain, twin = _graph(), [tensor.clone() for tensor in inputs]
    plain.load_state_dict(gm.state_dict())
    new, info, _ = apply("fuse_causal_conv_activation", gm, shapes=False)
    assert info.num_matches == 1
    assert not nodes_of(new, after)
    (node,) = nodes_of(new, ops.torch_cached_causal_conv1d)
    assert arguments(node)["activation"] == name
    assert rmse(new(*inputs), getattr(F, name)(plain(*twin))) <= 1e-6
    assert torch.equal(inputs[-1], twin[-1]), "the state keeps the inputs, not the activations"


@pytest.mark.parametrize(
    "options",
    [
        {"after": torch.ops.aten.silu.default, "activation": "silu"},
        {"after": torch.ops.aten.silu.default, "read_twice": True},
        {"after": torch.ops.aten.neg.default},
        {},
    ],
    ids=["has one", "read twice", "no activation", "nothing after it"],
)
def test_what_cannot_move_stays(options):
    gm, inputs = _graph(**options), _inputs()
    twin = [tensor.clone() for tensor in inputs]
    expected = gm(*inputs)
    new, info, _ = apply("fuse_causal_conv_activation", gm, shapes=False)
    assert info.num_matches == 0
    assert torch.equal(new(*twin), expected)
