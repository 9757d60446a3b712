"""Images as pixels, decoded by Pillow once their sizes are known and within bounds."""

from __future__ import annotations

import struct
from io import BytesIO
from typing import Any

from onboard.errors import UsageError

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_MOST_SCANS = 100
"""Of a JPEG: each is a pass over all pixels, and encoders write ten."""
_LONGEST_SIDE = 200
"""Times the shortest one: processors that bring the shortest to a size enlarge the other alike."""
_SCAN = b"\xff\xda"


def decode_image(content: bytes, most_pixels: int) -> Any:
    """Return an image of Pillow in RGB, turned as its EXIF data say.

    Raises `UsageError` for one that is broken, animated, too large, or of another format.
    """
    pillow = _pillow()
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        _check_webp(content, most_pixels)  # Pillow makes room for the pixels as it opens one
    if content.count(_SCAN) > _MOST_SCANS:
        raise UsageError(f"an image has more than {_MOST_SCANS} scans", hint="Save it anew")
    try:
        with pillow.Image.open(BytesIO(content), formats=_FORMATS) as image:
            _check_size(image.width, image.height, most_pixels)
            if getattr(image, "is_animated", False):
                raise _animated()
            image.load()
            return pillow.ImageOps.exif_transpose(image).convert("RGB")
    except UsageError:
        raise
    except pillow.Image.DecompressionBombError:  # a limit of Pillow's own, above ours
        raise UsageError(f"an image has more pixels than the {most_pixels:,} taken") from None
    except pillow.UnidentifiedImageError:
        raise UsageError(
            "an image is in no format that is read", hint=f"Save it as one of {', '.join(_FORMATS)}"
        ) from None
    except Exception as error:  # whatever a damaged file makes a decoder raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise UsageError(f"an image is broken ({reason})") from None


def check_pixels(images: list[Any], most: int) -> None:
    """Raise `UsageError` where images, of Pillow, have more pixels together than `most`."""
    total = sum(image.size[0] * image.size[1] for image in images)
    if total > most:
        raise UsageError(
            f"the images of a prompt have {total:,} pixels, and {most:,} are taken",
            hint="Make them smaller",
        )


def _check_size(width: int, height: int, most: int) -> None:
    if width < 1 or height < 1:
        raise UsageError(f"an image has {width} x {height} pixels")
    if width * height > most:
        raise UsageError(
            f"an image has {width:,} x {height:,} pixels, and {most:,} are taken",
            hint="Make it smaller",
        )
    if max(width, height) > _LONGEST_SIDE * min(width, height):
        raise UsageError(
            f"an image has {width:,} x {height:,} pixels",
            hint=f"Its longer side may have {_LONGEST_SIDE} times its shorter one's",
        )


def _animated() -> UsageError:
    return UsageError("an image is animated, and one picture is taken", hint="Send one frame of it")


def _check_webp(content: bytes, most: int) -> None:
    """Read an image's size and kind from the first chunk (RFC 9649, sections 2.5 to 2.7)."""
    kind, data = content[12:16], content[20:30]
    if len(data) < 10:
        raise UsageError("an image is broken (it ends in its header)")
    if kind == b"VP8X":
        if data[0] & 2:
            raise _animated()
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (4, 7))
    elif kind == b"VP8L":
        bits = int.from_bytes(data[1:5], "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    else:
        width, height = (size & 0x3FFF for size in struct.unpack("<HH", data[6:10]))
    _check_size(width, height, most)


def _pillow() -> Any:
    """Return the modules of Pillow that are used, under one name."""
    try:
        import PIL
        from PIL import Image, ImageOps  # noqa: F401 (they become attributes of the package)
    except ImportError:
        raise UsageError(
            "images need Pillow, which is not installed", hint="Run: pip install 'onboard[images]'"
        ) from None
    return PIL
