"""What a model says of given tokens, as lm-evaluation-harness asks for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onboard.errors import UsageError
from onboard.runtime.llm import LLM

_AT_ONCE = 64
"""Continuations whose logits are held at a time."""


def continuation_scores(
    llm: LLM, requests: Sequence[tuple[Sequence[int], Sequence[int]]], longest: int
) -> list[tuple[float, bool]]:
    """Return for each context and continuation the continuation's log-probability, in nats, and
    whether each of its tokens is the most likely one; several run in one step.

    A context that is too long for `longest` tokens loses its first ones. Raises `UsageError` for an
    empty context or continuation, and for a continuation that is too long itself.
    """
    for context, continuation in requests:
        if not context or not 0 < len(continuation) <= longest:
            raise UsageError(
                f"a context of {len(context)} and a continuation of {len(continuation)} tokens have no score",
                hint=f"Both need a token, and the continuation has at most {longest}",
            )
    found: list[tuple[float, bool]] = []
    for start in range(0, len(requests), _AT_ONCE):
        part = requests[start : start + _AT_ONCE]
        prompts = [[*context, *wanted][-(longest + 1) : -1] for context, wanted in part]
        rows = llm.last_logits(prompts, [len(wanted) for _, wanted in part])
        found += [_score(each, wanted) for each, (_, wanted) in zip(rows, part, strict=True)]
    return found


def _score(rows: torch.Tensor, continuation: Sequence[int]) -> tuple[float, bool]:
    logprobs, wanted = rows.log_softmax(-1), torch.tensor(list(continuation))
    score = logprobs.gather(1, wanted.unsqueeze(1)).sum()
    return float(score), bool((logprobs.argmax(-1) == wanted).all())
