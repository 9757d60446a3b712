"""Which interface has which path."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from onboard.serve.dialects.anthropic_messages import Messages, MessagesBody
from onboard.serve.dialects.chat import Chat, ChatBody
from onboard.serve.dialects.completions import Completion, CompletionBody
from onboard.serve.dialects.embeddings import EmbeddingBody, Embeddings
from onboard.serve.dialects.fields import Body
from onboard.serve.dialects.responses import Response, ResponsesBody
from onboard.serve.refusals import RefusedError
from onboard.serve.service import Service


class Asked(Protocol):
    """A request that is on its way."""

    async def prepare(self) -> None:
        """Do what comes before the first token, so that what is wrong has its status."""

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer."""

    def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as it comes."""

    def failed(self, refusal: RefusedError) -> bytes:
        """Return the event that ends a stream on which something failed."""


@dataclass(frozen=True)
class Dialect:
    """How requests of a path are read and answered."""

    body: type[Body]
    asked: Callable[[Service, Any], Asked]


DIALECTS = {
    "/v1/completions": Dialect(CompletionBody, Completion),
    "/v1/chat/completions": Dialect(ChatBody, Chat),
    "/v1/embeddings": Dialect(EmbeddingBody, Embeddings),
    "/v1/responses": Dialect(ResponsesBody, Response),
    "/v1/messages": Dialect(MessagesBody, Messages),
}
