"""The names of those whom a model is measured beside; kept apart, so that a wrong one is found
before torch is here.
"""

from __future__ import annotations

from typing import Literal

from onboard.errors import UsageError

PeerName = Literal["hf", "hf-compiled"]
PEERS: tuple[PeerName, ...] = ("hf", "hf-compiled")


def parse_peers(text: str) -> list[PeerName]:
    """Return the peers of a comma-separated list; raise `UsageError` for another word."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if bad := [word for word in words if word not in PEERS]:
        raise UsageError(f"--compare {bad[0]!r} is no peer", hint=f"Use {', '.join(PEERS)}")
    return [peer for peer in PEERS if peer in words]
