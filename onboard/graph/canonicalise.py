"""Canonicalisation of a graph: dead code, unused tensors, order, generated code."""

from __future__ import annotations

from torch import fx, nn

from onboard.graph.fx import attribute
from onboard.graph.weight_load.parameters import leave_unread


def clean_up(gm: fx.GraphModule) -> None:
    """Remove dead nodes, then parameters, buffers and modules that the graph does not read; check
    and recompile.
    """
    # An unused random result is as dead as any other.
    gm.graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=False))
    _drop_unused_tensors(gm)
    _drop_empty_modules(
        gm, {str(node.target) for node in gm.graph.nodes if node.op in ("call_module", "get_attr")}
    )
    gm.graph.lint()
    gm.recompile()


def _drop_unused_tensors(gm: fx.GraphModule) -> None:
    """Remove them; checkpoints have those of the model's buffers that it saves (a mask)."""
    # By identity, not by name: a tied parameter keeps all of its names while one of them is read.
    used = {id(attribute(gm, str(node.target))) for node in gm.graph.nodes if node.op == "get_attr"}
    saved = (
        gm.state_dict(keep_vars=True).keys()
        - dict(gm.named_parameters(remove_duplicate=False)).keys()
    )
    for module in _own_modules(gm):
        for table in (module._parameters, module._buffers):
            for name in [
                name
                for name, tensor in table.items()
                if tensor is not None and id(tensor) not in used
            ]:
                delattr(module, name)
    leave_unread(gm, saved - gm.state_dict(keep_vars=True).keys())


def _drop_empty_modules(module: nn.Module, used: set[str], path: str = "") -> None:
    """Remove descendants that hold no tensors and that the graph (the paths in `used`) does not
    name.
    """
    for name, child in list(module.named_children()):
        child_path = f"{path}{name}"
        if child_path in used:
            continue
        _drop_empty_modules(child, used, f"{child_path}.")
        if not (child._modules or child._parameters or child._buffers) or isinstance(
            child, fx.GraphModule
        ):
            delattr(module, name)


def _own_modules(module: nn.Module) -> list[nn.Module]:
    """Return `module` and its descendants, stopping at nested graphs (bodies of higher-order
    operators).
    """
    children = [child for child in module.children() if not isinstance(child, fx.GraphModule)]
    return [module, *(nested for child in children for nested in _own_modules(child))]
