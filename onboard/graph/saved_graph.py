"""A graph module as a file: its nodes as JSON, its buffers as tensors, its parameters by name and
shape alone.

Everything is data: operators are written by name, and only names of PyTorch's operators, of
Python's own and of this package are read back. What has no such form is refused when it is saved,
so that what is read is what was there.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import fx, nn
from torch._ops import OpOverload

from onboard.graph.fx import attribute
from onboard.graph.shapes import SIZES, known_sizes
from onboard.graph.weight_load.parameters import set_parameter, tied_names, weight_plan

_MODULES = ("_operator", "operator", "math", "onboard.graph.compile.streams")
_CLASSES = ("onboard.graph.weight_load.parameters", "onboard.cache.resources")
_META = ("weight_plan", "tied_parameters", "unread_parameters")
_CONSTANTS = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


class CannotSaveError(Exception):
    """Something has no form in a file; the message says what."""


def save_graph(gm: fx.GraphModule, path: Path, extra: Mapping[str, Any]) -> None:
    """Write a graph module, with more values beside it, to one safetensors file.

    Raises `CannotSaveError` for a graph with submodules, or with arguments or attributes that are
    no plain data.
    """
    nodes = [encoded_node(gm, node) for node in gm.graph.nodes]
    document = {
        "name": type(gm).__name__,
        "nodes": nodes,
        "parameters": _parameters(gm),
        "buffers": {
            name: name in gm.state_dict() for name, _ in gm.named_buffers(remove_duplicate=False)
        },
        "meta": {key: encode(value) for key, value in gm.meta.items()},
        "extra": {key: encode(value) for key, value in extra.items()},
    }
    if unknown := gm.meta.keys() - set(_META):
        raise CannotSaveError(f"the graph's {min(unknown)}")
    buffers = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in gm.named_buffers(remove_duplicate=False)
    }
    save_file(buffers, path, metadata={"graph": json.dumps(document)})


def load_graph(path: Path) -> tuple[fx.GraphModule, dict[str, Any]]:
    """Read a graph module, parameters on the meta device and buffers on the CPU, and the values
    beside it.

    Folded parameters have their sources in their places: `fold_again`, once these are loaded,
        computes them.

    Raises `ValueError`, `KeyError` and the like, or safetensors' own error, for a damaged file.
    """
    with safe_open(path, framework="pt") as file:
        document = json.loads(file.metadata()["graph"])
        buffers = {name: file.get_tensor(name) for name in document["buffers"]}
    gm = fx.GraphModule(nn.Module(), fx.Graph(), document["name"])
    for entry in document["parameters"]:
        empty = torch.empty(entry["shape"], dtype=decode(entry["dtype"], {}), device="meta")
        parameter = nn.Parameter(empty, requires_grad=False)
        for name in entry["names"]:
            set_parameter(gm, name, parameter)
    for name, tensor in buffers.items():
        _set_buffer(gm, name, tensor, persistent=document["buffers"][name])
    gm.meta.update({key: decode(value, {}) for key, value in document["meta"].items()})
    gm.graph = decoded_graph(document["nodes"])
    return gm.eval(), {key: decode(value, {}) for key, value in document["extra"].items()}


def encoded_node(gm: fx.GraphModule, node: fx.Node) -> list[Any]:
    """Return a node as JSON; raise `CannotSaveError` for one that has no such form."""
    if node.op not in ("placeholder", "get_attr", "call_function", "output"):
        raise CannotSaveError(f"a {node.op} of {node.target}")
    if node.op == "get_attr" and not isinstance(attribute(gm, str(node.target)), torch.Tensor):
        raise CannotSaveError(f"the attribute {node.target}, which is no tensor")
    target = _function_name(node.target) if node.op == "call_function" else str(node.target)
    path = list((node.meta.get("nn_module_stack") or {"": ("", None)}).values())[-1][0]
    arguments = [encode(node.args), encode(node.kwargs)]
    return [node.op, node.name, target, *arguments, path, known_sizes(node)]


def decoded_graph(nodes: list[list[Any]]) -> fx.Graph:
    """Return the graph of nodes that were encoded, in order."""
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    for op, name, target, args, kwargs, path, sizes in nodes:
        function = _function(target) if op == "call_function" else target
        node = graph.create_node(op, function, decode(args, made), decode(kwargs, made), name)
        assert node.name == name, f"{name} came back as {node.name}"
        if path:
            node.meta["nn_module_stack"] = {path: (path, None)}
        if sizes is not None:
            node.meta[SIZES] = sizes
        made[name] = node
    return graph


def _function_name(target: Any) -> str:
    if isinstance(target, OpOverload):
        name = f"ops:{target.namespace}.{target._schema.name.split('::')[1]}.{target._overloadname}"
    else:
        name = f"{getattr(target, '__module__', '')}:{getattr(target, '__qualname__', '')}"
    try:
        same = _function(name) is target
    except (ValueError, AttributeError, ImportError):
        same = False
    if not same:
        raise CannotSaveError(f"a call of {target}")
    return name


def _function(name: str) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    if module == "ops":
        namespace, operator, overload = path.split(".")
        found: Any = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
    elif module in _MODULES:
        found = getattr(importlib.import_module(module), path)
    else:
        raise ValueError(f"{name} is not a function that a graph may call")
    if not callable(found):
        raise ValueError(f"{name} cannot be called")
    return found  # type: ignore[no-any-return]


def encode(value: Any) -> Any:
    """Return JSON for a node's argument, or another value of plain data; raise `CannotSaveError`
    for anything else.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, list):
        return [encode(each) for each in value]
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, tuple):
        return {"tuple": [encode(each) for each in value]}
    if isinstance(value, set):
        return {"set": [encode(each) for each in sorted(value)]}
    if isinstance(value, slice):
        return {"slice": [encode(each) for each in (value.start, value.stop, value.step)]}
    if isinstance(value, Mapping):
        return {"dict": [[encode(key), encode(each)] for key, each in value.items()]}
    for kind, cls in _CONSTANTS.items():
        if isinstance(value, cls):
            return {kind: str(value).removeprefix("torch.")}
    if dataclasses.is_dataclass(value) and type(value).__module__ in _CLASSES:
        fields = {
            each.name: encode(getattr(value, each.name)) for each in dataclasses.fields(value)
        }
        return {"class": f"{type(value).__module__}:{type(value).__name__}", "fields": fields}
    raise CannotSaveError(f"a {type(value).__name__}")


def decode(value: Any, nodes: Mapping[str, fx.Node]) -> Any:
    """Return what `encode` made JSON of."""
    if isinstance(value, list):
        return [decode(each, nodes) for each in value]
    if not isinstance(value, dict):
        return value
    if "class" in value:
        module, _, name = value["class"].partition(":")
        if module not in _CLASSES:
            raise ValueError(f"{value['class']} is not a class that a graph may hold")
        fields = {key: decode(each, nodes) for key, each in value["fields"].items()}
        return getattr(importlib.import_module(module), name)(**fields)
    ((kind, inner),) = value.items()
    if kind in _CONSTANTS:
        constant = getattr(torch, inner)
        if not isinstance(constant, _CONSTANTS[kind]):
            raise ValueError(f"{inner} is no {kind}")
        return constant
    return _DECODERS[kind](inner, nodes)


_DECODERS: dict[str, Callable[[Any, Mapping[str, fx.Node]], Any]] = {
    "node": lambda name, nodes: nodes[name],
    "device": lambda name, _: torch.device(name),
    "tuple": lambda items, nodes: tuple(decode(items, nodes)),
    "set": lambda items, nodes: set(decode(items, nodes)),
    "slice": lambda items, nodes: slice(*decode(items, nodes)),
    "dict": lambda items, nodes: {decode(key, nodes): decode(each, nodes) for key, each in items},
}


def _parameters(gm: fx.GraphModule) -> list[dict[str, Any]]:
    """Return what has to be loaded: the parameters, with the sources of folded ones in their
    places.
    """
    folds = weight_plan(gm).folds
    entries = []
    for names in tied_names(gm):
        parameter = gm.get_parameter(names[0])
        if names[0] not in folds:
            entries.append(
                {"names": names, "shape": list(parameter.shape), "dtype": encode(parameter.dtype)}
            )
    known = {name for entry in entries for name in entry["names"]}
    for name, (shape, dtype) in {
        name: each for fold in folds.values() for name, each in fold.sources.items()
    }.items():
        if name not in known:
            entries.append({"names": [name], "shape": shape, "dtype": encode(dtype)})
    return entries


def _set_buffer(gm: nn.Module, name: str, tensor: torch.Tensor, *, persistent: bool) -> None:
    *path, leaf = name.split(".")
    module = gm
    for child in path:
        if not hasattr(module, child):
            module.add_module(child, nn.Module())
        module = getattr(module, child)
    module.register_buffer(leaf, tensor, persistent=persistent)
