"""Requests that are refused: what the client is told, in OpenAI's words for errors."""

from __future__ import annotations

from typing import Any

from onboard.errors import OnboardError, UsageError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


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
        return _TYPES.get(self.status, "server_error")

    def body(self) -> dict[str, Any]:
        """Return the error as OpenAI's clients read it."""
        named = {"param": self.param, "code": self.code}
        return {"error": {"message": self.message, "type": self.kind, **named}}


def as_refusal(error: BaseException) -> RefusedError:
    """Return what a client is told of an error; of a defect of ours, only that there was one."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, UsageError):
        return RefusedError(" ".join(str(error).split()))
    if isinstance(error, OnboardError):
        return RefusedError(" ".join(str(error).split()), status=500)
    return RefusedError("the server failed; its log says how", status=500)
