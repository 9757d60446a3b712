"""Drafts from a small model with the same vocabulary (Leviathan et al. 2023, arXiv:2211.17192; Chen
et al. 2023, arXiv:2302.01318).

Each request has a twin in the small model's engine, with the same tokens, sampling parameters and
random numbers: where both models give the same distribution, they choose the same token. What the
large model did not accept is taken back: keys of other tokens are written in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from onboard.runtime.engine import Engine
from onboard.runtime.scheduling.request import Request


class ModelDrafter:
    """Lets the model of `engine`, which serves nobody else, continue the requests.

    Its graph has no recurrent states, and a rotary table that does not depend on the length
    (`build_speculation` checks this).
    """

    def __init__(self, engine: Engine, num_tokens: int) -> None:
        self.engine, self._most = engine, num_tokens
        self._twins: WeakKeyDictionary[Request, Request] = WeakKeyDictionary()

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return the small model's continuation of each request; [] where its caches have no room."""
        self._forget_finished()
        twins = [self._prepared(request) for request in requests]
        self._run()
        return [
            [] if twin is None else twin.tokens[len(request.tokens) :]
            for request, twin in zip(requests, twins, strict=True)
        ]

    def _forget_finished(self) -> None:
        for request, twin in list(self._twins.items()):
            if request.finish_reason is not None:
                self.engine.scheduler.cancel(twin)
                del self._twins[request]

    def _prepared(self, request: Request) -> Request | None:
        """Return the request's twin with its tokens, to be continued; None if it is too long, or has
        tokens that the small model does not know.
        """
        engine, tokens = self.engine, request.tokens
        limit = min(len(tokens) + self._most, engine.capacity)
        twin = self._twins.get(request)
        known = 0 if twin is None else len(twin.prompt)
        vocabulary = engine.vocab_size or 0
        if limit <= len(tokens) or not all(token < vocabulary for token in tokens[known:]):
            return None
        if twin is None:
            twin = self._twins[request] = Request(list(tokens), request.params, request.key)
            twin.limit = limit
            engine.scheduler.add(twin)
        else:
            engine.scheduler.rewind(twin, tokens, limit)
            twin.prompt = list(tokens)
        return twin

    def _run(self) -> None:
        """Continue all twins to their limits."""
        scheduler = self.engine.scheduler
        while (step := scheduler.schedule_ahead()) is not None:
            tokens = self.engine.launch(step).chosen()
            scheduler.append(step, tokens)
            scheduler.forget_windows(step)
