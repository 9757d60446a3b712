"""The numbers under which the engine knows the adapters of a run."""

from __future__ import annotations

from collections.abc import Sequence

from onboard.errors import UsageError


def adapter_number(names: Sequence[str], name: str | None) -> int:
    """Return 0 for None, or 1 + the index of an adapter; raise `UsageError` for one that there is
    not.
    """
    if name is None:
        return 0
    if name not in names:
        known = ", ".join(names) or "there are none"
        raise UsageError(f"there is no adapter {name!r:.100}", hint=f"Adapters: {known}")
    return 1 + names.index(name)
