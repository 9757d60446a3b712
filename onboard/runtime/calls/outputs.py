"""What a request has produced, as callers get it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onboard.runtime.scheduling.request import FinishReason, Request


@dataclass(frozen=True)
class Completion:
    """One output of a prompt."""

    text: str
    """The generated text, without special tokens and stop text; empty if the checkpoint has no
    tokenizer.
    """
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[dict[int, float]] | None
    """For each generated token a mapping from token ids to log-probabilities; None unless
    `SamplingParams.logprobs` is set.

    With several codebooks the keys are columns of `LLM.logits`, and each codebook has its own
    distribution.
    """
    stop_reason: str | int | None = None
    """The stop text or stop token that ended it; None for an end-of-text token and other ends."""
    num_preemptions: int = 0
    """How often the request was preempted: it lost its pages and was computed again."""


@dataclass(frozen=True)
class Delta:
    """What one output has got since the last delta."""

    index: int
    """Which of the prompt's outputs."""
    text: str
    """Text that stays: no stop text begins in it, and no character is unfinished."""
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    """An entry for each of `token_ids`; None unless `SamplingParams.logprobs` is set."""
    finish_reason: FinishReason | None
    """None: more is to come."""
    stop_reason: str | int | None = None
    """As in `Completion`."""
    num_cached_tokens: int = 0
    """As in `RequestOutput`."""


@dataclass(frozen=True)
class RequestOutput:
    """The result for one prompt: `n` outputs. The properties are those of the first output."""

    prompt: str | None
    """The prompt's text; None if the prompt was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[dict[int, float] | None] | None = None
    """An entry for each token of the prompt, None for the first; None unless
    `SamplingParams.prompt_logprobs` is set.
    """
    num_cached_tokens: int = 0
    """Leading tokens of the prompt that were reused from the prefix cache."""

    @property
    def text(self) -> str:
        """The first output's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first output's token ids."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first output finished."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[dict[int, float]] | None:
        """The first output's log-probabilities."""
        return self.outputs[0].logprobs


def request_output(
    prompt: str | None, token_ids: list[int], outputs: Sequence[Request]
) -> RequestOutput:
    """Return what the finished requests of one prompt have produced."""
    cached = num_cached_tokens(outputs)
    completions = [_completion(each) for each in outputs]
    return RequestOutput(prompt, token_ids, completions, outputs[0].prompt_logprobs, cached)


def num_cached_tokens(outputs: Sequence[Request]) -> int:
    """Return how many leading tokens of a prompt were found in the prefix cache."""
    return min(outputs[0].num_reused or 0, len(outputs[0].prompt))


def _completion(output: Request) -> Completion:
    assert output.finish_reason is not None
    logprobs = output.logprobs if output.params.logprobs is not None else None
    ended = output.finish_reason, logprobs, output.stop_reason
    return Completion(output.text, output.generated, *ended, output.num_preemptions)
