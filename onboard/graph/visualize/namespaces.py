"""The module hierarchy behind a flat graph, rebuilt from each node's `nn_module_stack`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
"""What torch.export writes for a node that belongs to no module, such as a size of an input."""


@dataclass
class Namespace:
    """A module of the original model and the operators that it became."""

    name: str
    type: str = ""
    ops: list[dict[str, Any]] = field(default_factory=list)
    children: dict[str, Namespace] = field(default_factory=dict)

    def counts(self) -> Counter[str]:
        """Return how often each operator occurs in the module and below."""
        total = Counter(op["op"] for op in self.ops)
        for child in self.children.values():
            total += child.counts()
        return total

    def as_json(self) -> dict[str, Any]:
        """Return the tree as JSON values."""
        children = [child.as_json() for child in self.children.values()]
        return {"name": self.name, "type": self.type, "ops": self.ops, "children": children}


def namespace_tree(gm: fx.GraphModule) -> Namespace:
    """Return the tree of modules; an operator without a module stack belongs to the root."""
    root = Namespace("", type(gm).__name__)
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method", "call_module"):
            _owner(root, node).ops.append(_describe(node))
    return root


def _owner(root: Namespace, node: fx.Node) -> Namespace:
    owner = root
    for path, module_type in node.meta.get("nn_module_stack", {}).values():
        if path != _NO_MODULE:
            owner = _descend(root, path)
            owner.type = str(getattr(module_type, "__name__", module_type)).rpartition(".")[2]
    return owner


def _descend(root: Namespace, path: str) -> Namespace:
    owner = root
    for part in filter(None, path.split(".")):
        owner = owner.children.setdefault(part, Namespace(f"{owner.name}.{part}".lstrip(".")))
    return owner


def _describe(node: fx.Node) -> dict[str, Any]:
    inputs = [
        str(source.target if source.op == "get_attr" else source.name)
        for source in node.all_input_nodes
    ]
    value = node.meta.get("val")
    shape, dtype = "", ""
    if isinstance(value, torch.Tensor):
        shape, dtype = str(list(value.shape)), str(value.dtype).removeprefix("torch.")
    return {
        "name": node.name,
        "op": str(node.target),
        "inputs": inputs,
        "shape": shape,
        "dtype": dtype,
    }
