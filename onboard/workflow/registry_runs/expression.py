"""The expressions of `--filter`: terms beside each other must all hold: `family=llama,qwen3
status!=passed name~*-8B*`.

A term is a field of an entry, an operator and what it is compared with: `=` one of the words
between commas, `!=` none of them, `~` and `!~` the same with `*` and `?` as in file names. Case
does not matter; a field that an entry lacks is empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from onboard.config import suggest
from onboard.errors import UsageError
from onboard.registry import RegistryEntry

FIELDS = ("name", "config_id", "family", "architecture", "status", "tested", "note")
_TERM = re.compile(r"(?P<field>\w+)(?P<operator>!=|!~|=|~)(?P<words>\S*)")
Predicate = Callable[[RegistryEntry], bool]


def parse(expression: str) -> Predicate:
    """Return what tells whether an entry is meant; raise `UsageError` for what is no expression."""
    terms = [_term(text) for text in expression.split()]
    return lambda entry: all(term(entry) for term in terms)


def _term(text: str) -> Predicate:
    match = _TERM.fullmatch(text)
    if match is None:
        forms = "FIELD=WORD, FIELD!=WORD, FIELD~PATTERN or FIELD!~PATTERN"
        raise UsageError(f"--filter: {text!r} is no term", hint=f"Write {forms}")
    field, operator, words = match["field"], match["operator"], match["words"].lower().split(",")
    if field not in FIELDS:
        raise UsageError(f"--filter: an entry has no field {field!r}", hint=suggest(field, FIELDS))
    return lambda entry: _holds(str(getattr(entry, field) or "").lower(), operator, words)


def _holds(value: str, operator: str, words: Sequence[str]) -> bool:
    found = any(fnmatchcase(value, word) for word in words) if "~" in operator else value in words
    return found is not operator.startswith("!")
