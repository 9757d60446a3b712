"""Which replicas take requests, as the router of this process knows them.

A module of its own: Ray copies the router's class with what its module has, and not this.
"""

from __future__ import annotations

LIVE: set[str] = set()
"""Their names."""
