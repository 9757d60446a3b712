"""A model's name and configuration as a command gets them: what is wrong with them is found and
answered early.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onboard.errors import NoSuchModelError

if TYPE_CHECKING:
    from onboard.config import RuntimeConfig

_MOST = 8
"""Names that are listed when none is near."""


def check_config(
    model: str,
    root: Path,
    config: Path | None,
    overrides: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    *,
    may_be_file: bool = False,
) -> RuntimeConfig:
    """Return the configuration of a run; raise `OnboardError` for a folder or a configuration that
    is none, before torch is imported for nothing.

    `may_be_file`: the model may be a config.json.
    """
    from onboard.config import with_settings
    from onboard.hub import open_source
    from onboard.runtime.resolve import resolve_config

    runtime = with_settings(resolve_config(model, root.expanduser(), config, overrides), settings)
    if not (may_be_file and Path(model).expanduser().is_file()):
        open_source(runtime.model, revision=runtime.revision)
    return runtime


def say_division(runtime: RuntimeConfig, model: str, root: Path, told: Mapping[str, Any]) -> None:
    """Print what several ranks will divide, before anything is loaded; nothing for one rank.

    `told` are the settings of the command line. Raises `UsageError` where the ranks cannot divide
    the model.
    """
    if runtime.world_size == 1:
        return
    from onboard.hub import open_source
    from onboard.parallel.launched_ranks import launched_ranks
    from onboard.runtime.ranks.leading import division_for

    launched = launched_ranks()
    if launched is not None and launched.rank > 0:  # the first one says it
        return
    asked = told.get("world_size") is not None
    checkpoint = open_source(runtime.model, revision=runtime.revision).files()
    found = division_for(checkpoint, runtime, root=root.expanduser(), model=model, must=asked)
    if found is not None:
        print(found, *(f"note: {each}" for each in found.facts), sep="\n", file=sys.stderr)


@contextmanager
def registered_names(model: str, root: Path) -> Iterator[None]:
    """Name the root's registered models where `model` turns out to be none."""
    try:
        yield
    except NoSuchModelError as error:
        from onboard.registry import load_entries

        names = [entry.name for entry in load_entries(root.expanduser())]
        if not (listed := _listed(model, names)):
            raise
        raise NoSuchModelError(error.message, hint=f"{listed} {error.hint}".rstrip()) from error


def _listed(model: str, names: list[str]) -> str:
    if near := difflib.get_close_matches(model, names, n=3):
        return f"Did you mean {' or '.join(map(repr, near))} of the registry?"
    if "/" in model or not names:
        return ""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"Registered: {', '.join(names[:_MOST])}{more}."
