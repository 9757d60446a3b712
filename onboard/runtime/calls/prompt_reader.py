"""What callers give as prompts, made ready for the engine: tokens, and inputs of the towers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from onboard.errors import UsageError
from onboard.media.media_limits import MediaLimits
from onboard.media.prompt_media import MediaPart, PromptMedia, as_parts, read_media, split_media
from onboard.runtime.calls.prompt_forms import (
    MEDIA,
    MESSAGES,
    Prompt,
    processed_inputs,
    text_or_tokens,
    token_ids,
)
from onboard.runtime.engine import Engine
from onboard.runtime.multimodal.media_processor import MediaProcessor
from onboard.runtime.multimodal.own_towers import OwnProcessor

NO_MEDIA = PromptMedia()


@dataclass(frozen=True)
class ReadPrompt:
    """One prompt, ready to be submitted."""

    tokens: list[int]
    text: str | None = None
    """Where it was given as text."""
    inputs: dict[str, Any] | None = None
    """What the towers take of its images and sounds."""


class PromptReader:
    """Reads prompts for an engine. `media` may wait for the network; the other methods use the
    tokenizer, which serves one caller at a time.
    """

    def __init__(self, engine: Engine, limits: MediaLimits | None = None) -> None:
        self._engine = engine
        self.limits = limits or MediaLimits()

    @cached_property
    def processor(self) -> MediaProcessor | OwnProcessor:
        """The checkpoint's processor; raises `UsageError` for a model that takes text alone."""
        if (towers := self._engine.towers) is None:
            raise UsageError("the model takes text alone", hint="Leave images and sound out")
        return towers.processor

    def media(self, prompt: Prompt) -> PromptMedia:
        """Read and decode a prompt's images and sounds; raise `UsageError` for what is none."""
        parts = parts_of(prompt)
        return read_media(parts, self.limits) if parts else NO_MEDIA

    def read(self, prompt: Prompt, media: PromptMedia = NO_MEDIA) -> ReadPrompt:
        """Return a prompt whose images and sounds are `media`."""
        if isinstance(prompt, Mapping) and (messages := prompt.get(MESSAGES)):
            tokens, inputs = self.processor.converse(messages, media)
            return ReadPrompt(tokens, inputs=inputs)
        given = text_or_tokens(prompt)
        text = given if isinstance(given, str) else None
        if media.images or media.sounds:
            if text is None:
                raise UsageError(
                    "a prompt of token ids has images or sound",
                    hint='Give its text, or what the processor makes of them as "processed"',
                )
            tokens, inputs = self.processor.prepare(text, media)
            return ReadPrompt(tokens, text, inputs)
        return ReadPrompt(self.encode(given), text, processed_inputs(prompt))

    def encode(self, prompt: str | list[int]) -> list[int]:
        """Return the token ids of a prompt's text; ids stay as they are."""
        if isinstance(prompt, str) and self._engine.codebooks.count > 1:
            raise UsageError(
                "the model's tokens are codes, no text", hint="Give what LLM.pack makes of codes"
            )
        return token_ids(prompt, self._engine.tokenizer)

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Return a conversation as the chat template writes it: token ids, or the text with its
        images and sounds, which are not read yet. Messages with sounds for a processor that reads
        them stay messages.
        """
        if (tokenizer := self._engine.tokenizer) is None:
            raise UsageError("the checkpoint has no tokenizer, so it has no chat template")
        written, parts = split_media(messages)
        if parts and self.processor.reads_messages:
            return {"prompt": "", MESSAGES: written, MEDIA: parts}
        functions = None if tools is None else [dict(each) for each in tools]
        text = tokenizer.chat(written, tools=functions, **dict(options or {}))
        return {"prompt": text, MEDIA: parts} if parts else tokenizer.encode_plain(text)

    def question(self, text: str, parts: Sequence[MediaPart]) -> Prompt:
        """Return a prompt about images and sounds.

        A text that has their placeholders stays as it is. Any other one becomes the message of a
        conversation if there is a chat template, else placeholders are put before it.
        """
        if not parts:
            return text
        marks = [
            self.processor.placeholder(part.kind, sum(other.kind == part.kind for other in before))
            for part, before in ((each, parts[:at]) for at, each in enumerate(parts))
        ]
        if all(mark and text.count(mark) >= marks.count(mark) for mark in marks):
            return {"prompt": text, MEDIA: list(parts)}
        tokenizer = self._engine.tokenizer
        has_template = tokenizer is not None and tokenizer.has_template
        if not (self.processor.reads_messages or has_template):
            return {"prompt": f"{''.join(marks)}{text}", MEDIA: list(parts)}
        content = [{"type": part.kind, part.kind: part} for part in parts]
        return self.conversation(
            [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]
        )


def parts_of(prompt: Prompt) -> list[MediaPart]:
    """Return the images and sounds that a prompt comes with, not read yet."""
    given = prompt.get(MEDIA) if isinstance(prompt, Mapping) else None
    return as_parts(given) if given else []
