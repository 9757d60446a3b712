"""What may pass is waited out: GitHub's limits as long as it says, its errors and cut connections
longer each time.

See https://docs.github.com/en/rest/using-the-rest-api/best-practices-for-using-the-rest-api.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import requests
from github import GithubException
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt

from onboard.errors import OnboardError, UsageError

T = TypeVar("T")
Tell = Callable[[str], None]
ATTEMPTS = 6
MOST_WAIT = 3700.0
"""Seconds; GitHub's limits are of an hour."""
_SECONDARY = 60.0
"""Seconds to wait for a secondary limit that says no time."""


class LaterError(OnboardError):
    """Something is in the way that passes, or that the user can take out of it: a watcher tries again
    at its next look.
    """


class UnreachableError(LaterError):
    """GitHub could not be asked, and may answer later."""


def patiently(
    call: Callable[[], T],
    tell: Tell,
    *,
    attempts: int = ATTEMPTS,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Return what a call of GitHub returns, repeated while what it fails with may pass.

    Raises:
        UnreachableError: it still fails after so many attempts.
        OnboardError: GitHub refuses it.
    """

    def before_sleep(state: RetryCallState) -> None:
        wait = state.next_action.sleep if state.next_action else 0.0
        tell(f"{_reason(_error_of(state))}: again in {wait:.0f} s")

    retrying = Retrying(
        retry=retry_if_exception(may_pass),
        wait=lambda state: seconds_to_wait(_error_of(state), state.attempt_number),
        stop=stop_after_attempt(attempts),
        before_sleep=before_sleep,
        sleep=sleep,
        reraise=True,
    )
    try:
        return retrying(call)
    except (GithubException, requests.RequestException) as error:
        raise _told(error) from error


def may_pass(error: BaseException) -> bool:
    """Whether a call that failed so may succeed later."""
    if isinstance(error, GithubException):
        return error.status == 429 or error.status >= 500 or _is_limit(error)
    return isinstance(
        error,
        requests.ConnectionError | requests.Timeout | requests.exceptions.ChunkedEncodingError,
    )


def seconds_to_wait(error: BaseException, attempt: int) -> float:
    """Return what GitHub asks for, or twice as long each time."""
    doubled = float(min(2 ** (attempt - 1), 60))
    if not isinstance(error, GithubException):
        return doubled
    headers = _headers(error)
    if (asked := _number(headers.get("retry-after"))) is not None:
        return min(asked, MOST_WAIT)
    reset = _number(headers.get("x-ratelimit-reset"))
    if headers.get("x-ratelimit-remaining") == "0" and reset is not None:
        return min(max(reset - time.time(), 0.0) + 1.0, MOST_WAIT)
    return max(doubled, _SECONDARY) if _is_limit(error) else doubled


def _is_limit(error: GithubException) -> bool:
    headers = _headers(error)
    counted = "retry-after" in headers or headers.get("x-ratelimit-remaining") == "0"
    return error.status in (403, 429) and (counted or "rate limit" in _message(error).lower())


def _headers(error: GithubException) -> dict[str, str]:
    headers: Mapping[str, Any] = error.headers or {}
    return {name.lower(): str(value) for name, value in headers.items()}


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else max(float(text), 0.0)
    except ValueError:
        return None


def _error_of(state: RetryCallState) -> BaseException:
    error = state.outcome.exception() if state.outcome is not None else None
    assert error is not None
    return error


def _reason(error: BaseException) -> str:
    if not isinstance(error, GithubException):
        return "GitHub cannot be reached"
    return "GitHub's limit is reached" if _is_limit(error) else f"GitHub answers {error.status}"


def _told(error: GithubException | requests.RequestException) -> OnboardError:
    """Return the error as the user sees it; nothing of a request's headers is in it."""
    if may_pass(error):
        return UnreachableError(_reason(error), hint="Run the command again later")
    if not isinstance(error, GithubException):
        return OnboardError(f"GitHub cannot be asked ({type(error).__name__})")
    said = _message(error)
    match error.status:
        case 401:
            return UsageError(f"GitHub does not take the token ({said})", hint="Set another one")
        case 403 | 404:
            hint = "See whether the repository is right, and whether the token may do this"
            return OnboardError(f"GitHub refuses this ({error.status}: {said})", hint=hint)
        case status:
            return OnboardError(f"GitHub refuses this ({status}: {said})")


def _message(error: GithubException) -> str:
    data = error.data if isinstance(error.data, dict) else {}
    details = data.get("errors") or []
    words = [str(data.get("message") or error.message or "")]
    words += [str(each.get("message", "")) for each in details if isinstance(each, dict)]
    return " ".join(" ".join(filter(None, words)).split())[:300]
