"""A checkpoint's processor, transformers' own: texts with images and sounds become token ids and
inputs of the towers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from onboard.errors import OnboardError, UsageError
from onboard.media.prompt_media import Kind, PromptMedia
from onboard.media.wave_sounds import as_base64
from onboard.untrusted.bounds import VOCABULARY_BYTES, read_json

_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
"""Where a checkpoint names the class of its processor."""
_VIDEOS = "video_processor"
_TAKEN = {"images", "audio"}
"""What a processor is called with besides text."""
_READERS = {"tekken.json": "mistral_common"}
"""A vocabulary whose messages are made into tokens by a package, and its module."""
_PLACEHOLDERS: dict[Kind, tuple[str, ...]] = {
    "image": ("boi_token", "image_token"),
    "audio": ("audio_token",),
}
"""Attributes of processors: the text that stands for an image or a sound in a prompt."""


class MediaProcessor:
    """Prepares prompts with images and sounds, never with code of a repository.

    Processors that also read videos are loaded without what reads them.
    """

    def __init__(self, hf: Any) -> None:
        self.hf = hf

    @classmethod
    def load(cls, checkpoint: Path, config: Any) -> MediaProcessor:
        """Load the processor of a checkpoint with this config of transformers'.

        Raises `UsageError` if there is none, or one that is code of the model's repository.
        """
        found = _class_of(checkpoint, config)
        if found is None:
            raise UsageError(
                f"{checkpoint} has no processor of transformers', so its prompts are text alone"
            )
        try:
            made = cls(_without_videos(found).from_pretrained(checkpoint, trust_remote_code=False))
        except UsageError:
            raise
        except Exception as error:  # whatever libraries raise for files that are damaged or missing
            raise UsageError(
                f"the processor in {checkpoint} does not load: {_line(error)}"
            ) from error
        if made.reads_messages:
            _check_readers(checkpoint)
        return made

    @cached_property
    def reads_messages(self) -> bool:
        """Whether it takes sounds in messages alone, of which it makes tokens without a text."""
        from transformers.processing_utils import ProcessorMixin

        own = type(self.hf).apply_chat_template is not ProcessorMixin.apply_chat_template
        return own and not _TAKEN & inspect.signature(self.hf.__call__).parameters.keys()

    def placeholder(self, kind: Kind, place: int = 0) -> str:
        """Return the text that stands for an image or a sound in a prompt, "" if there is none; it
        is the same for all of them, whatever their `place`.
        """
        if self.reads_messages:
            return ""
        found = (getattr(self.hf, name, None) for name in _PLACEHOLDERS[kind])
        return next((text for text in found if isinstance(text, str)), "")

    def prepare(self, text: str, media: PromptMedia) -> tuple[list[int], dict[str, Any]]:
        """Return a prompt's token ids, and what the towers take of its images and sounds.

        A text that begins with the tokenizer's first special token gets no second one. Raises
        `UsageError` where the processor refuses them.
        """
        if self.reads_messages:
            content = [{"type": "audio"} for _ in media.sounds]
            message = {"role": "user", "content": [*content, {"type": "text", "text": text}]}
            return self.converse([message], media)
        first = getattr(self.hf.tokenizer, "bos_token", None)
        options: dict[str, Any] = {"return_tensors": "pt"}
        if first and text.startswith(first):
            options["add_special_tokens"] = False
        if media.images:
            options["images"] = media.images
        if media.sounds:
            options |= {"audio": [each.samples for each in media.sounds]}
            options["sampling_rate"] = self._rate(media)
        return self._made(lambda: self.hf(text=[text], **options))

    def converse(
        self, messages: Sequence[Mapping[str, Any]], media: PromptMedia
    ) -> tuple[list[int], dict[str, Any]]:
        """Return a conversation's token ids, and what the towers take of its sounds, each of which
        has a part `{"type": "audio"}`; for a processor that reads messages.

        Raises `UsageError` where the processor refuses them.
        """
        if media.images:
            raise UsageError("the model takes no image")
        self._rate(media)
        sounds = map(as_base64, media.sounds)
        filled = [
            {**message, "content": [_with_sound(part, sounds) for part in message["content"]]}
            for message in messages
        ]
        return self._made(lambda: self.hf.apply_chat_template(filled))

    def _made(self, process: Callable[[], Any]) -> tuple[list[int], dict[str, Any]]:
        try:
            found = dict(process())
        except Exception as error:  # placeholders and images that do not match, odd sizes, ...
            raise UsageError(
                f"{type(self.hf).__name__} refuses these images or sounds: {_line(error)}"
            ) from error
        tokens = found.pop("input_ids")[0].tolist()
        found.pop("attention_mask", None)
        return tokens, found

    @property
    def sound_rate(self) -> int:
        """Samples a second of the sounds that it reads; raises `UsageError` if it reads none."""
        extractor = getattr(self.hf, "feature_extractor", getattr(self.hf, "audio_processor", None))
        wanted = getattr(extractor, "sampling_rate", None)
        if wanted is None:
            raise UsageError("the model takes no sound")
        return int(wanted)

    def _rate(self, media: PromptMedia) -> int:
        """Return the rate of sounds, which is the one that the processor reads."""
        wanted = self.sound_rate
        if other := [each.rate for each in media.sounds if each.rate != wanted]:
            raise UsageError(
                f"a sound has {other[0]} samples a second and the model reads {wanted}",
                hint=f"Convert it: ffmpeg -i SOUND -ar {wanted} -ac 1 SOUND.wav",
            )
        return wanted


def _check_readers(checkpoint: Path) -> None:
    """Raise `UsageError` unless what reads a vocabulary's messages is installed."""
    for name, module in _READERS.items():
        if (checkpoint / name).is_file() and find_spec(module) is None:
            package = module.replace("_", "-")
            raise UsageError(
                f"sounds of a model with {name} need {package}, which is not installed",
                hint="Run: pip install 'onboard[tekken]'",
            )


def _with_sound(part: Any, sounds: Iterator[str]) -> Any:
    """Return a part of a message, the next sound in it if it stands for one."""
    is_sound = isinstance(part, Mapping) and part.get("type") == "audio"
    return {"type": "audio", "base64": next(sounds)} if is_sound else part


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _class_of(checkpoint: Path, config: Any) -> Any:
    """Return the class of a checkpoint's processor that transformers has, None without one."""
    from transformers.models.auto.processing_auto import (
        PROCESSOR_MAPPING,
        processor_class_from_name,
    )
    from transformers.processing_utils import ProcessorMixin

    for name in _FILES:
        path = checkpoint / name
        values = read_json(path, VOCABULARY_BYTES, values=None) if path.is_file() else {}
        named = values.get("processor_class") if isinstance(values, dict) else None
        found = processor_class_from_name(named) if isinstance(named, str) else None
        if isinstance(found, type) and issubclass(found, ProcessorMixin):
            return found
    return PROCESSOR_MAPPING.get(type(config), None)


def _without_videos(whole: Any) -> Any:
    """Return a processor's class that has nothing for videos, which would need torchvision."""

    class NoVideos(whole):  # type: ignore[misc]
        @classmethod
        def _get_arguments_from_pretrained(cls, *args: Any, **kwargs: Any) -> list[Any]:
            parts: list[Any] = []
            for name in whole.get_attributes():
                own = {"get_attributes": classmethod(lambda _, name=name: [name])}
                one: Any = type(whole.__name__, (whole,), own)
                skipped = _VIDEOS in name
                parts += [None] if skipped else one._get_arguments_from_pretrained(*args, **kwargs)
            return parts

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if _VIDEOS in argument_name:
                return type(None)
            return super().check_argument_for_proper_class(argument_name, argument)

    NoVideos.__name__ = whole.__name__
    return NoVideos


def load_processor(checkpoint: Path, config: Any) -> MediaProcessor:
    """Load a checkpoint's processor; raise `UsageError` without one, or without Pillow."""
    try:
        import PIL  # noqa: F401 (processors of images are dummies without it)
    except ImportError:
        raise UsageError(
            "images need Pillow, which is not installed", hint="Run: pip install 'onboard[images]'"
        ) from None
    try:
        return MediaProcessor.load(checkpoint, config)
    except OnboardError as error:
        raise UsageError(error.message, hint=error.hint) from None
