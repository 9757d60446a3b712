"""The seed of what is drawn where the caller names none."""

from __future__ import annotations

import os
import secrets


def fresh_seed() -> int:
    """Return the seed in the environment variable ONBOARD_SEED, a random one below 2**31 without
    it.
    """
    return int(os.environ.get("ONBOARD_SEED") or secrets.randbelow(2**31))
