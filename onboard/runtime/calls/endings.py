"""When an output ends, and outputs that have tokens before they are queued."""

from __future__ import annotations

from collections.abc import Sequence

from onboard.runtime.calls.request_texts import RequestTexts
from onboard.runtime.scheduling.request import FinishReason, Request

Ending = tuple[FinishReason, str | int | None]
"""How an output ended, and the stop text or stop token that ended it."""


def ending(request: Request, texts: RequestTexts) -> Ending | None:
    """Return how a request ends with its latest token; None: it goes on, or its grammar knows."""
    params, token = request.params, request.tokens[-1]
    if token in request.last_tokens:
        return "stop", token if token in params.stop_token_ids else None
    if params.stop and (by := texts.stopped_by(request)) is not None:
        return "stop", by
    return ("length", None) if len(request.tokens) >= request.limit else None


def has_ended_with(request: Request, tokens: Sequence[int], texts: RequestTexts) -> bool:
    """Give a request that is not queued yet the tokens that it has generated elsewhere; return
    whether it ended with them.

    It is then as it is after a preemption: random numbers depend on a token's place alone, and
    penalties, grammars and stop texts on the tokens. Log-probabilities of these tokens are not
    known; they count as 0.
    """
    if not tokens:
        return False
    for token in tokens:
        request.tokens.append(token)
        # What is certain of a text depends on when one looked before.
        request.given.append(len(texts.certain(request)))
    if request.params.logprobs is not None:
        request.logprobs += [{token: 0.0} for token in tokens]
    end = ending(request, texts)
    if (adjusted := request.adjustments) is not None:
        followed = [adjusted.took(token) for token in tokens]
        end = end or (None if followed[-1] is None else (followed[-1], None))
    if end is None:
        return False
    request.finish_reason, request.stop_reason = end
    texts.finish(request)
    return True
