"""Sounds are the samples of WAV files."""

from __future__ import annotations

import random
import struct
import wave
from io import BytesIO

import numpy as np
import pytest

from onboard.errors import UsageError
from onboard.media.wave_sounds import decode_sound


def saved(values: list[list[int]], width: int, rate: int = 16_000) -> bytes:
    """A WAV file of rows of channels, each a whole number of `width` bytes."""
    file = BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((len(values[0]), width, rate, len(values), "NONE", ""))
        shift = 128 if width == 1 else 0
        for row in values:
            for value in row:
                out.writeframes((value + shift).to_bytes(width, "little", signed=width > 1))
    return file.getvalue()


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_are_parts_of_the_largest(width: int, channels: int) -> None:
    seed = random.randrange(2**31)
    print(f"samples seed {seed}")
    draw = random.Random(seed)
    most = 1 << (8 * width - 1)
    values = [[draw.randrange(-most, most) for _ in range(channels)] for _ in range(50)]
    values[0], values[1] = [most - 1] * channels, [-most] * channels
    found = decode_sound(saved(values, width, 8000), 1.0)
    assert (found.rate, found.samples.dtype) == (8000, np.float32)
    assert found.seconds == 50 / 8000
    expected = [sum(value / most for value in row) / channels for row in values]
    np.testing.assert_allclose(found.samples, expected, rtol=0, atol=1e-6)


def test_what_is_no_sound_is_refused_in_one_line() -> None:
    whole = saved([[1], [2], [3], [4]], 2)
    for content in (b"", b"RIFF", whole[:30], b"ID3\x04" + bytes(90), b"OggS", bytes(100)):
        with pytest.raises(UsageError, match=r"no WAV file that is read \(.+ffmpeg") as refused:
            decode_sound(content, 1.0)
        assert "\n" not in str(refused.value)
    with pytest.raises(UsageError, match="fewer samples than it says"):
        decode_sound(whole[:-2], 1.0)
    with pytest.raises(UsageError, match="no samples"):
        decode_sound(whole[:40] + struct.pack("<I", 0), 1.0)
    with pytest.raises(UsageError, match="1 channels of 10 samples"):
        decode_sound(saved([[1]], 2, 10), 1.0)


def test_a_long_one_is_refused_before_there_is_room_for_it() -> None:
    with pytest.raises(UsageError, match="2.0 seconds, and 1.5 are taken"):
        decode_sound(saved([[0]] * 16, 2, 8000)[:40] + struct.pack("<I", 32_000), 1.5)
    endless = saved([[0]], 2)[:40] + struct.pack("<I", 0xFFFFFFF0)
    with pytest.raises(UsageError, match="seconds, and 600 are taken"):
        decode_sound(endless, 600)
