"""What a decoder layer of a kind is made of: its modules, in the order in which they come to their end."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from onboard.analysis.recorder import Recording
from onboard.analysis.spec import Block, LayerKind


def with_modules(kind: LayerKind, tiny: nn.Module, recording: Recording, blocks: Sequence[Block]) -> LayerKind:
    """Return a kind of layer with the modules of its first layer that ran, as far as they are blocks.

    `kind.path` is a path in the tiny model, and so are those of the recording.
    """
    classes, prefix = {block.class_name for block in blocks}, f"{kind.path}."
    inside = {
        path.removeprefix(prefix): type(tiny.get_submodule(path)).__name__
        for path in recording.modules
        if path.startswith(prefix)
    }
    return kind.model_copy(update={"modules": {name: cls for name, cls in inside.items() if cls in classes}})
