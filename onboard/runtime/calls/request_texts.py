"""The text of each request: while it grows, and at its end."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from onboard.runtime.sampling_params import SamplingParams
from onboard.runtime.scheduling.request import Request
from onboard.runtime.tokenizer import Detokenizer, Tokenizer


class RequestTexts:
    """Turns the tokens of requests into text; without a tokenizer there is none."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        # Never by `id`: that of a request which has gone is given to the next one.
        self._growing: WeakKeyDictionary[Request, Detokenizer] = WeakKeyDictionary()

    def so_far(self, request: Request) -> str:
        """Return the text without an unfinished character at its end, and without a stop text."""
        text = self._grown(request)
        position = stop_position(text, request.params)
        return text if position is None else text[:position]

    def certain(self, request: Request) -> str:
        """Return the part of `so_far` that stays, whatever comes: no stop text begins in it."""
        if request.finish_reason is not None:
            return request.text
        text = self.so_far(request)
        held = (_begun(text, stop) for stop in request.params.stop)
        return text[: len(text) - max(held, default=0)]

    def stopped_by(self, request: Request) -> str | None:
        """Return the stop text that the text has, None if it has none."""
        found = _first_stop(self._grown(request), request.params)
        return None if found is None else found[1]

    def finish(self, request: Request) -> None:
        """Set the request's text, and forget how it grew."""
        if self._tokenizer is None:
            return
        shown = request.generated
        if shown and shown[-1] in request.last_tokens:
            shown = shown[:-1]
        params = request.params
        request.text = self._tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens)
        if params.stop and self.stopped_by(request) is not None:
            request.text = self.so_far(request)
        self._growing.pop(request, None)

    def clear(self) -> None:
        """Forget all requests."""
        self._growing.clear()

    def _grown(self, request: Request) -> str:
        if self._tokenizer is None:
            return ""
        growing = self._growing.get(request)
        if growing is None:
            special, start = request.params.skip_special_tokens, len(request.prompt)
            growing = Detokenizer(self._tokenizer, skip_special_tokens=special, start=start)
            self._growing[request] = growing
        return growing.update(request.tokens)


def stop_position(text: str, params: SamplingParams) -> int | None:
    """Return where a text ends because of the first of its stop texts, None if it has none."""
    found = _first_stop(text, params)
    if found is None:
        return None
    place, stop = found
    return place + len(stop) if params.include_stop_str_in_output else place


def _first_stop(text: str, params: SamplingParams) -> tuple[int, str] | None:
    """Return the first stop text in a text, and where it begins."""
    found = ((place, stop) for stop in params.stop if (place := text.find(stop)) >= 0)
    return min(found, default=None)


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a stop text."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
