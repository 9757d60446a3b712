"""How much memory a graph's intermediate tensors take at a time, found without computing
anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from onboard.graph.shapes import fake_like
from onboard.ops.library import NAMESPACE, op_sources


def peak_bytes(
    gm: fx.GraphModule, inputs: Mapping[str, torch.Tensor], device: torch.device
) -> tuple[int, frozenset[str]]:
    """Return the most bytes that tensors take at a time when `gm` is called with `inputs`, by name.

    Inputs, parameters and buffers do not count. Our own operators are followed inside; those that
    cannot be, because they launch kernels of their own or branch on values, count with their
    results alone, and are returned by name. Inputs on the meta device stand for tensors of their
    shape on `device`.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memory = StorageMeter()
    run = _Run(gm, mode, device, memory)
    names = [str(node.target) for node in gm.graph.find_nodes(op="placeholder", sort=True)]
    args = [
        fake_like(mode, inputs[name], device) if inputs[name].is_meta else inputs[name]
        for name in names
    ]
    with mode, enable_python_dispatcher(), torch.no_grad(), memory:
        run.run(*args)
    return memory.peak, frozenset(run.closed)


class StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operators make, for as long as something holds them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live: dict[int, tuple[Any, int]] = {}
        self._others: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.noted(func(*args, **(kwargs or {})))

    def noted(self, value: Any) -> Any:
        """Count the tensors that an operator has returned; return them."""
        for tensor in filter(torch.is_tensor, pytree.tree_leaves(value)):
            self._note(tensor)
        return value

    def exclude(self, value: Any) -> Any:
        """Leave a tensor out of the count; return it."""
        if isinstance(value, torch.Tensor):
            reference = _reference(value)
            self._others[reference.cdata] = reference
            self._live.pop(reference.cdata, None)
        return value

    def _note(self, tensor: torch.Tensor) -> None:
        reference = _reference(tensor)  # while it lives, no other storage has its address
        if reference.cdata in self._others or reference.cdata in self._live:
            return
        self._live = {key: item for key, item in self._live.items() if not item[0].expired()}
        self._live[reference.cdata] = reference, tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))


def _reference(tensor: torch.Tensor) -> Any:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


class _Run(fx.Interpreter):
    """Runs a graph on fake tensors; a value is freed after its last use, as in the graph's own
    code.
    """

    def __init__(
        self, gm: fx.GraphModule, mode: FakeTensorMode, device: torch.device, memory: StorageMeter
    ) -> None:
        super().__init__(gm)
        self.mode = mode
        self.device = device
        self.memory = memory
        self.closed: set[str] = set()
        """Operators that could not be followed inside."""

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.memory.exclude(super().placeholder(target, args, kwargs))

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value, peak = super().get_attr(target, args, kwargs), self.memory.peak
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            value = self.memory.exclude(fake_like(self.mode, value, self.device))
            self.memory.peak = peak
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        function, peak = _implementation(target), self.memory.peak
        if function is None or function.__name__ in self.closed:
            return super().call_function(target, args, kwargs)
        try:
            return function(*args, **kwargs)
        # An implementation may fail on fake tensors in any way: it reads values, or launches a
        # kernel.
        except Exception:
            self.closed.add(function.__name__)
            self.memory.peak = peak
            return super().call_function(target, args, kwargs)


def _implementation(target: Any) -> Callable[..., Any] | None:
    """Return the function behind an operator of ours."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != NAMESPACE:
        return None
    name = target._schema.name.partition("::")[2]
    function: Callable[..., Any] = getattr(import_module(op_sources()[name].module), name)
    return function
