"""What a model says of given tokens, as lm-evaluation-harness asks for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onboard.errors import UsageError
from onboard.runtime.llm import LLM


def continuation_score(
    llm: LLM, context: Sequence[int], continuation: Sequence[int], longest: int
) -> tuple[float, bool]:
    """Return the log-probability of a continuation, in nats, and whether each of its tokens is the
    most likely one.

    A context that is too long for `longest` tokens loses its first ones. Raises `UsageError` for an
    empty context or continuation, and for a continuation that is too long itself.
    """
    if not context or not 0 < len(continuation) <= longest:
        raise UsageError(
            f"a context of {len(context)} and a continuation of {len(continuation)} tokens have no score",
            hint=f"Both need a token, and the continuation has at most {longest}",
        )
    tokens = [*context, *continuation][-(longest + 1) :]
    rows = llm.logits(tokens[:-1])[-len(continuation) :]
    logprobs = rows.log_softmax(-1)
    wanted = torch.tensor(list(continuation))
    score = logprobs.gather(1, wanted.unsqueeze(1)).sum()
    return float(score), bool((logprobs.argmax(-1) == wanted).all())
