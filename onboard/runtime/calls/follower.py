"""Requests that are followed while they run: what each has got since one last looked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from onboard.runtime.calls.outputs import Delta, num_cached_tokens
from onboard.runtime.calls.request_texts import RequestTexts
from onboard.runtime.scheduling.request import Request


class Follower:
    """Follows the outputs of one prompt; look between two steps of the engine."""

    def __init__(self, outputs: Sequence[Request], texts: RequestTexts) -> None:
        self.outputs = list(outputs)
        self._texts = texts
        self._tokens = [0] * len(outputs)
        self._characters = [0] * len(outputs)
        self._told = [False] * len(outputs)

    @property
    def finished(self) -> bool:
        """Whether the end of every output has been told."""
        return all(self._told)

    def deltas(self) -> Iterator[Delta]:
        """Yield what is new, an output each; of tokens that outputs had from the beginning one each,
        as they were told where they were generated.
        """
        for index, output in enumerate(self.outputs):
            yield from self._given(index, output)
            is_new = output.num_generated > self._tokens[index]
            if not self._told[index] and (is_new or output.finish_reason is not None):
                yield self._rest(index, output)

    def _given(self, index: int, output: Request) -> Iterator[Delta]:
        """Yield the tokens that an output was queued with, all but one that ended it."""
        text = self._texts.certain(output) if output.given else ""
        for length in output.given[: len(output.given) - (output.finish_reason is not None)]:
            yield self._delta(index, output, text[:length], self._tokens[index] + 1)
        output.given = []

    def _rest(self, index: int, output: Request) -> Delta:
        self._told[index] = output.finish_reason is not None
        text, ended = self._texts.certain(output), (output.finish_reason, output.stop_reason)
        return self._delta(index, output, text, output.num_generated, *ended)

    def _delta(self, index: int, output: Request, text: str, end: int, *ended: Any) -> Delta:
        """Return what is new in the text up to the generated token number `end`."""
        start, begin = self._tokens[index], self._characters[index]
        self._tokens[index], self._characters[index] = end, max(begin, len(text))
        logprobs = output.logprobs[start:end] if output.params.logprobs is not None else None
        tokens, cached = output.generated[start:end], num_cached_tokens(self.outputs)
        reason, by = ended or (None, None)
        return Delta(index, text[begin:], tokens, logprobs, reason, by, cached)
