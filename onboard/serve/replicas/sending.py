"""A request's way to a replica and, where that one is lost, to another one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from prometheus_client import CollectorRegistry, Counter

from onboard.serve.refusals import RefusedError
from onboard.serve.replicas.passed_on import Asked, Head, Part, ReplicaLostError, Replicas
from onboard.serve.replicas.prefix_routes import PrefixRoutes, prompt_blocks
from onboard.serve.request_scope import Place

_LOSSES = 4
"""Replicas that a request may lose before it gets any further: it may be what ends them."""
_PATIENCE = 120.0
"""Seconds that a request waits for a replica where there is none."""
_log = logging.getLogger("onboard.serve")


@dataclass
class Sender:
    """Sends requests to replicas."""

    replicas: Replicas
    routes: PrefixRoutes = field(default_factory=PrefixRoutes)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        self._again = Counter(
            "onboard:requests_sent_again",
            "Requests that another replica went on with, as theirs was lost.",
            registry=self.registry,
        )

    async def answer(self, asked: Asked) -> AsyncGenerator[Head | bytes, None]:
        """Yield the head of an answer, then its body; leaving cancels it.

        What the client has had is not sent again: the next replica is told of the tokens, and goes
        on behind them. Raises `RefusedError` where replicas are lost again and again.
        """
        blocks, begun, losses = prompt_blocks(asked.body), False, 0
        sent: dict[Place, list[int]] = {}
        while losses < _LOSSES:
            head: Head | None = None
            rest = replace(asked, sent={place: list(tokens) for place, tokens in sent.items()})
            try:
                async with aclosing(self._ask(rest, blocks)) as parts:
                    async for part in parts:
                        if isinstance(part, Head):
                            head = part
                            continue
                        losses = 0
                        for place, tokens in part.tokens:
                            sent.setdefault(place, []).extend(tokens)
                        if not begun and head is not None:
                            begun = True
                            yield head
                        yield part.body
                if head is not None and not begun:
                    yield head
                return
            except ReplicaLostError:
                losses += 1
                self._again.inc()
                _log.warning("a replica was lost; another one goes on with its request")
        raise RefusedError("the replicas that answered were lost", status=503)

    async def _ask(self, asked: Asked, blocks: list[bytes]) -> AsyncGenerator[Head | Part, None]:
        """Yield a replica's answer, and count it as that one's as long."""
        chosen, name = await self._chosen(blocks), None
        try:
            async with aclosing(self.replicas.ask(asked, chosen)) as parts:
                self.routes.begun(name := chosen, blocks)
                async for part in parts:
                    if isinstance(part, Head) and part.replica != name:
                        self.routes.ended(name)
                        self.routes.begun(name := part.replica, blocks)
                    yield part
        finally:
            if name is not None:
                self.routes.ended(name)

    async def _chosen(self, blocks: list[bytes]) -> str:
        """Return a replica; wait for one where there is none."""
        for _ in range(int(_PATIENCE * 10)):
            if (chosen := self.routes.choose(blocks, self.replicas.live)) is not None:
                return chosen
            await asyncio.sleep(0.1)
        raise RefusedError("there is no replica", status=503)
