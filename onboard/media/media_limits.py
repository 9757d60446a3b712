"""How much the images and sounds of a prompt may be, and where from they may come."""

from __future__ import annotations

from pydantic import Field

from onboard.config import StrictModel

_MIB = 1 << 20


class MediaLimits(StrictModel):
    """Upper bounds for the images and sounds of one prompt."""

    allowed_media_domains: list[str] = Field(default_factory=list)
    """Hosts that images and sound are fetched from by https; none unless they are named."""
    max_media: int = Field(default=16, ge=0)
    """Images and sounds together."""
    max_media_bytes: int = Field(default=20 * _MIB, ge=1)
    """Of each of them, as it comes."""
    max_pixels: int = Field(default=1 << 25, ge=1)
    """Of all images together; a photograph of 8K has as many."""
    max_sound_seconds: float = Field(default=600.0, gt=0)
    """Of all sounds together."""
    max_fetch_seconds: float = Field(default=20.0, gt=0)
    """For all that is fetched."""
