"""The images and sounds of one prompt: named in its messages, then read and decoded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from onboard.errors import UsageError
from onboard.media.decoded_images import check_pixels, decode_image
from onboard.media.media_bytes import MediaBytes, Source, as_source, from_base64
from onboard.media.media_limits import MediaLimits
from onboard.media.wave_sounds import Sound, decode_sound

Kind = Literal["image", "audio"]
"""As chat templates call them."""
_NAMED: Mapping[str, tuple[Kind, str]] = {
    "image_url": ("image", "url"),
    "input_image": ("image", "image_url"),
    "image": ("image", "image"),
    "audio_url": ("audio", "url"),
    "input_audio": ("audio", "data"),
    "audio": ("audio", "audio"),
}
"""Type of a message's part -> what it is, and the key of its content: OpenAI's parts, and those of
transformers' templates.
"""


@dataclass(frozen=True)
class MediaPart:
    """An image or a sound that a prompt has, not read yet."""

    kind: Kind
    source: Any
    """A `Source`, or what is decoded already: an image of Pillow, a `Sound`."""
    is_base64: bool = False
    """Whether the source is a text in base64 without a URL around it."""


@dataclass
class PromptMedia:
    """What a prompt has besides text, in the order of its placeholders."""

    images: list[Any] = field(default_factory=list)
    """Images of Pillow."""
    sounds: list[Sound] = field(default_factory=list)


def media_part(part: Mapping[str, Any]) -> MediaPart | None:
    """Return the image or the sound that a part of a message is, None for any other part.

    Raises `UsageError` for one without a content.
    """
    kind_of = str(part.get("type"))
    if kind_of not in _NAMED:
        return None
    kind, key = _NAMED[kind_of]
    found = part.get(kind_of, part.get(key, part.get("url", part.get("path"))))
    if isinstance(found, MediaPart):
        return found
    if isinstance(found, Mapping):
        found = found.get(key, found.get("url"))
    if not found or isinstance(found, Mapping | list | bool | int | float):
        raise UsageError(f"a part of type {kind_of} has no {key}")
    return MediaPart(kind, found, is_base64=kind_of == "input_audio")


def split_media(
    messages: Iterable[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[MediaPart]]:
    """Return messages as a chat template reads them, and their images and sounds in order.

    A part of a message becomes `{"type": "image"}` or `{"type": "audio"}`; where there is one, the
    texts of all messages are parts, too. Without any, messages stay as they are.
    """
    given = [dict(each) for each in messages]
    found: list[MediaPart] = []
    for message in given:
        if isinstance(content := message.get("content"), list):
            message["content"] = [_placeholder(part, found) for part in content]
    if found:
        for message in given:
            if isinstance(content := message.get("content"), str):
                message["content"] = [{"type": "text", "text": content}]
    return given, found


def _placeholder(part: Any, found: list[MediaPart]) -> Any:
    if not isinstance(part, Mapping) or (one := media_part(part)) is None:
        return part
    found.append(one)
    return {"type": one.kind}


def read_media(parts: Sequence[MediaPart], limits: MediaLimits) -> PromptMedia:
    """Read and decode a prompt's images and sounds.

    Raises `UsageError` for one that cannot be had, or is no image or sound within the limits.
    """
    reader, media = MediaBytes(limits), PromptMedia()
    pixels, seconds = limits.max_pixels, limits.max_sound_seconds
    for part in parts:
        content = _content(part, reader)
        if part.kind == "image":
            media.images.append(_image(content, pixels))
            check_pixels(media.images, limits.max_pixels)
            pixels = limits.max_pixels - sum(each.size[0] * each.size[1] for each in media.images)
        else:
            media.sounds.append(_sound(content, seconds))
            seconds -= media.sounds[-1].seconds
    return media


def _content(part: MediaPart, reader: MediaBytes) -> Any:
    """Return the bytes of an image or a sound, or what is decoded already."""
    if not isinstance(part.source, Source):
        reader.counted()
        return part.source
    if part.is_base64 and isinstance(part.source, str):
        return reader.read(from_base64(part.source, reader.limits.max_media_bytes))
    return reader.read(part.source)


def _image(content: Any, most: int) -> Any:
    if isinstance(content, bytes):
        return decode_image(content, most)
    if not hasattr(content, "convert"):
        raise UsageError(f"an image is {content!r:.60}", hint="Give a file, a URL or a PIL image")
    return content.convert("RGB")


def _sound(content: Any, most: float) -> Sound:
    if isinstance(content, bytes):
        return decode_sound(content, most)
    if not isinstance(content, Sound):
        raise UsageError(f"a sound is {content!r:.60}", hint="Give a file, a URL or a Sound")
    return content


def as_parts(given: Mapping[str, Any] | Sequence[MediaPart]) -> list[MediaPart]:
    """Return what vLLM's `multi_modal_data` names: `image` and `audio`, one or a list of each.

    Texts are URLs, or names of files. Raises `UsageError` for other keys.
    """
    if not isinstance(given, Mapping):
        return list(given)
    kinds: tuple[Kind, ...] = ("image", "audio")
    if unknown := sorted(set(map(str, given)) - set(kinds)):
        raise UsageError(
            f"multi_modal_data has {unknown[0]!r:.60}", hint="image and audio are read"
        )
    return [
        MediaPart(kind, as_source(each) if isinstance(each, str) else each)
        for kind in kinds
        for each in _listed(given.get(kind))
    ]


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
