"""The tokens that both sides read: a text in windows, each read by itself from its beginning."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from onboard.errors import UsageError
from onboard.hf.text_tokens import text_tokens
from onboard.runtime.tokenizer import Tokenizer
from onboard.verify.held_out import HELD_OUT_FILE, stories
from onboard.verify.seeds import fresh_seed


@dataclass(frozen=True)
class Window:
    """Tokens that are read together, and what follows the last `len(targets)` of them."""

    ids: list[int]
    targets: list[int]


@dataclass(frozen=True)
class Source:
    """A text as tokens."""

    what: str
    tokens: list[int]
    prefix: tuple[int, ...] = ()
    """What the tokenizer puts before a text: each window begins with it."""
    seed: int | None = None
    """Of random tokens."""


def windows(source: Source, positions: int, size: int) -> list[Window]:
    """Return at most `positions` positions of a text, in windows of at most `size`.

    Each token is predicted once; without a prefix the first one is not, and the last position of a
    window predicts the first token of the next.
    """
    return list(_cut(source.prefix, source.tokens, positions, size))


def _cut(
    prefix: Sequence[int], tokens: Sequence[int], positions: int, size: int
) -> Iterator[Window]:
    before = list(prefix) or list(tokens[:1])
    predicted = tokens[0 if prefix else 1 :][:positions]
    for start in range(0, len(predicted), size):
        targets = list(predicted[start : start + size])
        yield Window([*before, *targets[:-1]], targets)
        before = list(prefix) or targets[-1:]


def text_source(checkpoint: Path, text: Path | None) -> Source | None:
    """Return a text in the tokens of a checkpoint: that of a file, else its own held-out text, else
    the demo checkpoint's stories; None where there is neither a text nor a tokenizer.

    Raises `UsageError` for a file that is no text, or that there is no tokenizer for.
    """
    tokenizer = Tokenizer.load(checkpoint)
    if tokenizer is None:
        if text is not None:
            raise UsageError(
                "the checkpoint of A has no tokenizer for the text",
                hint="Leave --text out: tokens are random then",
            )
        return None
    what, content = _read(text) if text is not None else _shipped(checkpoint)
    prefix, tokens = _tokens(tokenizer, content)
    return Source(what, tokens, prefix)


def random_source(config: Any, positions: int, seed: int | None) -> Source:
    """Return random tokens of a text model's config, with the seed, which is random where it is
    None.
    """
    seed = fresh_seed() if seed is None else seed
    drawn = random.Random(seed).choices(text_tokens(config), k=positions + 1)
    return Source("random tokens", drawn, seed=seed)


def _read(path: Path) -> tuple[str, str]:
    try:
        content = path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8", hint="Save the text as UTF-8") from error
    if not content.strip():
        raise UsageError(f"{path} has no text")
    return str(path), content


def _shipped(checkpoint: Path) -> tuple[str, str]:
    own = (checkpoint / HELD_OUT_FILE).is_file()
    with resources.as_file(resources.files("onboard") / "assets" / "demo") as demo:
        content = "\n\n".join(stories(checkpoint if own else demo))
    return f"{HELD_OUT_FILE} of {'the checkpoint' if own else 'the demo checkpoint'}", content


def _tokens(tokenizer: Tokenizer, text: str) -> tuple[tuple[int, ...], list[int]]:
    """Return what the tokenizer puts before a text, and the text's own tokens."""
    whole = tokenizer.encode(text)
    plain: list[int] = tokenizer.hf(text, add_special_tokens=False)["input_ids"]
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[:start]), plain
    return (), whole
