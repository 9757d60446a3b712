"""What decoder layers are made of: which are mixtures, and the modules of a kind, in the order of
their ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from onboard.analysis.multimodal import is_under
from onboard.analysis.recognise.recorder import Recording
from onboard.analysis.spec import LayerKind
from onboard.analysis.spec_blocks import Block
from onboard.errors import OnboardError
from onboard.hf.architecture import text_config


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


def layer_kinds(
    whole: nn.Module, tiny: nn.Module, recording: Recording, experts: set[str], eager: list[str]
) -> list[LayerKind]:
    """Group the checkpoint's decoder layers by kind; a path is that of the tiny model's first one
    that runs, if any.

    A window that all layers have is no field of theirs: the probe tells. Which layers are mixtures,
    where not all are, their modules tell: `experts` are the classes to look for.
    """
    windows = {call.window for call in recording.attention}
    names, small = (_layer_kind_names(model.config) for model in (whole, tiny))
    if set(names) == {"full_attention"} and windows and None not in windows:
        names, small = (["sliding_attention"] * len(item) for item in (names, small))
    modules = [item for item in tiny.named_modules() if not is_under(item[0], eager)]
    lists = {
        path: item for path, item in modules if isinstance(item, nn.ModuleList | nn.Sequential)
    }
    ran = [item for item in lists if any(each.startswith(f"{item}.") for each in recording.modules)]
    path = max(ran or lists, key=lambda item: len(list(lists[item].modules())), default="layers")
    names, small = (mark_mixtures(*pair, path, experts) for pair in ((names, whole), (small, tiny)))
    kinds: dict[str, LayerKind] = {}
    for index, name in enumerate(names):
        if name not in small:
            raise OnboardError(
                f"the small model has no layer of the kind {name}", hint="Report this config"
            )
        own = zip(_places(lists.get(path), len(small)), small, strict=True)
        paths = [f"{path}.{place}" for place, other in own if other == name]
        first = next((each for each in paths if each in recording.modules), paths[0])
        kinds.setdefault(name, LayerKind(name=name, layers=[], path=first)).layers.append(index)
    return list(kinds.values())


def _places(modules: nn.Module | None, count: int) -> list[int]:
    """Return the places of a number of layers in the list that holds them, in which an embedding
    may come before them, and a head behind: the modules of the class that it has so many of.
    """
    classes = [] if modules is None else [type(module) for module in modules.children()]
    own = [cls for cls in dict.fromkeys(classes) if classes.count(cls) == count]
    if len(classes) <= count or len(own) != 1:
        return list(range(count))
    return [place for place, cls in enumerate(classes) if cls is own[0]]


def _layer_kind_names(config: PretrainedConfig) -> list[str]:
    """Return the kind of each decoder layer, as the config's per-layer lists tell it."""
    config = text_config(config)
    layers = config.num_hidden_layers
    types = _per_layer(config, "layer_types") or ["full_attention"] * layers
    rope = _per_layer(config, "no_rope_layers") or [True] * layers
    return [
        str(kind) if turned else f"{kind}_no_rope" for kind, turned in zip(types, rope, strict=True)
    ]


def _per_layer(config: PretrainedConfig, name: str) -> list[Any] | None:
    value = getattr(config, name, None)
    return (
        list(value)
        if isinstance(value, list | tuple) and len(value) == config.num_hidden_layers
        else None
    )
