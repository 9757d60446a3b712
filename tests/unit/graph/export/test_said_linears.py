"""What is said of a fake linear is what torch finds out by computing it."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from onboard.graph.shapes import said_linears


def linear(tensors: list[Tensor], said: AbstractContextManager[None]) -> Tensor:
    """The fake result for fake tensors whose sizes are symbols, one for all that are equal."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x, *rest = map(mode.from_tensor, tensors)
    with mode, said, enable_python_dispatcher(), torch.no_grad():
        return nn.functional.linear(x, *rest)


def drawn(dims: int, bias: bool, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    sizes = random.sample(range(2, 30), dims + 1)
    x, weight = torch.randn(sizes[:-1]), torch.randn(sizes[-1], sizes[-2])
    return [each.to(dtype) for each in (x, weight, *[torch.randn(sizes[-1])] * bias)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_it_is_as_torch_computes_it(
    dims: int, bias: bool, dtype: torch.dtype, transposed: bool
) -> None:
    x, *rest = drawn(dims, bias, dtype)
    if transposed and dims > 2:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    expected, found = (linear([x, *rest], way) for way in (nullcontext(), said_linears()))
    assert str(found.shape) == str(expected.shape)
    assert str(found.stride()) == str(expected.stride())
    assert (found.dtype, found.device) == (expected.dtype, expected.device)
    assert found.is_contiguous()


@pytest.mark.parametrize("wrong", ["input", "bias"])
def test_what_does_not_fit_is_refused_as_torch_does(wrong: str) -> None:
    x, weight, bias = drawn(3, True)
    broken = {
        "input": [x[..., 1:], weight, bias],
        "bias": [x, weight, torch.cat([bias, bias])],
    }
    for way in (nullcontext(), said_linears()):
        with pytest.raises(RuntimeError):
            linear(broken[wrong], way)


def test_where_operators_are_recorded_they_are_torchs() -> None:
    x, weight = drawn(3, False)

    def recorded() -> list[str]:
        gm = make_fx(nn.functional.linear, tracing_mode="symbolic")(x, weight)
        return [str(node.target) for node in gm.graph.nodes]

    expected = recorded()
    with said_linears():
        found = recorded()
    assert found == expected
    assert "aten.mm.default" in found


def test_an_export_is_the_same() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 10), nn.Linear(5, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            up = self.up(x).view(*x.shape[:-1], 2, 5)
            return x + self.down(up).sum(-2)

    def exported() -> tuple[str, list[str]]:
        dims = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
        program = torch.export.export(model, (torch.randn(3, 7, 6),), dynamic_shapes=(dims,))
        values = [str(node.meta.get("val")) for node in program.graph.nodes]
        return str(program.graph), values

    model = Twice().eval().requires_grad_(False)
    expected = exported()
    with said_linears():
        found = exported()
    assert found == expected
    assert not torch.ops.aten.linear.default.py_kernels
