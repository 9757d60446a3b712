"""Images are what Pillow decodes, and none is decoded that is larger than it may be."""

from __future__ import annotations

import random
import struct
import zlib
from contextlib import suppress
from io import BytesIO
from typing import Any

import pytest
from PIL import Image
from transformers.image_utils import load_image

from onboard.errors import UsageError
from onboard.media.decoded_images import check_pixels, decode_image
from onboard.untrusted.limited import limited

MOST = 1 << 20


def picture(width: int = 9, height: int = 7, mode: str = "RGB", seed: int = 3) -> Image.Image:
    size = width * height * len(Image.new(mode, (1, 1)).getbands())
    return Image.frombytes(mode, (width, height), random.Random(seed).randbytes(size))


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def refused(content: bytes, most: int = MOST) -> str:
    with pytest.raises(UsageError) as error:
        decode_image(content, most)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1"])
def test_it_is_what_transformers_reads(kind: str, mode: str) -> None:
    shape = picture().convert(mode)
    content = saved(
        shape.convert("RGB") if kind == "JPEG" and mode in ("RGBA", "P") else shape, kind
    )
    found = decode_image(content, MOST)
    assert found.mode == "RGB"
    assert found.tobytes() == load_image(Image.open(BytesIO(content))).tobytes()


def test_it_is_turned_as_its_data_say() -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    content = saved(picture(), "JPEG", exif=turned, quality=100, subsampling=0)
    assert decode_image(content, MOST).size == (7, 9)
    assert (
        decode_image(content, MOST).tobytes() == load_image(Image.open(BytesIO(content))).tobytes()
    )


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
def test_an_animated_one_is_refused(kind: str) -> None:
    frames = [picture(seed=seed) for seed in range(3)]
    content = saved(frames[0], kind, save_all=True, append_images=frames[1:])
    assert "animated" in refused(content)
    if kind == "WEBP":  # its canvas of 13,000 x 13,000 pixels is not made either
        data = content[:24] + (12_999).to_bytes(3, "little") * 2 + content[30:]
        with limited(60, 64 << 20):
            assert "animated" in refused(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_broken_one_is_one_line(kind: str) -> None:
    content = saved(picture(40, 40), kind)
    for end in (0, 5, 12, 20, 29, len(content) // 2):
        assert "broken" in (reason := refused(content[:end])) or "no format" in reason
    seed = random.randrange(2**31)
    print(f"bytes seed {seed}")
    draw = random.Random(seed)
    for _ in range(60):
        damaged = bytearray(content)
        for _ in range(draw.randrange(1, 9)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        with suppress(UsageError):  # damage of pixels alone is seen by nobody
            assert decode_image(bytes(damaged), MOST).mode == "RGB"


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def resized(content: bytes, kind: str, width: int, height: int) -> bytes:
    """The same file whose header says another size."""
    data = bytearray(content)
    if kind == "GIF":
        data[6:10] = struct.pack("<HH", width, height)
    elif kind == "BMP":
        data[18:26] = struct.pack("<ii", width, height)
    elif kind == "JPEG":
        at = data.index(b"\xff\xc0") + 5
        data[at : at + 4] = struct.pack(">HH", height, width)
    elif data[12:16] == b"VP8L":
        data[21:25] = ((width - 1) | (height - 1) << 14 | 1 << 28).to_bytes(4, "little")
    else:
        data[26:30] = struct.pack("<HH", width, height)
    return bytes(data)


@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"exif": b"Exif\0\0MM\0*"}])
def test_a_large_one_is_refused_before_there_is_room_for_it(options: dict[str, Any]) -> None:
    webp = saved(picture(40, 40), "WEBP", **options)
    files = {"PNG": png(9_000, 9_000), "bomb": png(60_000, 60_000)}
    if "exif" in options:  # with a canvas
        assert webp[12:16] == b"VP8X"
        data = bytearray(webp)
        data[24:30] = (15_999).to_bytes(3, "little") * 2
        files["WEBP"] = bytes(data)
    else:
        files["WEBP"] = resized(webp, "WEBP", 16_000, 16_000)
    for kind in ("GIF", "BMP", "JPEG"):
        files[kind] = resized(saved(picture(), kind), kind, 60_000, 60_000)
    with limited(60, 64 << 20):
        for content in files.values():
            assert "pixels" in (reason := refused(content))
            assert "1,048,576" in reason


def test_what_unpacks_to_more_than_it_says_is_not_unpacked() -> None:
    rows = b"\0" * (1 << 26)  # beyond an image of 4 x 4
    assert decode_image(png(4, 4, rows), MOST).size == (4, 4)


def test_a_long_one_and_one_of_many_scans_are_refused() -> None:
    assert "longer side" in refused(saved(picture(1, 201), "PNG"))
    assert decode_image(saved(picture(1, 200), "PNG"), MOST).size == (1, 200)
    content = saved(picture(), "JPEG", progressive=True)
    scan = content.index(b"\xff\xda")
    assert "scans" in refused(content[:scan] + content[scan:-2] * 120)


def test_another_format_is_named() -> None:
    for content in (b"", b"GIF", b"<svg/>", b"%PDF-1.4", saved(picture(), "TIFF"), b"\0" * 100):
        assert "no format that is read" in refused(content)


def test_the_pixels_of_all_are_counted() -> None:
    check_pixels([picture(), picture()], 126)
    with pytest.raises(UsageError, match="126 pixels, and 125 are taken"):
        check_pixels([picture(), picture()], 125)
