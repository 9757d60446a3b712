"""What decoder layers are made of: which are mixtures, and the modules of a kind, in the order of
their ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
    layer = dict(tiny.named_modules()).get(kind.path)
    return kind.model_copy(
        update={
            "modules": {name: cls for name, cls in inside.items() if cls in classes},
            "written_out": type(layer).__module__.startswith("torch."),
        }
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


_Parts = frozenset[tuple[str, str]]
"""Name and class of each module that a layer holds itself."""
_Called = dict[tuple[str, _Parts], str]
"""What a layer is called, by its name in the config and what it holds."""


def _parts(layer: nn.Module) -> _Parts:
    return frozenset((name, type(module).__name__) for name, module in layer.named_children())


def _names_by_parts(layers: Iterable[tuple[str, nn.Module]]) -> _Called:
    """Return what layers of one name are called that hold other modules than others of that name:
    by what they alone have, where the config tells no kinds apart, else with that behind the name.
    """
    found: dict[str, list[_Parts]] = {}
    for name, parts in dict.fromkeys((name, _parts(layer)) for name, layer in layers):
        found.setdefault(name, []).append(parts)
    return {
        (name, parts): f"{name}_{own}" if len(found) > 1 else own
        for name, groups in found.items()
        for parts in groups
        if (own := _own_part(parts, [other for other in groups if other is not parts]))
    }


def _own_part(parts: _Parts, others: list[_Parts]) -> str:
    """Return the module that a layer alone has, by its name or else its class; empty where it has
    none of its own, or there are no others.
    """
    if not others:
        return ""
    taken = {part for other in others for part in other}
    own, names = sorted(parts - taken), {name for name, _ in taken}
    named = (name for name, _ in own if name not in names and not name.isdigit())
    return next(named, own[0][1] if own else "")


def _that_ran(
    names: list[str], layers: list[nn.Module], tiny: nn.Module, recording: Recording
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of the tiny model, by their names, in which a module ran."""
    ran = {tiny.get_submodule(path) for path in recording.modules}
    for name, layer in zip(names, layers, strict=False):
        if not ran.isdisjoint(layer.modules()):
            yield name, layer


def _renamed(names: list[str], layers: list[nn.Module], called: _Called) -> list[str]:
    """Return the names of layers' kinds, those with parts of their own by what they are called."""
    if not layers:
        return names
    pairs = zip(names, layers, strict=True)
    return [called.get((name, _parts(layer)), name) for name, layer in pairs]


def _layers(model: nn.Module, path: str, count: int) -> list[nn.Module]:
    """Return the decoder layers in a list, or none where it holds another number."""
    held = dict(model.named_modules()).get(path)
    layers = [] if held is None else list(held.children())
    places = _places(held, count)
    return [layers[place] for place in places] if len(layers) >= count == len(places) else []


def layer_kinds(
    whole: nn.Module, tiny: nn.Module, recording: Recording, experts: set[str], eager: list[str]
) -> list[LayerKind]:
    """Group the checkpoint's decoder layers by kind; a path is that of the tiny model's first one
    that runs, if any.

    A window that all layers have is no field of theirs: the probe tells. Which layers are mixtures,
    where not all are, their modules tell: `experts` are the classes to look for; and which are
    others than the config's lists say.
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
    layers = _layers(tiny, path, len(small))
    called = _names_by_parts(_that_ran(small, layers, tiny, recording))
    names = _renamed(names, _layers(whole, path, len(names)), called)
    small = _renamed(small, layers, called)
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
