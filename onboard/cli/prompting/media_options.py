"""Options that name images and sounds, and what they are in a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from onboard.errors import UsageError

if TYPE_CHECKING:
    from onboard.media.media_limits import MediaLimits
    from onboard.media.prompt_media import Kind, MediaPart
    from onboard.runtime.calls.prompt_forms import Prompt
    from onboard.runtime.llm import LLM
    from onboard.runtime.static.static_llm import StaticLLM

Image = Annotated[
    list[str] | None,
    typer.Option(
        "--image", metavar="FILE|URL", help="An image that each prompt is about; repeatable."
    ),
]
Audio = Annotated[
    list[str] | None,
    typer.Option("--audio", metavar="FILE|URL", help="A sound (WAV), likewise; repeatable."),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Allow the repository's own Python code to read images, in a sandbox.",
    ),
]
Unsandboxed = Annotated[
    bool,
    typer.Option("--unsandboxed", help="Allow that code to run where the system has no sandbox."),
]
MediaDomain = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-media-domain",
        metavar="HOST",
        help="Host that images and sound of messages are fetched from; repeatable.",
        show_default="none",
    ),
]


@dataclass(frozen=True)
class GivenMedia:
    """The images and sounds that a command line names, and hosts that messages may name."""

    images: list[str] = field(default_factory=list)
    sounds: list[str] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)

    @property
    def parts(self) -> list[MediaPart]:
        """What each prompt is about."""
        from onboard.media.media_bytes import as_source
        from onboard.media.prompt_media import MediaPart

        kinds: list[tuple[Kind, list[str]]] = [("image", self.images), ("audio", self.sounds)]
        return [MediaPart(kind, as_source(each)) for kind, names in kinds for each in names]

    @property
    def limits(self) -> MediaLimits:
        """The limits; whoever types a URL allows its host."""
        from onboard.media.media_limits import MediaLimits

        typed = (host_of(each) for each in [*self.images, *self.sounds])
        return MediaLimits(allowed_media_domains=[*self.domains, *filter(None, typed)])

    def check(self, **others: Any) -> None:
        """Raise `UsageError` where images or sounds come with an option that takes none."""
        named = self.images or self.sounds
        if named and (given := next((name for name, value in others.items() if value), None)):
            raise UsageError(
                f"--image and --audio go with prompts and --chat, not with --{given}",
                hint="Messages of --input name theirs: parts of type image_url and input_audio",
            )

    def asked(self, llm: LLM | StaticLLM, prompts: list[Prompt]) -> list[Prompt]:
        """Return prompts about the images and sounds."""
        if not (parts := self.parts):
            return prompts
        reader: Any = llm.prompts if hasattr(llm, "prompts") else None
        assert reader is not None, "`check` refuses static caches"
        return [reader.question(text, parts) for text in prompts]


def host_of(text: str) -> str | None:
    """Return the host of a URL, None for what is no URL."""
    try:
        return urlsplit(text).hostname if "://" in text else None
    except ValueError:
        return None
