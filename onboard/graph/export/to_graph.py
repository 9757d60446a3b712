"""From a module whose parameters have no storage to a graph module, through torch.export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from onboard.graph.export.functional import replace_in_place
from onboard.graph.export.layer_kinds import Repeated, shortened
from onboard.graph.export.stamp import check_repeated, stamp
from onboard.graph.fx import attribute, nodes_of, replace_with
from onboard.graph.shapes import fake_like, said_linears
from onboard.graph.sharding.file_hints import take_hints

_NO_TRACES = "do_not_emit_stack_traces"


def export_to_graph(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    dynamic_shapes: Mapping[str, Any],
    device: torch.device,
    *,
    strict: bool = False,
    clone_state_dict: bool = False,
    repeated: Repeated | None = None,
    complete: bool = True,
) -> fx.GraphModule:
    """Export `model` for `device` and return a graph module that holds the model's own parameters
    and buffers.

    Its placeholders are the keys of `inputs`; it returns the first tensor of the model's output
    alone (the logits). Attribute names, persistence of buffers and ties are the model's:
    `meta["tied_parameters"]` maps each further name of a parameter to the name that the graph
    reads, and `meta["unread_parameters"]` names those of the model that it does not read at all.
    Nothing is computed and no weight memory is taken.

    What is `repeated` is traced a few times and copied; unless `complete`, it is not copied, after
    all checks that it could be. `StampError` says that this model has to be exported in full.
    """
    mode = FakeTensorMode(
        shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True, export=True
    )
    kept = repeated.kept() if repeated else {}
    with (
        shortened(model, kept),
        _fake_state(model, mode, device),
        torch.no_grad(),
        _without_stack_traces(),
    ):
        args = tuple(fake_like(mode, value, device) for value in inputs.values())
        with said_linears():
            program = torch.export.export(
                model, args, dynamic_shapes=dict(dynamic_shapes), strict=strict
            )
        _remove_detach(program.graph_module)
        replace_in_place(program.graph_module)
        functionalize = _mutates(program.graph)
        if functionalize:
            # An empty table keeps most operators whole.
            program = program.run_decompositions({})
        exported = program.module(check_guards=False)
    assert isinstance(exported, fx.GraphModule)
    if functionalize:
        _undo_view_decompositions(exported)
    if repeated:
        (stamp if complete else check_repeated)(exported, repeated)
    gm = _rehomed(exported, model, clone=clone_state_dict)
    take_hints(gm)
    return gm


@contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Have nodes not say which lines made them, where torch can: nobody reads it, and it takes a
    fifth of the time.
    """
    before = getattr(fx.config, _NO_TRACES, None)  # torch 2.11 has no such setting
    if before is None:
        yield
        return
    setattr(fx.config, _NO_TRACES, True)
    try:
        yield
    finally:
        setattr(fx.config, _NO_TRACES, before)


@contextmanager
def _fake_state(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> Iterator[None]:
    """Show the model's tensors as fake ones on `device`, so that the graph is traced for that
    device.
    """
    fakes: dict[int, torch.Tensor] = {}
    tables: list[MutableMapping[str, Any]] = [
        table for module in model.modules() for table in (module._parameters, module._buffers)
    ]
    originals = [dict(table) for table in tables]
    for table in tables:
        for name, tensor in table.items():
            if tensor is not None:
                table[name] = fakes.setdefault(id(tensor), _fake(mode, tensor, device))
    try:
        yield
    finally:
        for table, original in zip(tables, originals, strict=True):
            table.update(original)


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    fake = fake_like(mode, tensor, device)
    return nn.Parameter(fake, requires_grad=False) if isinstance(tensor, nn.Parameter) else fake


def _remove_detach(gm: fx.GraphModule) -> None:
    """Remove `detach_`, with which every constant made in `forward` begins: nothing here needs
    gradients.
    """
    for node in nodes_of(gm, torch.ops.aten.detach_, torch.ops.aten.detach):
        replace_with(node, node.args[0])  # type: ignore[arg-type]


def _undo_view_decompositions(gm: fx.GraphModule) -> None:
    """Bring a functional graph back to the form of others: making it so turns reshape into clone
    and view.

    Nothing is mutated any more, so a clone is its input, as long as reshapes copy where they must.
    """
    for node in nodes_of(gm, torch.ops.aten._unsafe_view, torch.ops.aten.view):
        node.target = torch.ops.aten.reshape.default
    for node in nodes_of(gm, torch.ops.aten.clone):
        replace_with(node, node.args[0])  # type: ignore[arg-type]


def _mutates(graph: fx.Graph) -> bool:
    schemas = (getattr(node.target, "_schema", None) for node in graph.nodes)
    return any(schema is not None and schema.is_mutable for schema in schemas)


def _rehomed(exported: fx.GraphModule, model: nn.Module, *, clone: bool) -> fx.GraphModule:
    """Build a plain graph module from an exported one, with the model's tensors in place of the
    fake ones.
    """
    graph = exported.graph
    _return_first_tensor(graph)
    _remove_dropout(exported)
    graph.set_codegen(fx.graph.CodeGen())
    names, tensors = _state(model, clone=clone)
    tied = {name: first for name, first in names.items() if name != first}
    for node in graph.nodes:
        if node.op == "get_attr":
            node.target = names.get(node.target, node.target)
    read = dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr")
    root = {name: tensors[name] if name in tensors else attribute(exported, name) for name in read}
    gm = fx.GraphModule(root, graph)
    _add_ties(gm, tied)
    _mark_non_persistent(gm, model)
    gm.meta["tied_parameters"] = tied
    used = {node.target for node in graph.nodes if node.op == "get_attr" and node.users}
    gm.meta["unread_parameters"] = {name for name in model.state_dict() if names[name] not in used}
    return gm.eval()


def _return_first_tensor(graph: fx.Graph) -> None:
    output = graph.output_node()
    leaves: list[fx.Node] = []
    fx.map_arg(output.args, leaves.append)
    assert leaves, "the exported model returns no tensor"
    output.args = (leaves[0],)
    output.meta["val"] = leaves[0].meta.get("val")


def _remove_dropout(gm: fx.GraphModule) -> None:
    """Remove dropout, which does nothing in evaluation mode."""
    for node in nodes_of(gm, torch.ops.aten.dropout):
        assert not node.args[2], "the model was exported in training mode"
        replace_with(node, node.args[0])  # type: ignore[arg-type]


def _state(model: nn.Module, *, clone: bool) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Return the first name of each parameter and buffer by name, and the tensors by first name."""
    names: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        names[name] = first.setdefault(id(tensor), name)
        tensors.setdefault(names[name], _clone(tensor) if clone and names[name] == name else tensor)
    return names, tensors


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().clone()
    return nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy


def _add_ties(gm: fx.GraphModule, tied: Mapping[str, str]) -> None:
    """Register every further name of a tensor that the graph reads, as the same object."""
    for name, first in tied.items():
        path, _, leaf = name.rpartition(".")
        if path and not _has(gm, path):
            gm.add_submodule(path, nn.Module())
        tensor = attribute(gm, first)
        register = (
            nn.Module.register_parameter
            if isinstance(tensor, nn.Parameter)
            else nn.Module.register_buffer
        )
        register(gm.get_submodule(path), leaf, tensor)


def _has(gm: nn.Module, path: str) -> bool:
    return any(name == path for name, _ in gm.named_modules(remove_duplicate=False))


def _mark_non_persistent(gm: fx.GraphModule, model: nn.Module) -> None:
    """Keep out of the state what is not in the model's: its non-persistent buffers, and constants
    made in `forward`.
    """
    persistent = set(model.state_dict())
    for path, module in gm.named_modules():
        names = {name for name in module._buffers if f"{path}.{name}".lstrip(".") not in persistent}
        module._non_persistent_buffers_set |= names
