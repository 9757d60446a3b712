"""A checkpoint's bytes on a real device: joined, converted and plain tensors, through pinned
buffers and streams.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from onboard.errors import OnboardError
from onboard.graph.weight_load.weight_stream import Load, stream
from tests.support.graph.fusion import apply, context_for, exported, random_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Projections(nn.Module):
    """Two linears of one input, which are joined before they are loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(64, 96), nn.Linear(64, 32, bias=False)
        self.norm = nn.Parameter(torch.ones(128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q(x), self.k(x)], -1) * self.norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joined_weights_are_read_into_their_places(tmp_path: Path, dtype: torch.dtype) -> None:
    state = random_state(Projections(), 7)
    context = context_for(tmp_path, state)  # float32: bfloat16 is converted on the way
    context.device, context.dtype = torch.device("cuda"), dtype
    gm, info, _ = apply("fuse_gemms", exported(Projections(), 2, 3, 64))
    assert info.num_matches == 1
    gm, *_ = apply("load_weights", gm, context, shapes=False)
    joined = torch.cat([state["q.weight"], state["k.weight"]]).to(dtype)
    weights = [tensor.cpu() for tensor in gm.parameters()]
    assert any(tensor.shape == joined.shape and torch.equal(tensor, joined) for tensor in weights)
    assert any(torch.equal(tensor, state["norm"].to(dtype)) for tensor in weights)


def test_infinities_are_found_after_streaming(tmp_path: Path) -> None:
    state = random_state(Projections(), 8)
    state["q.weight"][5, 5] = float("inf")
    context = context_for(tmp_path, state)
    context.device = torch.device("cuda")
    with pytest.raises(OnboardError, match=r"q\.weight holds infinity: in the checkpoint"):
        apply("load_weights", exported(Projections(), 2, 3, 64), context, shapes=False)


def test_many_pieces_arrive_while_the_main_stream_is_busy(tmp_path: Path) -> None:
    data = torch.randint(0, 256, (40 << 20,), dtype=torch.uint8)
    (tmp_path / "data").write_bytes(data.numpy().tobytes())
    for _ in range(3):
        scratch = torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(10_000_000)
        scratch.fill_(1)  # must not land in what is loaded, should the memory be the same
        del scratch
        target = torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
        stream([Load(tmp_path / "data", 0, target)], chunk_bytes=1 << 20)
        assert torch.equal(target.cpu(), data)
