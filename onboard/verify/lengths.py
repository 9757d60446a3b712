"""The lengths at which a model may do something else: its windows, chunks and original
positions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_NAMES = re.compile(r"window|chunk|original_max_position|block_size|local")


def thresholds(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers in a Hugging Face config (as a dict) that lengths are compared with, by
    field.

    Longest possible sequences are none of them: no sequence exceeds these.
    """
    return dict(sorted(_found(config), key=lambda item: item[1]))


def _found(values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _found(value)
        elif type(value) is int and value > 1 and _NAMES.search(str(key)):
            yield str(key), value
