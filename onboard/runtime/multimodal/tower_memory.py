"""How much memory the towers of a multimodal model take, found without computing anything.

Weights are counted to the byte. What a tower takes while it reads is found on tensors without
values: small images or sounds are followed through the model up to its text model, and the largest
one that the default limits allow (`MediaLimits`) is told by these, as towers take memory in
proportion to what they read, and to its square where attention is written out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from onboard.cache.budget import TowerMemory
from onboard.errors import OnboardError, UsageError
from onboard.graph.peak import StorageMeter
from onboard.media.media_limits import MediaLimits
from onboard.media.prompt_media import Kind, PromptMedia
from onboard.media.wave_sounds import Sound
from onboard.runtime.kept_document import KeptDocument

if TYPE_CHECKING:
    from onboard.runtime.multimodal.towers import Towers

_META = torch.device("meta")
_SMALL: dict[Kind, tuple[float, float]] = {"image": (256, 512), "audio": (5, 10)}
"""Pixels of a small image's sides, and seconds of a short sound."""


@dataclass(frozen=True)
class _Read:
    """What a processor makes of a prompt with one image or sound."""

    tokens: list[int]
    inputs: dict[str, Any]

    @property
    def size(self) -> int:
        """Number of values that the towers read."""
        return sum(each.numel() for each in _floats(self.inputs))


def kept_tower_memory(towers: Towers) -> tuple[TowerMemory, list[str]]:
    """Return `tower_memory`, from the user's cache if it was found before for the same files."""
    context = towers.context
    kept = KeptDocument(
        context.factory.checkpoint,
        context.runtime,
        gpu=context.device.type == "cuda",
        root=context.factory.root or Path(),
        folder="towers",
    )
    if (document := kept.read()) is not None:
        return TowerMemory(**document["memory"]), document["facts"]
    found, facts = tower_memory(towers)
    kept.write({"memory": asdict(found), "facts": facts})
    return found, facts


def tower_memory(towers: Towers) -> tuple[TowerMemory, list[str]]:
    """Return what towers take, and a fact where not all of it can be told."""
    weights = towers.num_bytes
    try:
        return TowerMemory(weights, max(_activations(towers), default=0)), []
    except OnboardError as error:
        reason = f"{error.message}"[:200]
        return TowerMemory(weights, 0), [
            f"memory leaves out what towers take while they read images or sound: {reason}"
        ]


def _activations(towers: Towers) -> Iterator[int]:
    """Yield the bytes that the largest image takes, and the longest sound, of those that the model
    reads.
    """
    limits = MediaLimits()
    most: dict[Kind, float] = {
        "image": math.isqrt(limits.max_pixels),
        "audio": limits.max_sound_seconds,
    }
    for kind, small in _SMALL.items():
        try:
            first, second = (_read(towers, kind, size) for size in small)
        except UsageError:  # not read by this model
            continue
        if first.size:
            low, high = (towers.traced_peak(each.tokens, each.inputs) for each in (first, second))
            size = _largest(towers, kind, small[1], most[kind]).size
            yield _extrapolated((first.size, second.size), (low, high), size)


def _largest(towers: Towers, kind: Kind, least: float, most: float) -> _Read:
    """Return what is read of the largest image, or sound, whose prompt is not too long for the run."""
    found = _read(towers, kind, most)
    while len(found.tokens) > towers.context.runtime.max_seq_len and most > least:
        most /= math.sqrt(2)
        found = _read(towers, kind, most)
    return found


def _read(towers: Towers, kind: Kind, size: float) -> _Read:
    """Return what the processor makes of a square image of `size` pixels a side, or of a sound of
    `size` seconds, without anything on it.
    """
    from PIL import Image

    processor = towers.processor
    if kind == "image":
        media = PromptMedia(images=[Image.new("RGB", (round(size), round(size)))])
    else:
        rate = processor.sound_rate
        media = PromptMedia(sounds=[Sound(np.zeros(round(size * rate), np.float32), rate)])
    return _Read(*processor.prepare(processor.placeholder(kind), media))


def _extrapolated(sizes: tuple[int, int], peaks: tuple[int, int], size: int) -> int:
    """Return the bytes for `size` values by those for two smaller sizes: linear and square in
    them.
    """
    (one, two), (low, high) = sizes, peaks
    if one == two:
        return math.ceil(size * max(peaks) / two)
    square = max((high / two - low / one) / (two - one), 0.0)
    return math.ceil(size * (high / two + square * (size - two)))


def _places(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return indices of which masks are the places where they are set."""
    found: list[torch.Tensor | None] = []
    for each in indices:
        is_mask = each is not None and each.dtype == torch.bool and not each.is_meta
        found += each.nonzero(as_tuple=True) if is_mask and each is not None else [each]
    return found


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _floats(inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    tensors = (each for each in inputs.values() if isinstance(each, torch.Tensor))
    return [each for each in tensors if each.is_floating_point()]


class ShapesAlone(StorageMeter):  # type: ignore[no-untyped-call]
    """Follows what has no values: a tensor that meets one loses its own. Whole numbers that are put
    beside it keep theirs, since sizes depend on them.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        leaves = pytree.tree_leaves(given)
        if any(map(_is_meta, leaves)):
            if func is torch.ops.aten.index.Tensor:
                args = (args[0], _places(args[1]))
                given = (args, {})
            given = pytree.tree_map_only(torch.Tensor, lambda each: each.to(_META), given)
        elif any(isinstance(each, torch.device) and each == _META for each in leaves):
            own, named = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), given)
            made = func(*own, **named)
            return self.noted(made.to(_META) if made.is_floating_point() else made)
        return super().__torch_dispatch__(func, types, *given)
