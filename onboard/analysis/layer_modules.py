"""What decoder layers are made of: which are mixtures, and the modules of a kind, in the order of
their ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from onboard.analysis.recognise.recorder import Recording
from onboard.analysis.spec import LayerKind
from onboard.analysis.spec_blocks import Block


def with_modules(
    kind: LayerKind, tiny: nn.Module, recording: Recording, blocks: Sequence[Block]
) -> LayerKind:
    """Return a kind of layer with the modules of its first layer that ran, as far as they are
    blocks.

    `kind.path` is a path in the tiny model, and so are those of the recording.
    """
    classes, prefix = {block.class_name for block in blocks}, f"{kind.path}."
    inside = {
        path.removeprefix(prefix): type(tiny.get_submodule(path)).__name__
        for path in recording.modules
        if path.startswith(prefix)
    }
    return kind.model_copy(
        update={"modules": {name: cls for name, cls in inside.items() if cls in classes}}
    )


def mark_mixtures(names: list[str], model: nn.Module, path: str, experts: set[str]) -> list[str]:
    """Return the names of layers' kinds, with "_moe" after those of mixtures where there are other
    layers, too.
    """
    if not experts:
        return names
    layers = list(model.get_submodule(path).children())
    mixed = [
        any(type(module).__name__ in experts for module in layer.modules()) for layer in layers
    ]
    if all(mixed) or len(mixed) != len(names):
        return names
    return [
        f"{name}_moe" if is_mixed else name for name, is_mixed in zip(names, mixed, strict=True)
    ]
