"""Where in a text its tokens begin."""

from __future__ import annotations

from collections.abc import Sequence

from onboard.runtime.tokenizer import Detokenizer, Tokenizer


class TextPlaces:
    """The places of tokens in a text that grows from `start` on, in characters.

    Tokens that are not in the text (special ones, with `skip_special_tokens`) and those of one
    character begin at one place. Without a tokenizer there is no text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, start: int = 0, *, skip_special_tokens: bool = True
    ) -> None:
        self._start, self._tokens = start, list[int]()
        self._growing: Detokenizer | None = None
        self._held = False
        if tokenizer is not None:
            self._growing = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)

    def following(self, tokens: Sequence[int]) -> list[int]:
        """Return where the next tokens begin."""
        return [self._next(token) for token in tokens]

    def _next(self, token: int) -> int:
        if self._growing is None:
            return self._start
        before = len(self._growing.text)
        self._tokens.append(token)
        after, was_held = len(self._growing.update(self._tokens)), self._held
        self._held = after == before
        if was_held and not self._held:  # bytes that were no character came with it
            before = after - len(self._growing.tokenizer.decode([token]))
        return self._start + before
