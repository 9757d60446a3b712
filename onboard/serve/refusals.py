"""Requests that are refused: what the client is told, in OpenAI's words for errors."""

from __future__ import annotations

from typing import Any

from onboard.errors import OnboardError, UsageError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_OF_MESSAGES = {413: "request_too_large", 500: "api_error"}
"""Where Anthropic's name is another one."""


class RefusedError(Exception):
    """A request that is refused with an HTTP status; `param` names the field that is wrong."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    @property
    def kind(self) -> str:
        """OpenAI's name for the kind of error."""
        others = "invalid_request_error" if self.status < 500 else "server_error"
        return _TYPES.get(self.status, others)

    def body(self) -> dict[str, Any]:
        """Return the error as OpenAI's clients read it."""
        named = {"param": self.param, "code": self.code}
        return {"error": {"message": self.message, "type": self.kind, **named}}

    def body_of_messages(self) -> dict[str, Any]:
        """Return the error as Anthropic's clients read it."""
        kind = _OF_MESSAGES.get(self.status, self.kind)
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def as_refusal(error: BaseException) -> RefusedError:
    """Return what a client is told of an error; of a defect of ours, only that there was one."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, UsageError):
        return RefusedError(" ".join(str(error).split()))
    if isinstance(error, OnboardError):
        return RefusedError(" ".join(str(error).split()), status=500)
    return RefusedError("the server failed; its log says how", status=500)
