"""The options of commands that name low-rank adapters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from onboard.errors import UsageError


def adapters_of(given: Sequence[str] | None) -> dict[str, str] | None:
    """Return the folder of each adapter by its name, None for none; raise `UsageError` for what is
    no NAME=FOLDER.
    """
    from onboard.config import ADAPTER_NAME

    found: dict[str, str] = {}
    for each in given or ():
        name, _, folder = each.partition("=")
        if not folder or not re.match(ADAPTER_NAME, name):
            raise UsageError(
                f"--lora {each!r:.200} names no adapter",
                hint="Write it as NAME=FOLDER; names have letters, digits and . _ / : @ -",
            )
        if name in found:
            raise UsageError(f"--lora names {name!r} twice")
        found[name] = folder
    return found or None


def one_adapter(given: Sequence[str] | None, requests: Path | None) -> str | None:
    """Return the adapter of all prompts, None for none; raise `UsageError` for several.

    Of a file of requests each names its own as its model.
    """
    names = list(adapters_of(given) or ())
    if requests is not None or not names:
        return None
    if len(names) > 1:
        raise UsageError(
            "prompts are answered with one adapter", hint="Requests of --input name theirs: model"
        )
    return names[0]


Lora = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        metavar="NAME=FOLDER",
        help="Low-rank adapter in PEFT's format, and its name in requests; repeatable.",
    ),
]
