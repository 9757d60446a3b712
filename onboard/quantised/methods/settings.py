"""What a config says of a method: values that are known, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeGuard

from onboard.errors import OnboardError

_LONGEST_PATTERN = 300
_LARGEST = 1 << 20
"""Of a group's inputs, or a block's side."""


def refusal(method: str, what: str) -> OnboardError:
    """Return the error for a scheme that is not read."""
    return OnboardError(
        f"the checkpoint is quantised by {method} with {what}, which onboard cannot read",
        hint="Use another release of the model",
    )


def check_keys(method: str, values: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise `OnboardError` for the first key that says nothing to us: it may change every weight.

    What is empty, off or none says nothing at all.
    """
    for key, value in values.items():
        if value and key not in known:
            raise refusal(method, f"the unknown key {str(key)[:60]!r}")


def one_of(method: str, values: Mapping[str, Any], key: str, allowed: Collection[Any]) -> Any:
    """Return a value; raise `OnboardError` where it is none of those that are read."""
    value = values.get(key)
    if not any(value == each and type(value) is type(each) for each in allowed):
        raise refusal(method, f"{key} = {str(value)[:60]}")
    return value


def group_of(method: str, values: Mapping[str, Any], key: str = "group_size") -> int | None:
    """Return the inputs that share a scale; None for -1: all of them."""
    value = values.get(key)
    if type(value) is not int or value == 0 or value < -1 or value > _LARGEST:
        raise refusal(method, f"{key} = {str(value)[:60]}")
    return None if value == -1 else value


def is_block(value: object) -> TypeGuard[Sequence[int]]:
    """Tell whether a value is the outputs and the inputs of a block."""
    sizes = value if isinstance(value, list | tuple) else []
    return len(sizes) == 2 and all(type(size) is int and 0 < size <= _LARGEST for size in sizes)


def pattern_of(method: str, text: str) -> re.Pattern[str]:
    """Return a compiled pattern of a config; raise `OnboardError` for one that is none, or that could
    take for ever.
    """
    if len(text) > _LONGEST_PATTERN or re.search(r"[+*}]\)?[+*{]", text):
        raise refusal(method, f"the pattern {text[:60]!r}")
    try:
        return re.compile(text)
    except re.error as error:
        raise refusal(method, f"the pattern {text[:60]!r}") from error
