"""Sounds as samples: WAV files, read by Python's own module.

Other formats would need a library that parses them in C, for files that strangers send.
"""

from __future__ import annotations

import base64
import wave
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

from onboard.errors import UsageError

_CONVERT = "Convert it: ffmpeg -i SOUND -ac 1 -ar 16000 -c:a pcm_s16le SOUND.wav"
_RATES = (1_000, 384_000)
_MOST_CHANNELS = 16


@dataclass(frozen=True)
class Sound:
    """One channel of sound."""

    samples: npt.NDArray[np.float32]
    """[samples], from -1 to 1; several channels are averaged."""
    rate: int
    """Samples a second."""

    @property
    def seconds(self) -> float:
        """How long it is."""
        return len(self.samples) / self.rate


def decode_sound(content: bytes, most_seconds: float) -> Sound:
    """Return the sound of a WAV file of whole numbers of 8, 16, 24 or 32 bits.

    Raises `UsageError` for one that is broken, too long, or of another format.
    """
    try:
        with wave.open(BytesIO(content)) as file:
            found = file.getparams()
            _check(found, most_seconds)
            data = file.readframes(found.nframes)
    except (wave.Error, EOFError, OSError, ValueError, ZeroDivisionError, MemoryError) as error:
        reason = " ".join(str(error).split())[:100] or "it ends early"
        raise UsageError(f"a sound is no WAV file that is read ({reason})", hint=_CONVERT) from None
    if len(data) != found.nframes * found.nchannels * found.sampwidth:
        raise UsageError("a sound is broken: it has fewer samples than it says")
    samples = _samples(data, found.sampwidth).reshape(-1, found.nchannels)
    return Sound(samples.mean(axis=1, dtype=np.float32), found.framerate)


def as_base64(sound: Sound) -> str:
    """Return a sound as a WAV file of 16 bits, in base64."""
    whole = np.clip(np.rint(sound.samples * 32768), -32768, 32767).astype("<i2")
    with BytesIO() as content:
        with wave.open(content, "wb") as file:
            file.setparams((1, 2, sound.rate, len(whole), "NONE", ""))
            file.writeframes(whole.tobytes())
        return base64.b64encode(content.getvalue()).decode("ascii")


def _check(found: Any, most_seconds: float) -> None:
    if not (_RATES[0] <= found.framerate <= _RATES[1] and 1 <= found.nchannels <= _MOST_CHANNELS):
        raise UsageError(
            f"a sound has {found.nchannels} channels of {found.framerate} samples a second",
            hint=_CONVERT,
        )
    if found.sampwidth not in (1, 2, 3, 4):
        raise UsageError(f"a sound has samples of {found.sampwidth} bytes", hint=_CONVERT)
    if found.nframes < 1:
        raise UsageError("a sound has no samples")
    if (seconds := found.nframes / found.framerate) > most_seconds:
        raise UsageError(
            f"a sound has {seconds:.1f} seconds, and {most_seconds:g} are taken",
            hint="Send a part of it",
        )


def _samples(data: bytes, width: int) -> npt.NDArray[np.float32]:
    """Return samples from -1 to 1; those of one byte have no sign."""
    if width == 1:
        return ((np.frombuffer(data, np.uint8).astype(np.float64) - 128) / 128).astype(np.float32)
    if width == 3:  # as the upper bytes of 32 bits
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        data, width = wide.tobytes(), 4
    whole = np.frombuffer(data, np.dtype(f"<i{width}")).astype(np.float64)
    return (whole / (1 << (8 * width - 1))).astype(np.float32)
