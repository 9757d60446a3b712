"""Which replica a request goes to: the one whose cache has most of its prompt, if it is not busy.

A replica keeps the keys and values of the prompts that it has read. What it has is guessed from
what it was sent: digests of the prompt's blocks, each of the block and all before it, so that two
prompts share as many as they have in common from the beginning.
"""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict
from collections.abc import Sequence, Set
from hashlib import blake2b

from pydantic_core import from_json

_BLOCK = 256
"""Characters of a block."""
_MOST_BLOCKS = 1024
"""Of a prompt; what comes behind them decides nothing."""
_MOST_KNOWN = 1 << 17
"""Digests that are kept, some 10 MB."""
_SLACK = 8
"""Requests that a replica may have more than another one, and still be asked for its cache."""
_PROMPTS = ("model", "tools", "system", "instructions", "messages", "prompt", "input")
"""Fields of bodies that come before an answer, in the order in which templates write them."""


def prompt_blocks(body: bytes) -> list[bytes]:
    """Return the digests of the blocks of a request's prompt; of what is no request none."""
    try:
        read = from_json(body)
    except ValueError:
        return []
    given = [read[name] for name in _PROMPTS if name in read] if isinstance(read, dict) else []
    text = "".join(each if isinstance(each, str) else json.dumps(each) for each in given)
    digests, last = [], b""
    for start in range(0, min(len(text), _BLOCK * _MOST_BLOCKS) - _BLOCK + 1, _BLOCK):
        block = text[start : start + _BLOCK].encode(errors="surrogatepass")
        last = blake2b(last + block, digest_size=16).digest()
        digests.append(last)
    return digests


class PrefixRoutes:
    """Remembers which prompts each replica was sent, and how many requests it has."""

    def __init__(self) -> None:
        self.loads: Counter[str] = Counter()
        """Requests that each replica is answering."""
        self._had: OrderedDict[bytes, set[str]] = OrderedDict()
        """Digest of a block -> the replicas that have had it, the latest last."""

    def choose(self, blocks: Sequence[bytes], live: Set[str]) -> str | None:
        """Return the replica for a prompt; None if there is none.

        Of those that have at most `_SLACK` requests more than the least busy one, it is the one
        that has had most of the prompt, then the least busy one.
        """
        if not live:
            return None
        least = min(self.loads[name] for name in live)
        free = [name for name in sorted(live) if self.loads[name] <= least + _SLACK]
        depths = self._depths(blocks)
        best = max((depths[name], -self.loads[name]) for name in free)
        return random.choice([name for name in free if (depths[name], -self.loads[name]) == best])

    def begun(self, name: str, blocks: Sequence[bytes]) -> None:
        """Record that a replica answers a request."""
        self.loads[name] += 1
        for digest in blocks:
            self._had.setdefault(digest, set()).add(name)
            self._had.move_to_end(digest)
        while len(self._had) > _MOST_KNOWN:
            self._had.popitem(last=False)

    def ended(self, name: str) -> None:
        """Record that a replica has one request less."""
        self.loads[name] -= 1
        if not self.loads[name]:
            del self.loads[name]

    def _depths(self, blocks: Sequence[bytes]) -> Counter[str]:
        """Return how many of the first blocks each replica has had."""
        depths: Counter[str] = Counter()
        for digest in blocks:
            names = self._had.get(digest)
            if not names:
                break
            depths.update(dict.fromkeys(names, 1))
        return depths
