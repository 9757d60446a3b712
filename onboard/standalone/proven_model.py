"""What is exported: a model whose file passed its tests, where its weights are, and what was proven
of it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from onboard import __version__
from onboard.codegen.hints.unhinted_text import without_hints
from onboard.errors import OnboardError, UsageError
from onboard.gpu import version
from onboard.graph.factory import ModelFactory
from onboard.graph.weight_load.converted_weights import Source
from onboard.graph.weight_load.parameters import tied_names
from onboard.graph.weight_load.quantised_folder import open_checkpoint
from onboard.graph.weight_load.safetensors_folder import Checkpoint
from onboard.graph.weight_load.weight_sources import check_ties, find_sources
from onboard.hf.architecture import find_language_model
from onboard.hub import open_source
from onboard.modeling import registered_config
from onboard.registry import RegistryEntry, digest, find_entry
from onboard.runtime.resolve import find_checkpoint, resolve_config
from onboard.runtime.tested_file import passed_rows, why_not_run, why_untested
from onboard.sources.gguf_source import is_local


@dataclass(frozen=True)
class Subject:
    """A model to be exported."""

    name: str
    """Its id; of a folder its own name, without the way there."""
    revision: str | None
    is_on_hub: bool
    factory: ModelFactory
    root: Path
    entry: RegistryEntry | None

    @property
    def family(self) -> str:
        """The name that model files of its kind have, as a part of a Python name."""
        return self.factory.model_file().stem.removeprefix("modeling_")

    @cached_property
    def text(self) -> str:
        """The model file, without hints for several ranks: what is exported runs on one device."""
        return without_hints(self.factory.model_file().read_text(encoding="utf-8"))

    @property
    def counterpart(self) -> str | None:
        """The class of transformers that the model file was proven equal to; None for one of the
        model's repository.
        """
        config = self.factory.config
        found = (
            find_language_model(config) if registered_config(config.model_type) is None else None
        )
        return None if found is None else str(found.__name__)

    def renamed_weights(self) -> dict[str, Any]:
        """Return, of the parameters and saved buffers that are no tensor of their own name, what
        makes them.

        Raises `OnboardError` where tensors that stand for one weight differ.
        """
        model = self.factory.build_model()
        wanted = {names[0]: names for names in tied_names(model)}
        saved = model.state_dict().keys()
        buffers = [name for name, _ in model.named_buffers() if name in saved]
        checkpoint = Checkpoint(self.factory.checkpoint)
        check_ties([*wanted.values()], checkpoint, self.factory)
        found, _ = find_sources(wanted, buffers, (), checkpoint, self.factory)
        return {
            name: asdict(source)
            for name, source in sorted(found.items())
            if source != Source((name,))
        }

    def provenance(self) -> dict[str, str]:
        """Return what the model is, and what was proven of it when, in the words of a table."""
        file = self.factory.model_file()
        return {
            "model": self.name,
            "revision": self.revision or ("a local folder" if not self.is_on_hub else "unknown"),
            "model file": f"{file.name}, {digest(file)}",
            "tests against transformers": _proof(passed_rows(file, self.root)),
            "whole run beside transformers": _verdict(self.entry),
            "exported": f"{datetime.now(UTC).date().isoformat()} by onboard {__version__}",
            "versions": ", ".join(
                f"{name} {version(name)}" for name in ("torch", "transformers", "safetensors")
            ),
        }


def open_subject(model: str, root: Path, revision: str | None = None) -> Subject:
    """Return a registered model's, an id's or a folder's export subject.

    Raises:
        OnboardError: the model was not onboarded, its file is not one whose tests passed, or it
            cannot stand alone.
    """
    runtime = resolve_config(model, root, None, {"revision": revision})
    if runtime.mode != "graph":
        raise UsageError(
            f"{model} runs in mode {runtime.mode}, which has no model file",
            hint="Onboard it for graph",
        )
    source = open_source(runtime.model, revision=runtime.revision)
    factory = ModelFactory(
        find_checkpoint(runtime), root=root, dtype=torch.float32, model_kwargs={}
    )
    entry = find_entry(model, root)
    _refuse_unproven(factory, entry, root, model)
    if factory.codebooks.count > 1:
        raise OnboardError(
            f"a position of {model} has codes of {factory.codebooks.count} codebooks, which an export does not pack",
            hint="Use it through LLM",
        )
    if type(open_checkpoint(factory.checkpoint)) is not Checkpoint:
        raise OnboardError(
            f"{model} is quantised or a GGUF file, and an export reads safetensors as they are",
            hint="Export the unquantised model",
        )
    folder = Path(runtime.model).expanduser()
    is_on_hub = not is_local(runtime.model)
    name = runtime.model if is_on_hub else folder.resolve().name
    return Subject(name, source.revision, is_on_hub, factory, root, entry)


def _refuse_unproven(
    factory: ModelFactory, entry: RegistryEntry | None, root: Path, model: str
) -> None:
    reason = why_untested(factory.model_file(), root)
    if reason is None and entry is not None and entry.status == "failed":
        reason = why_not_run(entry, factory.model_file())
    if reason is not None:
        raise OnboardError(
            f"{reason}: only a proven file is exported", hint=f"Run: onboard {model} --root {root}"
        )


def _proof(rows: list[dict[str, Any]]) -> str:
    """Return how many tests passed, and with which error at most."""
    if not rows:
        return f"passed before onboard {__version__}, which the file came with, was released"
    errors = [row for row in rows if row["error"] is not None]
    worst = max(errors, key=lambda row: float(row["error"]), default=None)
    if worst is None:
        return f"{len(rows)} passed"
    found = f"{worst['error']:.1e} in {worst['name']} ({worst['tolerance']:.0e} allowed)"
    return f"{len(rows)} passed; the largest error, rmse / rmse, is {found}"


def _verdict(entry: RegistryEntry | None) -> str:
    if entry is None:
        return "none is registered"
    return f"{entry.status} on {entry.tested}" if entry.tested else entry.status
