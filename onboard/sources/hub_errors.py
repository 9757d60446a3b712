"""Why the Hub's client failed, whether to ask again, and how to use its cache alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from onboard.errors import NoSuchModelError, OnboardError

if TYPE_CHECKING:
    from onboard.hub import HubSource

_asked_to_stay_offline = False
Found = TypeVar("Found")
FETCH_AGAIN = "Fetch the checkpoint again"
_TRY_AGAIN, _MAY_YOU = "Try again", "Check the id, the endpoint and what HF_TOKEN may read"
_PAUSES = (1.0, 4.0)
"""Seconds before a Hub is asked again."""
_BUSY = (429, 500, 502, 503, 504)
_CUT_OFF = ("RemoteProtocolError", "ReadError", "ReadTimeout")
"""What httpx and httpx2, of which releases of the client have one, call an answer that ends early."""


def go_offline() -> None:
    """Use the local cache alone from here on, in child processes too, as --offline asks.

    The libraries read the variable when they are imported, so that this comes before.
    """
    global _asked_to_stay_offline
    _asked_to_stay_offline = True
    os.environ["HF_HUB_OFFLINE"] = "1"


def _way_online() -> str:
    """Return how to leave the mode in which nothing is fetched: what turned it on has to go."""
    if _asked_to_stay_offline:
        return "Run once without --offline"
    name = next(
        (name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name)),
        "HF_HUB_OFFLINE",
    )
    return f"{name} is set: unset it once to fetch the model"


def patiently(ask: Callable[[], Found]) -> Found:
    """Return what a Hub answers; where it is busy, or an answer is cut off, it is asked three times.

    Its client does so for some of a file's failures, and for none of a header.
    """
    from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_chain, wait_fixed

    asked = Retrying(
        stop=stop_after_attempt(1 + len(_PAUSES)),
        wait=wait_chain(*map(wait_fixed, _PAUSES)),
        retry=retry_if_exception(lambda error: any(map(_passes, _chain(error)))),
        reraise=True,
    )
    return asked(ask)


def _passes(error: BaseException) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status in _BUSY or type(error).__name__ in _CUT_OFF


def explain_hub_error(error: Exception, source: HubSource) -> OnboardError:
    """Return the one line that says why the Hub's client failed.

    The client wraps one failure in another (offline in a cache miss in an HTTP error), so the whole
    chain decides.
    """
    from huggingface_hub import constants, errors

    chain = _chain(error)

    def found(*types: type[BaseException]) -> bool:
        return any(isinstance(link, types) for link in chain)

    revision = source.requested or "main"
    if found(errors.HFValidationError):
        return NoSuchModelError(
            f"{source.model!r} is neither a folder nor a Hub id", hint="An id looks like org/name"
        )
    if found(errors.GatedRepoError, errors.DisabledRepoError):
        return OnboardError(
            f"access to {source.model} is restricted",
            hint=f"Accept its terms at {constants.ENDPOINT}/{source.model} and set HF_TOKEN or run `hf auth login`",
        )
    if found(errors.RevisionNotFoundError):
        return OnboardError(f"{source.model} has no revision {revision!r}", hint="Check --revision")
    if found(errors.RepositoryNotFoundError):
        return NoSuchModelError(
            f"there is no model {source.model} on {constants.ENDPOINT}",
            hint="Check the id; for a private model set HF_TOKEN or run `hf auth login`",
        )
    if source.offline or constants.HF_HUB_OFFLINE:
        return NoSuchModelError(
            f"{source.model} (revision {revision}) is not complete in the cache {constants.HF_HUB_CACHE}",
            hint="Run once without --offline" if source.offline else _way_online(),
        )
    if found(errors.HfHubHTTPError):
        reason = next(link for link in reversed(chain) if isinstance(link, errors.HfHubHTTPError))
        return OnboardError(
            f"{constants.ENDPOINT} failed for {source.model}: {first_line(reason).rstrip('.')}",
            hint=_TRY_AGAIN if _passes(reason) else _MAY_YOU,
        )
    return OnboardError(
        f"{constants.ENDPOINT} cannot be reached for {source.model} ({first_line(chain[-1])})",
        hint="Check the network, or use --offline with a cached model",
    )


def fetch_again(file: Path) -> str:
    """Return what to do about a damaged file of weights: the client's cache has the file elsewhere,
    linked, and would go on to give it out.
    """
    stored = file.resolve()
    if stored.parent.name != "blobs":
        return FETCH_AGAIN
    return f"Delete {stored}, which the Hub's cache keeps, and fetch the checkpoint again"


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return chain


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return (str(error) or type(error).__name__).strip().splitlines()[0]
