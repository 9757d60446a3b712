"""Small images and sounds for small towers: sizes that depend on one another stay consistent.

What relates them is in the full config: an image is so many patches a side, so many of which become
    one token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

SIDE = 8
"""Patches along a side of an image."""
FRAMES = 64
"""Positions that a sound has."""
_WINDOW = 2
"""Patches along a side of a window, after merging: fewer than an image has."""
_LISTED = 2
"""Layers that a list names, behind one that it does not name."""
_POOLING = 4
"""Patches that become one token where the full sizes do not tell."""

LAYER_COUNT = re.compile(
    r"(num_(hidden_)?|conf_num_hidden_|encoder_|decoder_|n_)?layers|depth|num_blocks"
)
_LAYER_LIST = re.compile(r"\w+_(indexes|indices)")
_TOKENS = re.compile(r"mm_tokens_per_image|image_seq_length")


def fit_tower(small: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a small tower that takes a small image or sound, in the relations of the
    `full` values.
    """
    return {
        **small,
        **_image(small, full),
        **_sound(small),
        **_layers(full),
        **_groups(small, full),
    }


def tokens_of_images(values: Mapping[str, Any], towers: Mapping[str, Any]) -> dict[str, int]:
    """Return how many tokens a small image becomes, by the multimodal model's fields that say so;
    `towers` are full ones.
    """
    sizes = [
        (first(tower.get("image_size")), first(tower.get("patch_size")))
        for tower in towers.values()
    ]
    patches = next(((image // patch) ** 2 for image, patch in sizes if image and patch), 0)
    names = [
        key
        for key, value in values.items()
        if _TOKENS.fullmatch(key) and type(value) is int and value > 0
    ]
    return {name: SIDE**2 // _pooling(patches, values[name]) for name in names if patches}


def _pooling(patches: int, tokens: int) -> int:
    """Return how many patches become one token."""
    return (
        patches // tokens
        if patches % tokens == 0 and SIDE**2 % (patches // tokens) == 0
        else _POOLING
    )


def _image(small: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
    patch, image, window = (
        first(full.get(key)) for key in ("patch_size", "image_size", "window_size")
    )
    if patch is None:
        return {}
    side, merged = SIDE * patch, patch * (first(full.get("spatial_merge_size")) or 1)
    pair = isinstance(full.get("image_size"), list | tuple)
    changes: dict[str, Any] = {"image_size": [side, side] if pair else side} if image else {}
    if window and window % merged == 0:  # a window of pixels
        changes["window_size"] = _WINDOW * merged
    return changes | {"patch_size": full["patch_size"]}


def _sound(small: Mapping[str, Any]) -> dict[str, int]:
    positions = small.get("max_source_positions")
    return {"max_source_positions": min(positions, FRAMES)} if type(positions) is int else {}


def _layers(full: Mapping[str, Any]) -> dict[str, Any]:
    """Lists of layers name the last ones, and one before them is left that they do not name."""
    lists = {
        key: len(value)
        for key, value in full.items()
        if _LAYER_LIST.fullmatch(key) and _are_indices(value)
    }
    if not lists:
        return {}
    counts = [
        key for key, value in full.items() if LAYER_COUNT.fullmatch(key) and type(value) is int
    ]
    count = 1 + min(_LISTED, max(lists.values()))
    named = {key: list(range(count - min(_LISTED, length), count)) for key, length in lists.items()}
    return {**dict.fromkeys(counts, count), **named}


def _groups(small: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, int]:
    """A projector may take several states as one that is as wide as the feed-forward layer: a
    multiple stays one.
    """
    wide, width, narrow = (
        full.get("intermediate_size"),
        full.get("hidden_size"),
        small.get("hidden_size"),
    )
    if not all(type(size) is int and size > 0 for size in (wide, width, narrow)) or wide % width:  # type: ignore[operator]
        return {}
    return {"intermediate_size": narrow * (wide // width)}  # type: ignore[operator]


def _are_indices(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(type(item) is int and item >= 0 for item in value)
    )


def first(size: Any) -> int | None:
    """Return a size, of a pair the first; None where it is none."""
    value = size[0] if isinstance(size, list | tuple) and size else size
    return value if type(value) is int and value > 0 else None
