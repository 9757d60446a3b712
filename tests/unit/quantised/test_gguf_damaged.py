"""Headers of GGUF files are read within bounds: damage is refused in one line, before anything of the
size that it names is built.
"""

from __future__ import annotations

import os
import random
import struct
import time
import tracemalloc
from pathlib import Path

import pytest

from onboard.errors import OnboardError
from onboard.sources.gguf_header import read_header
from tests.support import quantised

pytest.importorskip("gguf", reason='the extra "gguf" is not installed')

FILE = quantised.FOLDER / "gguf_q4_0" / "model.gguf"
HUGE = (1 << 63) - 1
Entry = tuple[str, tuple[int, ...], int, int]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf_bytes(
    *,
    version: int = 3,
    tensors: int | None = None,
    pairs: int | None = None,
    values: bytes = b"",
    entries: tuple[Entry, ...] = (("a.weight", (32, 2), 0, 0),),
    data: int = 256,
) -> bytes:
    """A file of a few bytes, right but for what is asked."""
    own = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    infos = b"".join(
        text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        for name, shape, kind, offset in entries
    )
    counts = (len(entries) if tensors is None else tensors, 1 if pairs is None else pairs)
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + own + values + infos
    return head + bytes(-len(head) % 32) + bytes(data)


def refused(content: bytes, folder: Path) -> str:
    """The one line, found without much memory or time."""
    path = folder / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    begun = time.monotonic()
    try:
        with pytest.raises(OnboardError) as caught:
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert time.monotonic() - begun < 10
    assert "\n" not in str(caught.value)
    return str(caught.value)


def value(kind: int, content: bytes, key: str = "llama.x") -> bytes:
    return text(key) + struct.pack("<I", kind) + content


def test_the_small_file_is_right(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf_bytes())
    header = read_header(tmp_path / "model.gguf")
    assert header.architecture == "llama"
    assert header.tensors["a.weight"].shape == (2, 32)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "0 bytes"),
        (b"GGUF", "4 bytes"),
        (b"PK\3\4" + bytes(40), "begin"),
        (gguf_bytes(version=1), "version 1"),
        (gguf_bytes(version=3 << 24), "big-endian"),
        (gguf_bytes(tensors=HUGE), "tensors"),
        (gguf_bytes(pairs=HUGE), "keys"),
        (gguf_bytes(tensors=2), "cut off|dimensions|damaged"),
        (gguf_bytes(pairs=2, values=struct.pack("<Q", HUGE)), "bytes"),
        (gguf_bytes(pairs=2, values=value(8, struct.pack("<Q", 1 << 19))), "cut off"),
        (gguf_bytes(pairs=2, values=value(9, struct.pack("<IQ", 4, HUGE))), "cut off"),
        (
            gguf_bytes(pairs=2, values=value(9, struct.pack("<IQ", 8, HUGE))),
            "cut off|damaged|bytes",
        ),
        (gguf_bytes(pairs=2, values=value(9, struct.pack("<IQIQ", 9, 1, 4, 1))), "list"),
        (gguf_bytes(pairs=2, values=value(77, b"")), "unknown type 77"),
        (gguf_bytes(pairs=2, values=value(4, bytes(4), "general.architecture")), "twice"),
        (gguf_bytes(pairs=2, values=value(4, struct.pack("<I", 3), "general.alignment")), "align"),
        (
            gguf_bytes(pairs=2, values=value(4, struct.pack("<I", 1 << 31), "general.alignment")),
            "align",
        ),
        (gguf_bytes(pairs=2, values=value(2, struct.pack("<H", 4), "split.count")), "part of 4"),
        (gguf_bytes(entries=(("a", (32, 2), 99, 0),)), "type 99"),
        (gguf_bytes(entries=(("a", (33, 2), 2, 0),)), "multiple of Q4_0"),
        (gguf_bytes(entries=(("a", (32, 1 << 40), 0, 0),)), "cut off"),
        (gguf_bytes(entries=(("a", (1 << 62, 1 << 62), 0, 0),)), "cut off"),
        (gguf_bytes(entries=(("a", (32, 2), 0, 1 << 62),)), "cut off"),
        (gguf_bytes(entries=(("a", (32, 2), 0, 7),)), "between"),
        (gguf_bytes(entries=(("a", (32, 0), 0, 0),)), "empty"),
        (gguf_bytes(entries=(("a", (), 0, 0),)), "dimensions"),
        (gguf_bytes(entries=(("a", (1, 1, 1, 1, 1), 0, 0),)), "dimensions"),
        (gguf_bytes(entries=(("a", (32,), 0, 0), ("a", (32,), 0, 128))), "twice"),
        (gguf_bytes(entries=(("a", (32, 2), 0, 0), ("b", (32,), 0, 128))), "over"),
    ],
)
def test_damage_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    import re

    assert re.search(said, refused(content, tmp_path))


def test_a_file_that_is_cut_off_anywhere(tmp_path: Path) -> None:
    content = FILE.read_bytes()
    for part in range(1, 40):
        refused(content[: len(content) * part // 40], tmp_path)


def test_changed_bytes_are_refused_or_read(tmp_path: Path) -> None:
    """Whatever is there, nothing else than `OnboardError` comes out."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw, content = random.Random(seed), FILE.read_bytes()
    path, said = tmp_path / "model.gguf", []
    for _ in range(150):
        changed = bytearray(content)
        for _ in range(3):
            changed[draw.randrange(3000)] = draw.choice([0, 1, 0x7F, 0xFF, draw.randrange(256)])
        path.write_bytes(changed)
        try:
            read_header(path)
        except OnboardError as error:
            said.append(str(error))
    assert said
    assert not [each for each in said if "\n" in each]


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    from onboard.sources.gguf_source import prepared_folder

    with pytest.raises(OnboardError, match="FIFO"):
        prepared_folder(tmp_path / "model.gguf")
