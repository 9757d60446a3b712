"""Random graphs of elementwise operators, as modules, and what the tests of their fusion share."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from onboard.graph.context import TransformContext
from onboard.graph.fx import nodes_of
from onboard.ops.triton.launch import INTERPRETED
from tests.support.graph.harness import settled_config

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

EXACT: tuple[Callable[..., Any], ...] = (torch.neg, torch.abs, torch.relu, torch.square)
SMOOTH: tuple[Callable[..., Any], ...] = (
    *(torch.tanh, torch.sigmoid, torch.sin, torch.cos, F.silu, F.gelu, F.softplus),
    lambda x: F.gelu(x, approximate="tanh"),
    lambda x: torch.exp(-x.abs()),
    lambda x: torch.log(x.abs() + 1),
    lambda x: torch.sqrt(x.abs()),
    lambda x: torch.rsqrt(x.abs() + 0.5),
    lambda x: x.clamp(-2, 2).pow(3),
)


class RandomGraph(nn.Module):
    """A DAG of random operators over inputs that broadcast to [tokens, 3, 8]; it returns up to
    three of its values.
    """

    def __init__(
        self,
        seed: int,
        operators: int = 12,
        smooth: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.plan = [self._step(smooth) for _ in range(operators)]
        self.dtype = dtype

    def inputs(self, tokens: int) -> list[Tensor]:
        """Return fresh tensors: whole ones, one transposed, and ones to broadcast."""
        wide = torch.randn(tokens, 8, 3, device=DEVICE, dtype=self.dtype).transpose(1, 2)
        shapes = ((tokens, 3, 8), (tokens, 3, 8), (8,), (tokens, 1, 1), (3, 1))
        return [wide, *(torch.randn(shape, device=DEVICE, dtype=self.dtype) for shape in shapes)]

    def _step(self, smooth: bool) -> tuple[str, Any, int, int, float]:
        kinds = ["unary", "binary", "binary", "number", "where", "cast", "clamp", "divide"]
        kind = self.random.choice(kinds)
        function = self.random.choice(EXACT + SMOOTH if smooth else EXACT)
        return (
            kind,
            function,
            self.random.randrange(10**6),
            self.random.randrange(10**6),
            self.random.uniform(-2, 2),
        )

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        values = list(inputs)
        for step in self.plan:
            values.append(self._compute(step, values))
        largest = [value for value in values[len(inputs) :] if value.dim() == 3]
        return largest[-1:] + largest[-4:-5:-1] + values[-1:]

    def _compute(self, step: tuple[str, Any, int, int, float], values: list[Tensor]) -> Tensor:
        kind, function, first, second, number = step
        x, y = values[-1 - first % min(5, len(values))], values[second % len(values)]
        if kind == "unary":
            return function(x)
        if kind == "binary":
            return (torch.add, torch.sub, torch.mul, torch.maximum)[first % 4](x, y)
        if kind == "number":
            return (x * number, x + number, 1.5 - x, x / (abs(number) + 0.5))[first % 4]
        if kind == "where":
            condition = (
                (x > y) & ~(x > number) if first % 2 else torch.logical_or(x <= y, x < number)
            )
            return torch.where(condition, x, y) if second % 2 else x.masked_fill(condition, number)
        if kind == "cast":
            return x.to((torch.float32, self.dtype)[first % 2])
        if kind == "clamp":
            return x.clamp(-abs(number), 1.25)
        return x / (y.abs() + 0.5)

    def graph(self, tokens: int) -> fx.GraphModule:
        """Return the graph of the operators, with shapes."""
        gm = make_fx(self, tracing_mode="fake")(*self.inputs(tokens))
        gm.graph.eliminate_dead_code()
        return gm


def context() -> TransformContext:
    """Return the context of a run on the device of the tests."""
    return TransformContext(None, settled_config(), torch.device(DEVICE), torch.float32)  # type: ignore[arg-type]


def kernels(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the calls of generated kernels."""
    return nodes_of(gm, torch.ops.onboard.triton_pointwise)


def without_kernels(gm: fx.GraphModule) -> fx.GraphModule:
    """Let the graph run its programs with PyTorch's operators."""
    for node in kernels(gm):
        node.target = torch.ops.onboard.torch_pointwise.default
    gm.recompile()
    return gm


def launches(gm: fx.GraphModule) -> int:
    """Return how many calls of operators there are that compute something."""
    return sum(
        node.op == "call_function" and "getitem" not in str(node.target) for node in gm.graph.nodes
    )
