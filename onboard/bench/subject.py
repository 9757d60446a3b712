"""Which model is measured: a folder with its files, and the configuration that it runs with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onboard.config import RuntimeConfig, with_settings
from onboard.content import content_path
from onboard.errors import UsageError
from onboard.graph.factory import read_config
from onboard.hf.architecture import decoder_config, text_config
from onboard.hub import as_folder, is_config_file
from onboard.runtime.limits import max_positions
from onboard.runtime.resolve import find_checkpoint, resolve_config


@dataclass(frozen=True)
class Subject:
    """A model to measure."""

    name: str
    """As the user gave it."""
    folder: Path
    """With config.json, and with weights unless they are random."""
    runtime: RuntimeConfig
    root: Path
    config: Any
    """The Hugging Face config of the text model."""
    facts: tuple[str, ...] = ()
    asks_for_ranks: bool = False
    """Whether its world size was said for this measurement, and has to be possible."""

    @property
    def random_weights(self) -> bool:
        """Whether weights are made up on the device."""
        return self.runtime.skip_loading_weights

    @property
    def positions(self) -> int | None:
        """The longest sequence that the model has; None: its config does not say."""
        return max_positions(self.config)


@contextmanager
def open_subject(
    model: str,
    root: Path,
    *,
    config: Path | None,
    overrides: Mapping[str, Any],
    random_weights: bool,
    settings: Mapping[str, Any] | None = None,
) -> Iterator[Subject]:
    """Open an id, a folder, a registered name, or a file such as config.json, which has no weights.

    `settings` replace single fields of its configuration.
    A model without a generated file is measured as transformers' own module, which is a fact.
    Raises `UsageError`.
    """
    if is_config_file(model) and not random_weights:
        raise UsageError(f"{model} is a config without weights", hint="Add --random-weights")
    with as_folder(model) as source:
        runtime = resolve_config(
            source, root, config, {**overrides, "skip_loading_weights": random_weights}
        )
        runtime = with_settings(runtime, settings)
        subject = _subject(model, find_checkpoint(runtime), runtime, root)
        yield replace(subject, asks_for_ranks="world_size" in (settings or {}))


def _subject(name: str, folder: Path, runtime: RuntimeConfig, root: Path) -> Subject:
    config = decoder_config(read_config(folder, root))
    facts: tuple[str, ...] = ()
    file = content_path("models", f"modeling_{config.model_type}.py", root=root)
    if runtime.mode == "graph" and not file.is_file():
        runtime = runtime.model_copy(update={"mode": "hf"})
        facts = ("the model was not onboarded: this is transformers' own, exported (--mode hf)",)
    return Subject(name, folder, runtime, root, text_config(config), facts)
