"""What a server is told when it starts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from onboard.config import ModelOfOptions

_MIB = 1 << 20


class ServeSettings(ModelOfOptions):
    """Names, doors and limits of a server."""

    names: list[str] = Field(min_length=1)
    """What the model is called in requests; the first is what answers call it."""
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    """0: a free one."""
    api_keys: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Of which clients have to show one; none: they show nothing."""
    max_body_bytes: int = Field(default=8 * _MIB, ge=1024)
    max_bodies_bytes: int = Field(default=256 * _MIB, ge=1024)
    """Of all bodies that are on their way at a time."""
    body_seconds: float = Field(default=120.0, gt=0)
    """How long a body may be on its way."""
    max_running: int = Field(default=256, ge=1)
    """Requests that are answered at a time; those beyond it are told to come again (429)."""
    max_outputs: int = Field(default=16, ge=1)
    """Outputs of one request (`n`), and prompts of one request."""
    max_texts: int = Field(default=2048, ge=1)
    """Texts of one request for embeddings."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long requests may go on after the server was told to stop."""
    log_prompts: bool = False
