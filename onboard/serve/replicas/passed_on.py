"""What a front and its replicas tell one another."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from onboard.serve.request_scope import Place


@dataclass(frozen=True)
class Asked:
    """A request, as every replica can answer it."""

    method: str
    path: str
    body: bytes
    key: str
    """Of the names in its answer."""
    created: int
    """Seconds since 1970."""
    sent: dict[Place, list[int]] = field(default_factory=dict)
    """Tokens of its outputs whose text the client has had."""


@dataclass(frozen=True)
class Head:
    """The beginning of an answer."""

    replica: str
    """Who answers."""
    status: int
    headers: list[tuple[bytes, bytes]]

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream of events."""
        return any(value.startswith(b"text/event-stream") for _, value in self.headers)


@dataclass(frozen=True)
class Part:
    """More of an answer, whole: no event of `tokens` is missing, and none is of others."""

    body: bytes
    tokens: Sequence[tuple[Place, list[int]]]


class ReplicaLostError(Exception):
    """A replica was gone before it had answered."""


class Replicas(Protocol):
    """Replicas that answer."""

    @property
    def live(self) -> Set[str]:
        """The names of those that take requests."""

    def ask(self, asked: Asked, to: str | None) -> AsyncGenerator[Head | Part, None]:
        """Yield a replica's answer, that of `to` if it takes requests; leaving cancels it.

        Raises `ReplicaLostError`.
        """
