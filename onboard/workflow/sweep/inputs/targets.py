"""What a sweep goes over: model types of the installed transformers, and configs of checkpoints,
each made tiny.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from onboard.config import StrictModel, suggest
from onboard.errors import UsageError
from onboard.hub import open_source
from onboard.registry import find_entry

Variant = Literal["default", "varied"]
VARIANTS: tuple[Variant, ...] = ("default", "varied")


class Target(StrictModel):
    """One tiny model to onboard."""

    name: str
    """A model type, or the id or folder that the config is from."""
    variant: Variant = "default"
    """varied: other sizes, other orders of layers, and what the defaults leave off is on."""
    config: dict[str, Any] | None = None
    """A parsed config.json; None: the defaults of the model type `name`."""

    @property
    def folder(self) -> str:
        """The name of this target's own folder."""
        safe = re.sub(r"[^A-Za-z0-9._-]+", "-", self.label).strip("-.")
        return (
            safe if safe == self.name else f"{safe}-{sha256(self.label.encode()).hexdigest()[:8]}"
        )

    @property
    def label(self) -> str:
        """What the target is called in tables."""
        return label(self.name, self.variant)


_TYPES = "docs/coverage.md"
"""Where the model types are listed."""


def label(name: str, variant: Variant) -> str:
    """Return a name, with its variant unless that is the usual one."""
    return name if variant == "default" else f"{name} ({variant})"


def causal_types() -> list[str]:
    """Return the model types that the installed transformers has a causal language model for,
    sorted.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def resolve(words: Sequence[str], root: Path) -> list[Target]:
    """Return a target for each word, each one once.

    A word is a model type, the name of a registry entry, the id or folder of a checkpoint, or a
    text file with one of these on each line.
    """
    types = causal_types()
    names = dict.fromkeys(name for word in words for name in _expand(word))
    return [_target(name, types, root) for name in names]


def check_types(names: Sequence[str]) -> list[str]:
    """Return `names`, sorted; raise `UsageError` for one that is no causal model type."""
    types = causal_types()
    for name in names:
        if name not in types:
            raise UsageError(
                f"transformers has no causal model type {name!r}", hint=suggest(name, types, _TYPES)
            )
    return sorted(set(names))


def _expand(word: str) -> Iterator[str]:
    path = Path(word).expanduser()
    if not path.is_file():
        yield word
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        if name := line.partition("#")[0].strip():
            yield name


def _target(name: str, types: Sequence[str], root: Path) -> Target:
    from onboard.hf.architecture import language_model_types

    types = [*types, *language_model_types()]
    if name in types:
        return Target(name=name)
    if not Path(name).is_dir() and "/" not in name and find_entry(name, root) is None:
        raise UsageError(
            f"{name!r} is neither a model type nor a model", hint=suggest(name, types, _TYPES)
        )
    return Target(name=name, config=open_source(name).config())
