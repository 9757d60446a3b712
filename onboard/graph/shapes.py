"""Shape propagation: `node.meta["val"]` as fake tensors with symbolic batch and sequence sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from onboard.graph.fx import fake_mode, placeholders

_LINEAR = torch.ops.aten.linear.default
SIZES = "sizes"
"""Where a node of a graph that was read from a file has its `known_sizes`."""


def known_sizes(node: fx.Node) -> list[int | None] | None:
    """Return the sizes of a node's tensor, None for each that depends on the step; None for what is
    no tensor, or where no shapes were propagated.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        sizes: list[int | None] | None = node.meta.get(SIZES)
        return sizes
    return [size if isinstance(size, int) else None for size in value.shape]


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a fake tensor of the same static shape, strides and dtype that believes it lies on
    `device`.
    """
    with mode:
        return torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
        )


@contextmanager
def said_linears() -> Iterator[None]:
    """Have the Python dispatcher say what a linear of fake tensors is like, not compute it by a view,
    a product and another view of symbolic sizes: a third of an export's time.
    """
    kernels, key = _LINEAR.py_kernels, DispatchKey.CompositeImplicitAutograd
    before = dict(kernels)
    kernels[key] = _said_linear
    _LINEAR._dispatch_cache.clear()
    try:
        yield
    finally:
        kernels.clear()
        kernels.update(before)
        _LINEAR._dispatch_cache.clear()


@contextmanager
def python_dispatcher() -> Iterator[None]:
    """Run composite operators in Python, where sizes may be symbolic: torch 2.11 decomposes a linear
    in C++ otherwise, which cannot count elements of a symbolic size.
    """
    with said_linears(), enable_python_dispatcher():
        yield


def _said_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a fake [..., out] for a fake `input` [..., in] and `weight` [out, in]. What does not fit,
    and what is recorded as other operators, is as torch has it.
    """
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if (
        get_proxy_mode() is None
        and all(isinstance(each, FakeTensor) for each in tensors)
        and len({(each.dtype, each.device) for each in tensors}) == 1
        and input.dim() > 1
        and weight.dim() == 2
        and input.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
    ):
        return input.new_empty((*input.shape[:-1], weight.shape[0]))
    made: Tensor = _LINEAR._op_dk(DispatchKey.CompositeImplicitAutograd, *tensors)
    return made


def propagate_shapes(gm: fx.GraphModule, device: torch.device) -> None:
    """Recompute `meta["val"]` of every node from the inputs' fake tensors.

    Parameters and buffers count as lying on `device`, wherever they are now: before the weights are
    loaded they lie on the meta device, where mixing them with inputs would be an error.
    """
    inputs = [node.meta["val"] for node in placeholders(gm)]
    mode = fake_mode(gm)
    with mode, _sizes_by_data(mode), python_dispatcher(), torch.no_grad():
        _ShapePropagation(gm, mode, device).run(*inputs)


def _sizes_by_data(mode: FakeTensorMode) -> AbstractContextManager[None]:
    """Let the graph's sizes that data decide be new symbols, of which nobody keeps a list.

    Symbols on that list are to be in the next result that is looked through for them; torch 2.11
    takes an input that is added to the graph later for that result, and says that they are not
    there.
    """
    return (
        mode.shape_env.ignore_fresh_unbacked_symbols()
        if mode.shape_env is not None
        else nullcontext()
    )


class _ShapePropagation(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__(gm)
        self.mode = mode
        self.device = device

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        return fake_like(self.mode, value, self.device)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        n.meta["val"] = value
        return value
