"""What a request has besides its body, wherever it is answered: names, and tokens that are known.

A server that answers for one that is gone gives the same names, and goes on behind the tokens that
the client has had.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import blake2b

Place = tuple[int, int]
"""Which prompt of a request, and which output of that prompt."""


@dataclass
class RequestScope:
    """One request's."""

    key: str = field(default_factory=lambda: secrets.token_hex(16))
    """Names are made of it."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970."""
    sent: Mapping[Place, Sequence[int]] = field(default_factory=dict)
    """Tokens of outputs whose text the client has had from another server."""
    done: Callable[[Place, list[int], bool], None] | None = None
    """Called when all is written that an output's tokens bring; whether they were `sent`."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _told: Counter[Place] = field(default_factory=Counter)

    def new_name(self) -> str:
        """Return a name for something of the answer, 32 hexadecimal digits."""
        text = f"{self.key} {next(self._numbers)}"
        return blake2b(text.encode(), digest_size=16).hexdigest()

    def sent_of(self, prompt: int, outputs: int) -> list[Sequence[int]]:
        """Return the tokens that the outputs of a prompt have; of none of them an empty list."""
        found = [self.sent.get((prompt, output), ()) for output in range(outputs)]
        return found if any(found) else []

    def is_sent(self, place: Place) -> bool:
        """Whether the next tokens of an output are those that the client has had."""
        return self._told[place] < len(self.sent.get(place, ()))

    def took(self, place: Place, tokens: list[int]) -> None:
        """Record that everything is written that an output's next tokens bring."""
        if self.done is not None:
            self.done(place, tokens, self.is_sent(place))
        self._told[place] += len(tokens)


_scope: ContextVar[RequestScope | None] = ContextVar("onboard_request_scope", default=None)


def request_scope() -> RequestScope:
    """Return the scope of the request that is being answered."""
    return _scope.get() or RequestScope()


@contextmanager
def in_scope(scope: RequestScope) -> Iterator[None]:
    """Answer a request in its scope: what runs within, and the tasks that it starts, have it."""
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)
