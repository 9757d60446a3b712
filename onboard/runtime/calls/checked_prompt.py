"""What a prompt must be before anything is done with it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onboard.errors import UsageError


def check_prompt(
    prompt: Sequence[int], vocab_size: int | None, capacity: int, *, room_for: int
) -> None:
    """Raise `UsageError` for a prompt that is empty, has a token that is not below `vocab_size` (None:
    unknown), or leaves no room for `room_for` tokens behind it in the `capacity` of a sequence.
    """
    if not len(prompt):
        raise UsageError("a prompt has no tokens", hint="Give at least one token")
    # On a GPU an embedding lookup out of range ends the process.
    last = vocab_size - 1 if vocab_size else math.inf
    if (bad := min(prompt)) < 0 or (bad := max(prompt)) > last:
        raise UsageError(f"a prompt has token {bad}", hint=f"Token ids go from 0 to {last}")
    if len(prompt) + room_for > capacity:
        raise UsageError(
            f"a prompt has {len(prompt)} tokens and a sequence can have {capacity} in all",
            hint="Shorten it, or raise max_seq_len (and the cache's max_tokens)",
        )
