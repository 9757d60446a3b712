"""Small helpers on FX graphs that every transform uses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from onboard.ops.library import NAMESPACE

Target = Callable[..., Any]


def is_op(node: Any, *targets: Target) -> bool:
    """Tell whether `node` calls one of `targets`; an overload packet stands for each of its
    overloads.
    """
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    packet = node.target.overloadpacket if isinstance(node.target, OpOverload) else None
    return any(
        node.target is target or (packet is not None and packet is target) for target in targets
    )


def nodes_of(gm: fx.GraphModule, *targets: Target) -> list[fx.Node]:
    """Return the nodes that call one of `targets` (overloads or packets), in graph order."""
    return [node for node in gm.graph.nodes if is_op(node, *targets)]


def op_name(node: fx.Node) -> str:
    """Return the name of the operator that a node calls, without its overload, "" when it calls
    none.
    """
    packet = getattr(node.target, "overloadpacket", None) if node.op == "call_function" else None
    return packet.__name__ if packet is not None else ""


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of an operator call by schema name, defaults filled in; without the
    `hints` of this package's.
    """
    ours = getattr(node.target, "namespace", "") == NAMESPACE
    return _given(node, lambda argument: not (ours and argument.kwarg_only))


def hints(node: fx.Node) -> dict[str, Any]:
    """Return what a call of an operator of this package says of ranks: its keyword-only arguments."""
    return _given(node, lambda argument: argument.kwarg_only)


def _given(node: fx.Node, wanted: Callable[[Any], bool]) -> dict[str, Any]:
    assert isinstance(node.target, OpOverload), f"{node} does not call an operator"
    values: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):
        if not wanted(argument):
            continue
        if position < len(node.args):
            values[argument.name] = node.args[position]
        else:
            values[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return values


def writes(node: fx.Node) -> bool:
    """Tell whether a node's operator writes to one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def only_user(node: fx.Node) -> fx.Node | None:
    """Return the single user of `node`, None when it has several or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def replace_with(node: fx.Node, new: fx.Node) -> None:
    """Let every user of `node` use `new` instead, and erase `node`; `new` has its shape if it had
    none of its own.
    """
    if "val" in node.meta:
        new.meta.setdefault("val", node.meta["val"])
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def call(
    gm: fx.GraphModule, before: fx.Node, target: Target, *args: Any, like: fx.Node, **kwargs: Any
) -> fx.Node:
    """Insert a call before the node `before`; provenance (module stack, stack trace) is copied from
    `like`.
    """
    with gm.graph.inserting_before(before):
        node = gm.graph.call_function(target, args, kwargs)
    node.meta.update({key: value for key, value in like.meta.items() if key in _PROVENANCE})
    return node


_PROVENANCE = ("nn_module_stack", "source_fn_stack", "stack_trace", "from_node")


def attribute(gm: nn.Module, target: str) -> Any:
    """Return what a dotted attribute path of `gm` holds."""
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value


def attr_tensor(gm: fx.GraphModule, node: Any) -> torch.Tensor | None:
    """Return the parameter or buffer that a `get_attr` node reads, None for any other node."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value = attribute(gm, str(node.target))
    return value if isinstance(value, torch.Tensor) else None


def known_constant(node: fx.Node) -> torch.Tensor | None:
    """Return the values that a node's code names, as the -1 of `x[:, [-1]]`; None for others."""
    source = node.all_input_nodes[0] if is_op(node, torch.ops.aten.lift_fresh_copy) else node
    owner = node.graph.owning_module
    found = None if owner is None else attr_tensor(owner, source)
    return None if found is None or found.is_meta or isinstance(found, nn.Parameter) else found


def ancestors(roots: Iterable[fx.Node], given: Container[fx.Node] = ()) -> set[fx.Node]:
    """Return `roots` and every node that they are computed from when those in `given` are not
    computed.
    """
    seen: set[fx.Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending.extend([] if node in given else node.all_input_nodes)
    return seen


def placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the graph's inputs, in call order."""
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def fake_mode(gm: fx.GraphModule) -> FakeTensorMode:
    """Return the fake tensor mode in which the graph's shapes are symbolic; a new one when it has
    none yet.
    """
    for node in placeholders(gm):
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if isinstance(mode, FakeTensorMode):
            return mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def add_placeholder(gm: fx.GraphModule, name: str, example: torch.Tensor) -> fx.Node:
    """Add an input after the existing ones (or return the one of that name).

    `example` gives dtype, device and shape; its dimensions become dynamic except those of size 0 or
    1.
    """
    existing = placeholders(gm)
    for node in existing:
        if node.target == name:
            return node
    with gm.graph.inserting_after(existing[-1]) if existing else gm.graph.inserting_before():
        node = gm.graph.placeholder(name)
    node.meta["val"] = fake_mode(gm).from_tensor(example)
    return node


def graph_modules(module: nn.Module) -> Iterator[tuple[str, fx.GraphModule]]:
    """Yield the outermost graph modules in `module` with their paths ("" for `module` itself), each
    once: what runs a graph in several ways has it at several places.
    """
    seen: set[int] = set()
    for path, gm in _graph_modules(module):
        if id(gm) not in seen:
            seen.add(id(gm))
            yield path, gm


def _graph_modules(module: nn.Module) -> Iterator[tuple[str, fx.GraphModule]]:
    if isinstance(module, fx.GraphModule):
        yield "", module
        return
    for name, child in module.named_children():
        for path, gm in _graph_modules(child):
            yield f"{name}.{path}".rstrip("."), gm


def set_submodule(module: nn.Module, path: str, new: nn.Module) -> nn.Module:
    """Put `new` at `path` and return the root module, which is `new` itself when the path is
    empty.
    """
    if not path:
        return new
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, new)
    return module


def copy_graphs(module: nn.Module) -> nn.Module:
    """Return a copy of `module` with graphs of its own that shares every parameter and buffer."""
    if isinstance(module, fx.GraphModule):
        return _copy_graph_module(module)
    twin = copy.copy(module)
    twin._modules = {name: child and copy_graphs(child) for name, child in module._modules.items()}
    twin._parameters, twin._buffers = dict(module._parameters), dict(module._buffers)
    return twin


def _copy_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    result = graph.graph_copy(gm.graph, val_map={})
    graph.output(result).meta.update(gm.graph.output_node().meta)
    twin = fx.GraphModule(nn.Module(), fx.Graph(), type(gm).__name__)
    for name, child in gm._modules.items():
        twin._modules[name] = child and copy_graphs(child)
    twin._parameters.update(gm._parameters)
    twin._buffers.update(gm._buffers)
    twin._non_persistent_buffers_set = set(gm._non_persistent_buffers_set)
    twin.meta = copy.deepcopy(gm.meta)  # the weight plan, which transforms edit in place
    twin.graph = graph
    return twin.train(gm.training)
