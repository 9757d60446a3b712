"""What a checkpoint's config says about its size, by the names of its own config class."""

from __future__ import annotations

from typing import Any

from onboard.analysis.spec import LayerKind, ModelSpec


def native_values(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a parsed config.json under their usual names, with the defaults of the
    config class.

    The class knows how an architecture calls a value (`n_positions` for `max_position_embeddings`)
    and what it is when config.json leaves it out. A class that transformers does not know adds
    nothing.
    """
    from transformers import CONFIG_MAPPING

    from onboard.hf.architecture import text_config
    from onboard.hf.json_floats import json_floats

    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        return dict(config)
    native = text_config(CONFIG_MAPPING[model_type].from_dict(json_floats(dict(config))))
    values: dict[str, Any] = native.to_dict()
    return values | {name: getattr(native, own, None) for name, own in native.attribute_map.items()}


def max_positions(config: dict[str, Any]) -> int | None:
    """Return how many positions the model was made for, or None when its config sets no bound."""
    value = native_values(config).get("max_position_embeddings")
    return value if isinstance(value, int) and value > 0 else None


def layer_kinds(spec: ModelSpec) -> list[LayerKind]:
    """Return the spec's kinds of layers with the layers of the checkpoint, of which the spec may
    show the first few.

    Layers are of one kind when every list in the config that has an entry for each layer has equal
    ones for them; kinds come in the order of their first layer, there and in the spec.
    """
    values = native_values(spec.config) | (spec.repository.native if spec.repository else {})
    total = values.get("num_hidden_layers")
    shown = sum(len(kind.layers) for kind in spec.layer_kinds)
    if not isinstance(total, int) or total == shown:
        return spec.layer_kinds
    lists = [value for value in values.values() if isinstance(value, list) and len(value) == total]
    groups: dict[str, list[int]] = {}
    for layer in range(total):
        groups.setdefault(repr([value[layer] for value in lists]), []).append(layer)
    # No lists: the first layers are a period of the pattern
    if len(groups) != len(spec.layer_kinds):
        return [_repeated(kind, shown, total) for kind in spec.layer_kinds]
    kinds = zip(spec.layer_kinds, groups.values(), strict=True)
    return [kind.model_copy(update={"layers": layers}) for kind, layers in kinds]


def _repeated(kind: LayerKind, period: int, total: int) -> LayerKind:
    return kind.model_copy(
        update={"layers": [layer for layer in range(total) if layer % period in kind.layers]}
    )
