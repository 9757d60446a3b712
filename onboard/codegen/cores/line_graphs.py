"""Recordings of forwards as graphs that run on tensors, and back."""

from __future__ import annotations

import importlib
import math
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from onboard.codegen.straight.straight_lines import (
    Arithmetic,
    Given,
    Line,
    Made,
    NotStraight,
    Of,
    Own,
    Ref,
    Size,
    Straight,
    leaves,
    owned,
)

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "math.sqrt": math.sqrt,
    "torch.finfo": torch.finfo,
}
_SIGNS = {function: sign for sign, function in _OPERATIONS.items()}
_WRITTEN = "written"
"""Key of a node's `meta` under which its expression stands, for nodes that are no calls."""


def _none() -> None:
    """Give what a module has None for: a graph module cannot hold that."""


class LineGraph:
    """A recording of a module's forward as a graph; inputs are what the forward was given, by the
    names of its parameters.
    """

    def __init__(self, straight: Straight, module: nn.Module, namespace: Mapping[str, Any]) -> None:
        self._straight, self._module, self._namespace = straight, module, namespace
        self._root = nn.Module()
        self._graph = fx.Graph()
        self._nodes: dict[Any, fx.Node] = {}
        self._inputs: dict[str, fx.Node] = {}
        for name in _inputs(straight):
            self._inputs[name] = self._graph.placeholder(name)
        for line in straight.lines:
            if not isinstance(line, Line):
                raise NotStraight("a loop")
            self._nodes[Ref(line.number)] = self._line(line)
        self._graph.output(self._argument(straight.result))
        self.module = fx.GraphModule(self._root, self._graph)

    @property
    def inputs(self) -> list[str]:
        """The names of its inputs, in their order."""
        return list(self._inputs)

    def _line(self, line: Line) -> fx.Node:
        args = tuple(self._argument(each) for each in line.args)
        kwargs = {key: self._argument(each) for key, each in line.kwargs}
        graph = self._graph
        if line.kind == "module":
            made = graph.call_module(self._held(line.target), args, kwargs)
        elif line.kind == "method":
            made = graph.call_method(line.target, args, kwargs)
        elif line.kind == "attribute":
            made = graph.call_function(getattr, (args[0], line.target))
        elif line.kind == "own":
            made = graph.call_function(self._namespace[line.target], args, kwargs)
        else:
            made = graph.call_function(_function(line.target), args, kwargs)
        made.meta["line"] = line
        return made

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Made):
            items = [self._argument(each) for each in value.values]
            if issubclass(value.cls, tuple | list) and not hasattr(value.cls, "_fields"):
                return value.cls(items)
            return dict(zip(map(str, value.names), items, strict=True))
        if isinstance(value, tuple):
            return tuple(self._argument(each) for each in value)
        if isinstance(value, slice):
            return slice(*(self._argument(each) for each in (value.start, value.stop, value.step)))
        if not isinstance(value, Ref | Given | Own | Size | Of | Arithmetic):
            return value
        if value not in self._nodes:
            self._nodes[value] = self._expression(value)
            self._nodes[value].meta.setdefault(_WRITTEN, value)
        return self._nodes[value]

    def _expression(self, value: Any) -> fx.Node:
        graph = self._graph
        match value:
            case Ref(path=(*before, key)) | Given(path=(*before, key)):
                owner = self._argument(replace(value, path=tuple(before)))
                is_name = isinstance(key, str) and key.startswith(".")
                read = (getattr, key[1:]) if is_name else (operator.getitem, key)
                return graph.call_function(read[0], (owner, read[1]))
            case Given(name=name):
                return self._inputs[name]
            case Own(path=path) if owned(self._module, path) is None:
                return graph.call_function(_none)
            case Own():
                return graph.get_attr(self._held(value))
            case Size(of=of, dim=dim):
                return graph.call_method("size", (self._argument(of), dim))
            case Of(of=of, attr=attr):
                return graph.call_function(getattr, (self._argument(of), attr))
            case Arithmetic(op=op, operands=operands) if op in _OPERATIONS:
                given = tuple(self._argument(each) for each in operands)
                return graph.call_function(_OPERATIONS[op], given)
        raise NotStraight(f"{type(value).__name__} in a graph")

    def _held(self, own: Own) -> str:
        """Return the name under which the graph module holds what a module has."""
        name = "_".join(("own", *own.path))
        if not hasattr(self._root, name):
            value = owned(self._module, own.path)
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self._root.register_buffer(name, value)
            else:
                setattr(self._root, name, value)
        return name

    def recording(self) -> Straight:
        """Return the recording that the graph is now: lines that nothing reads are left out."""
        numbers = (line.number for line in self._straight.lines)
        back = _Back(max(numbers, default=0) + 1, self._straight)
        return back.recording(self._graph)


class _Back:
    """Writes a graph as a recording."""

    def __init__(self, free: int, straight: Straight) -> None:
        self._free = free
        self._straight = straight
        self._written: dict[fx.Node, Any] = {}
        self._lines: list[Line] = []

    def recording(self, graph: fx.Graph) -> Straight:
        *nodes, output = graph.nodes
        for node in nodes:
            self._written[node] = self._value(node)
        return Straight(tuple(self._lines), self._like(self._straight.result, output.args[0]))

    def _like(self, old: Any, new: Any) -> Any:
        """Return what is returned now, in the containers of before."""
        if isinstance(old, Made):
            items = new.values() if isinstance(new, dict) else new
            values = [self._like(a, b) for a, b in zip(old.values, items, strict=True)]
            return replace(old, values=tuple(values))
        return self._argument(new)

    def _value(self, node: fx.Node) -> Any:
        is_held = node.op in ("placeholder", "get_attr") or node.target is _none
        if _WRITTEN in node.meta and is_held:
            return node.meta[_WRITTEN]
        if node.op == "placeholder":
            return Given(node.name)
        args = tuple(self._argument(each) for each in node.args)
        if "line" not in node.meta and (written := self._expression(node, args)) is not None:
            return written
        kwargs = tuple((key, self._argument(each)) for key, each in node.kwargs.items())
        line = node.meta.get("line")
        if line is None:
            kind = "method" if node.op == "call_method" else "function"
            line = Line(kind, _name(node), args, kwargs, self._free)
            self._free += 1
        else:
            args = args[:1] if line.kind == "attribute" else args
            line = replace(line, args=args, kwargs=kwargs)
        self._lines.append(line)
        return Ref(line.number)

    def _expression(self, node: fx.Node, args: tuple[Any, ...]) -> Any:
        if node.target is operator.getitem:
            return replace(args[0], path=(*args[0].path, args[1]))
        if node.target is getattr:
            if isinstance(node.meta[_WRITTEN], Of):
                return Of(*args)
            return replace(args[0], path=(*args[0].path, f".{args[1]}"))
        if node.target == "size" and isinstance(args[0], Given) and len(args) == 2:
            return Size(*args)
        return Arithmetic(_SIGNS[node.target], args) if node.target in _SIGNS else None

    def _argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self._written[value]
        if isinstance(value, slice):
            return slice(*(self._argument(each) for each in (value.start, value.stop, value.step)))
        if isinstance(value, tuple | list):
            items = tuple(self._argument(each) for each in value)
            return Made(list if isinstance(value, list) else tuple, tuple(range(len(items))), items)
        if isinstance(value, dict):
            items = tuple(self._argument(each) for each in value.values())
            return Made(dict, tuple(value), items)
        return value


def _inputs(straight: Straight) -> list[str]:
    given = [each for each in leaves(straight) if isinstance(each, Given)]
    given += [each.of for each in leaves(straight) if isinstance(each, Size)]
    return list(dict.fromkeys(each.name for each in given))


def _function(target: str) -> Callable[..., Any]:
    owner: Any = importlib.import_module(target.partition(".")[0])
    for part in target.split(".")[1:]:
        owner = getattr(owner, part)
    function: Callable[..., Any] = owner
    return function


def _name(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    return str(node.target).replace("onboard.", "torch.ops.onboard.").partition(".default")[0]


def namespace_of(module: nn.Module) -> dict[str, Any]:
    """Return the names in the file of a module's class."""
    return vars(sys.modules[type(module).__module__])
