"""A prompt with an image or a sound, made of random numbers where a checkpoint brings no processor.

What transformers' own towers take and give says how: the arguments of the method that makes
features of them, sizes in their config, and how many features come of it, each of which stands in
the place of one token.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from onboard.errors import OnboardError
from onboard.hf.text_tokens import text_tokens

_AROUND = (5, 4)
"""Tokens of text before and after."""


@dataclass(frozen=True)
class MediaPrompt:
    """A prompt's tokens, and what a processor would make of its image or sound."""

    kind: str
    ids: list[int]
    inputs: dict[str, torch.Tensor]

    def followed_by(self, count: int) -> dict[str, torch.Tensor]:
        """Return the inputs for the prompt with `count` tokens of text behind it."""
        return {
            name: torch.nn.functional.pad(value, (0, count))
            if value.shape == (1, len(self.ids))
            else value
            for name, value in self.inputs.items()
        }


def media_prompts(model: Any, dtype: torch.dtype) -> Iterator[MediaPrompt]:
    """Yield a prompt for each kind of input that a multimodal model of transformers has features
    of.

    Raises:
        OnboardError: the towers do not take what their config speaks of.
    """
    for kind, part, values in (
        ("image", "vision_config", _pixels),
        ("sound", "audio_config", _frequencies),
    ):
        method, arguments = _features(model, "audio" if kind == "sound" else kind)
        token = _placeholder(model.config, "audio" if kind == "sound" else kind)
        tower = getattr(model.config, part, None)
        if method is None or token is None or tower is None:
            continue
        inputs = {name: _cast(value, dtype) for name, value in values(tower, arguments).items()}
        yield _prompt(kind, inputs, _count(method, inputs, model), token, model)


def _prompt(
    kind: str, inputs: dict[str, torch.Tensor], count: int, token: int, model: Any
) -> MediaPrompt:
    draw, words = random.Random(2), text_tokens(model.config)
    before, after = (draw.choices(words, k=size) for size in _AROUND)
    ids = [*before, *[token] * count, *after]
    places = torch.tensor([[int(each == token) for each in ids]])
    asked = inspect.signature(model.forward).parameters
    return MediaPrompt(
        kind,
        ids,
        inputs
        | {name: places for name in ("token_type_ids", "mm_token_type_ids") if name in asked},
    )


def _features(model: Any, kind: str) -> tuple[Any, dict[str, inspect.Parameter]]:
    """Return the method that makes features, and its arguments; None where the model has none."""
    holders = [
        each
        for each in (getattr(model, "model", None), model)
        if hasattr(each, f"get_{kind}_features")
    ]
    if not holders:
        return None, {}
    method = getattr(holders[0], f"get_{kind}_features")
    return method, dict(inspect.signature(method).parameters)


def _placeholder(config: Any, kind: str) -> int | None:
    names = (f"{kind}_token_id", f"{kind}_token_index")
    return next(
        (value for name in names if (value := getattr(config, name, None)) is not None), None
    )


def _pixels(config: Any, arguments: Mapping[str, inspect.Parameter]) -> dict[str, torch.Tensor]:
    """Return an image: patches with their grid where the towers take one, else a square of the
    tower's size.
    """
    channels, patch = (
        _size(config, "num_channels", "in_channels", "in_chans"),
        _size(config, "patch_size"),
    )
    generator = torch.Generator().manual_seed(3)
    if "image_grid_thw" in arguments:
        height, width = (
            2 * _size(config, "spatial_merge_size"),
            4 * _size(config, "spatial_merge_size"),
        )
        features = channels * _size(config, "temporal_patch_size") * patch**2
        pixels = torch.randn(height * width, features, generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}
    size = _size(config, "image_size")
    pixels = torch.randn(1, channels, size, size, generator=generator)
    needed = arguments.get("image_sizes")
    sizes = (
        {"image_sizes": torch.tensor([[size, size]])}
        if needed is not None and _required(needed)
        else {}
    )
    return {"pixel_values": pixels, **sizes}


def _frequencies(config: Any, _: Mapping[str, inspect.Parameter]) -> dict[str, torch.Tensor]:
    """Return a sound: as many frames as two for each of the tower's positions, which a convolution
    halves.
    """
    bins, length = _size(config, "num_mel_bins"), 2 * _size(config, "max_source_positions")
    return {
        "input_features": torch.randn(1, bins, length, generator=torch.Generator().manual_seed(3))
    }


def _size(config: Any, *names: str) -> int:
    """Return a size of a tower's config, of a pair the first."""
    for name in names:
        if (value := getattr(config, name, None)) is not None:
            return int(value[0] if isinstance(value, list | tuple) else value)
    raise OnboardError(f"{type(config).__name__} has no {names[0]}")


def _required(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty


@torch.inference_mode()
def _count(method: Any, inputs: dict[str, torch.Tensor], model: Any) -> int:
    """Return how many features the towers make of the inputs."""
    device = model.get_input_embeddings().weight.device
    try:
        found = method(
            **{name: value.to(device) for name, value in inputs.items()}, return_dict=True
        )
    except (
        Exception
    ) as error:  # a tower's own code may raise anything for sizes that do not go together
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise OnboardError(
            f"{type(model).__name__} makes no features of random inputs: {reason}"
        ) from error
    features = getattr(found, "pooler_output", found)
    parts = features if isinstance(features, list | tuple) else [features]
    width = model.get_input_embeddings().weight.shape[-1]
    return int(sum(part.numel() for part in parts) // width)


def _cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() else value
