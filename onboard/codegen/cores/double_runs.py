"""Parts of a recorded forward, run in float64: no rounding hides what they compute."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_CASTS: tuple[Callable[..., Any], ...] = (
    torch.Tensor.float,
    torch.Tensor.half,
    torch.Tensor.bfloat16,
)


class _InDouble(TorchFunctionMode):
    """Every cast to a narrower float is one to float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(_widened, (args, kwargs or {}))
        return (torch.Tensor.double if func in _CASTS else func)(*args, **kwargs)


def _widened(value: Any) -> Any:
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def doubled(value: Any) -> Any:
    """Return tensors and containers of tensors with floats in float64."""
    return tree_map(
        lambda leaf: (
            leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
        ),
        value,
    )


class DoubleRuns:
    """Runs parts of a graph module in float64, on a copy of it.

    With `other_weights` the copy's weights are other ones, near those that there are: what they are
    at first (a bias of zero, a factor of one) says nothing of what training makes of them.
    """

    def __init__(self, gm: fx.GraphModule, *, other_weights: bool = True) -> None:
        self._module = copy.deepcopy(gm).double().eval()
        if other_weights:
            generator = torch.Generator().manual_seed(5)
            for weight in _weights(self._module):
                drawn = torch.rand(weight.shape, generator=generator, dtype=torch.float64)
                weight.data = weight.data * (1.05 + drawn / 10) + drawn / 10

    def run(
        self,
        nodes: Iterable[fx.Node],
        given: Mapping[fx.Node, Any],
        kept: Container[fx.Node] | None = None,
        seen: Callable[[fx.Node, Mapping[fx.Node, Any]], None] | None = None,
    ) -> dict[fx.Node, Any]:
        """Compute `nodes`, in their order, from the values `given`; return those of `kept`, or all.

        `seen` is called after each node, with the values that there are. Errors of torch and of the
        modules that are called pass through.
        """
        wanted = [node for node in nodes if node.op != "output" and node not in given]
        last = {each: node for node in wanted for each in (*node.all_input_nodes, node)}
        runner = fx.Interpreter(self._module, garbage_collect_values=False)
        runner.env = dict(given)
        with torch.no_grad(), _double_by_default(), _InDouble():
            for node in wanted:
                runner.env[node] = runner.run_node(node)
                if seen is not None:
                    seen(node, runner.env)
                for each in (*node.all_input_nodes, node) if kept is not None else ():
                    if last[each] is node and kept is not None and each not in kept:
                        runner.env.pop(each, None)
        return runner.env


@contextmanager
def _double_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _weights(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield what a checkpoint fills: parameters, and buffers of it that are no tables."""
    for weight in module.parameters():
        if weight.is_floating_point():
            yield weight
    kept = module.state_dict().keys()
    for name, buffer in module.named_buffers():
        if name in kept and buffer.is_floating_point() and buffer.dim() < 2:
            yield buffer


def inputs_of(gm: fx.GraphModule, values: Iterable[Any]) -> dict[fx.Node, Any]:
    """Return the values of a graph's inputs, in float64; inputs that are left out have their
    defaults.
    """
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    given = dict(zip(inputs, map(doubled, values), strict=False))
    return given | {node: node.args[0] for node in inputs if node not in given and node.args}
