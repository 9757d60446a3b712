"""The bytes of an image or a sound: of a file, of a `data:` URL, or fetched by https."""

from __future__ import annotations

import base64
import binascii
import time
from dataclasses import dataclass, field
from pathlib import Path

from onboard.errors import OnboardError, UsageError
from onboard.media.https_fetch import fetch
from onboard.media.media_limits import MediaLimits
from onboard.untrusted.bounds import Bound, read_file

Source = str | bytes | Path
"""A URL (`data:` or https), the bytes themselves, or a file. A text is never a file's name: texts
come from clients.
"""


@dataclass
class MediaBytes:
    """Reads the images and sounds of one prompt, and counts them."""

    limits: MediaLimits
    count: int = 0
    end: float = field(default=0.0)
    """When all that is fetched has to be there; it is set by the first."""

    def read(self, source: Source) -> bytes:
        """Return the bytes of one more; raise `UsageError` for what is beyond the limits."""
        self.counted()
        most = self.limits.max_media_bytes
        if isinstance(source, bytes):
            return _within(source, most)
        if isinstance(source, Path):
            return _file(source, most)
        if source[:5].lower() == "data:":
            return _data(source, most)
        if source[:8].lower() != "https://":
            raise UsageError(
                f"{source!r:.60} is no place of an image or a sound",
                hint="Give a data: URL or an https: URL",
            )
        if not self.end:
            self.end = time.monotonic() + self.limits.max_fetch_seconds
        left = max(self.end - time.monotonic(), 0.0)
        allowed = self.limits.allowed_media_domains
        return fetch(source, allowed, most=most, seconds=left)

    def counted(self) -> None:
        """Count one more; raise `UsageError` where there are too many."""
        self.count += 1
        if self.count > self.limits.max_media:
            raise UsageError(
                f"a prompt has more than {self.limits.max_media} images and sounds",
                hint="Give fewer, or raise max_media",
            )


def as_source(text: str) -> Source:
    """Return what a user's word stands for: a URL, or else a file's name."""
    return text if text[:5].lower() == "data:" or "://" in text[:16] else Path(text).expanduser()


def from_base64(text: str, most: int) -> bytes:
    """Return what base64 stands for; raise `UsageError` for anything else, or for too much."""
    if len(text) > most * 4 // 3 + 4:
        raise UsageError(f"an image or a sound has more than {most:,} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise UsageError("an image or a sound is not base64") from None


def _data(url: str, most: int) -> bytes:
    head, comma, content = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise UsageError(
            f"{url!r:.60} is not taken", hint="Write data:TYPE;base64, and the content in base64"
        )
    return _within(from_base64(content, most), most)


def _within(content: bytes, most: int) -> bytes:
    if len(content) > most:
        raise UsageError(f"an image or a sound has {len(content):,} bytes, and {most:,} are taken")
    return content


def _file(path: Path, most: int) -> bytes:
    try:
        return read_file(path, Bound(most, "bytes", "max_media_bytes"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except OnboardError as error:
        raise UsageError(error.message, hint=error.hint) from None
