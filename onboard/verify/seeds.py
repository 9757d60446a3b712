"""The seed of what is drawn where the caller names none."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

_SEED = "ONBOARD_SEED"


def fresh_seed() -> int:
    """Return the seed in the environment variable ONBOARD_SEED, a random one below 2**31 without
    it.
    """
    return int(os.environ.get(_SEED) or secrets.randbelow(2**31))


@contextmanager
def moved_seed(by: int) -> Iterator[None]:
    """Have the environment's seed, where there is one, be another for a while: that much larger."""
    told = os.environ.get(_SEED)
    if not told:
        yield
        return
    os.environ[_SEED] = str(int(told) + by)
    try:
        yield
    finally:
        os.environ[_SEED] = told
