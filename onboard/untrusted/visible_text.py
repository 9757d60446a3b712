"""Control characters in text that a model or a program wrote: what shows it is spared them."""

from __future__ import annotations

import re

# Of the C0 and C1 characters a text needs only these two; ESC begins what a terminal obeys. Half a
# surrogate pair has no bytes in UTF-8.
_CONTROL = re.compile(
    r"[^\n\t\x20-\x7e\xa0-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]|[\ud800-\udfff]"
)


def escaped(text: str) -> str:
    r"""Return a text with control characters, and those that turn its direction, written out:
    \x1b.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
