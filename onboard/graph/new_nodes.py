"""New nodes that know their shapes, so that the graph's need not be propagated again after every
fusion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from onboard.graph.fx import Target, attribute, call
from onboard.graph.shapes import python_dispatcher


def insert_call(
    gm: fx.GraphModule, before: fx.Node, target: Target, *args: Any, like: fx.Node
) -> fx.Node:
    """Insert a call before a node, with provenance from `like` and a fake result when the arguments
    have one.
    """
    node = call(gm, before, target, *args, like=like)
    infer_value(node)
    return node


def read_parameter(gm: fx.GraphModule, before: fx.Node, name: str) -> fx.Node:
    """Insert a node that reads a parameter or buffer, as a fake tensor where the values of `before`'s
    inputs are.
    """
    parameter = attribute(gm, name)
    with gm.graph.inserting_before(before):
        node = gm.graph.get_attr(name)
    beside = next(
        (
            value
            for source in before.all_input_nodes
            if isinstance(value := _value(source), FakeTensor)
        ),
        None,
    )
    if beside is not None:
        with beside.fake_mode:
            node.meta["val"] = torch.empty(
                parameter.shape, dtype=parameter.dtype, device=beside.device
            )
    return node


def infer_value(node: fx.Node) -> None:
    """Compute a call's fake result from its arguments'; drop an old one when an argument has
    none.
    """
    node.meta.pop("val", None)
    if all(_value(source) is not None for source in node.all_input_nodes):
        args, kwargs = fx.map_arg((node.args, node.kwargs), _value)
        assert callable(node.target)
        with _symbolic(_value(source) for source in node.all_input_nodes):
            node.meta["val"] = node.target(*args, **kwargs)


@contextmanager
def _symbolic(values: Iterable[Any]) -> Iterator[None]:
    """Run ops on fake tensors in their mode."""
    fake = next((value for value in values if isinstance(value, FakeTensor)), None)
    with fake.fake_mode if fake is not None else nullcontext(), python_dispatcher():
        yield


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")
