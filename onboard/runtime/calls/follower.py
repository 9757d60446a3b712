"""Requests that are followed while they run: what each has got since one last looked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
        """Yield what is new, an output each."""
        for index, output in enumerate(self.outputs):
            is_new = output.num_generated > self._tokens[index]
            if not self._told[index] and (is_new or output.finish_reason is not None):
                yield self._delta(index, output)

    def _delta(self, index: int, output: Request) -> Delta:
        start, text = self._tokens[index], self._texts.certain(output)
        new = text[self._characters[index] :]
        self._tokens[index], self._characters[index] = output.num_generated, len(text)
        self._told[index] = output.finish_reason is not None
        logprobs = output.logprobs[start:] if output.params.logprobs is not None else None
        new_tokens, ended = output.generated[start:], output.finish_reason
        cached = num_cached_tokens(self.outputs)
        return Delta(index, new, new_tokens, logprobs, ended, output.stop_reason, cached)
