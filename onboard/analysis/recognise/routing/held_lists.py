"""Lists of experts inside a module that only holds them: its forward is not run, its owner takes the
experts out of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from onboard.analysis.recognise import REFUSED
from onboard.analysis.recognise.recorder import ModuleCall


def held_lists(module: nn.Module, call: ModuleCall) -> Iterator[tuple[str, str, nn.ModuleList]]:
    """Yield the name of each child that is not called and holds one list of modules, the path to the
    list, and the list.
    """
    holders = {
        name: lists[0]
        for name, child in module.named_children()
        if not isinstance(child, nn.ModuleList)
        and len(lists := _lists(child)) == 1
        and len(lists[0][1]) > 1
    }
    called = _called(module, call, list(holders)) if holders else set()
    for name, (path, experts) in holders.items():
        if name not in called:
            yield name, f"{name}.{path}", experts


def _lists(child: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    return [(name, x) for name, x in child.named_children() if isinstance(x, nn.ModuleList)]


def _called(module: nn.Module, call: ModuleCall, names: list[str]) -> set[str]:
    """Return the names of children that run in a call, all where it cannot be run again."""
    seen: set[str] = set()
    hooks = [
        module.get_submodule(name).register_forward_pre_hook(lambda *_, key=name: seen.add(key))
        for name in names
    ]
    try:
        with torch.no_grad():
            module(*call.args, **call.kwargs)
    except REFUSED:  # its inputs were changed while it ran
        return set(names)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
