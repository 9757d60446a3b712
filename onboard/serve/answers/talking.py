"""A conversation with one person: the model's answers to what they say, one after the other."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

from onboard.errors import UsageError
from onboard.media.prompt_media import MediaPart, split_media
from onboard.runtime.calls.prompt_forms import MEDIA
from onboard.runtime.llm import LLM
from onboard.runtime.sampling_params import SamplingParams
from onboard.serve.answers.answer_pieces import Answer, Piece
from onboard.serve.answers.formats import format_for
from onboard.serve.answers.reader import AnswerReader
from onboard.serve.answers.template_process import chat_text


class Talk:
    """What was said so far, and how it goes on.

    Raises `UsageError` for a model without a chat template.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None = None,
        about: Sequence[MediaPart] = (),
    ) -> None:
        """`about`: images and sounds of the first message, read once."""
        tokenizer = llm.engine.tokenizer
        if tokenizer is None or not getattr(tokenizer.hf, "chat_template", None):
            raise UsageError(
                "the checkpoint has no chat template, so it is no partner for a conversation",
                hint="Give prompts as text, without --chat",
            )
        self._llm, self._tokenizer = llm, tokenizer
        self._about = _read_parts(llm, about)
        self._params = params.model_copy(update={"skip_special_tokens": False})
        self._first = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, Any]] = []
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.messages = list(self._first)

    def answer(self, text: str) -> Generator[Piece, None, None]:
        """Yield the answer to what a person says, as it comes.

        Who leaves the loop cuts the answer off; what was said of it stays said. If there is no
        answer (`OnboardError`), the question was not asked.
        """
        asked: list[dict[str, Any]] = [*self.messages, self._question(text)]
        texts, parts = split_media(asked)
        written = chat_text(self._tokenizer, texts, None, {"add_generation_prompt": True})
        reader = AnswerReader(
            format_for(self._tokenizer),
            written.text,
            written.turn,
            removed=list(self._tokenizer.hf.all_special_tokens),
        )
        prompt = (
            {"prompt": written.text, MEDIA: parts}
            if parts
            else self._tokenizer.encode_plain(written.text)
        )
        answer, begun = Answer(), False
        try:
            with closing(self._llm.stream(prompt, self._params)) as deltas:
                for delta in deltas:
                    begun = True
                    for piece in reader.feed(delta.text):
                        answer.add(piece)
                        yield piece
                for piece in reader.end():
                    answer.add(piece)
                    yield piece
        finally:
            if begun:
                self.messages = [*asked, {"role": "assistant", "content": answer.text}]

    def _question(self, text: str) -> dict[str, Any]:
        """Return what a person says; their first message is about the images and sounds."""
        if not self._about or any(each["role"] == "user" for each in self.messages):
            return {"role": "user", "content": text}
        content = [{"type": part.kind, part.kind: part} for part in self._about]
        return {"role": "user", "content": [*content, {"type": "text", "text": text}]}


def _read_parts(llm: LLM, parts: Sequence[MediaPart]) -> list[MediaPart]:
    """Return images and sounds as they are decoded, images first."""
    if not parts:
        return []
    if llm.prompts.processor.reads_messages:
        raise UsageError("the model's sounds come in messages", hint="Leave --chat out")
    media = llm.prompts.media({"prompt": "", MEDIA: list(parts)})
    images = [MediaPart("image", each) for each in media.images]
    return [*images, *(MediaPart("audio", each) for each in media.sounds)]
