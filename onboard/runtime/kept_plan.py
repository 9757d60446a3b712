"""The cache of memory plans: a plan made before is shown again without torch.

The key has all that a plan depends on: the model's config, the run's settings, the model files,
this package's code, extensions and the libraries' versions; the device's memory is not part of it.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from onboard.cache.budget import MemoryPlan
from onboard.config import RuntimeConfig
from onboard.content import CONTENT_ROOT, content_path
from onboard.extensions import extensions_digest
from onboard.runtime.sketch.ask import sketched
from onboard.runtime.tested_file import TESTS, WORK_FOLDER, why_untested
from onboard.runtime.written_plan import read_plan, written_plan
from onboard.untrusted.bounds import read_json
from onboard.user_cache import code_digest, environment, files_digest, user_cache

MOST_PLANS = 500
_NOT_IN_KEY = {"model", "revision"}


class KeptDocument:
    """The file, in the user's cache, of what follows from a model's config and a configuration."""

    def __init__(
        self,
        checkpoint: Path,
        runtime: RuntimeConfig,
        *,
        gpu: bool,
        root: Path,
        folder: str = "plans",
    ) -> None:
        self._key = _key(checkpoint, runtime, gpu=gpu, root=root)
        kept = user_cache(folder)
        self._path = kept and kept / f"{hashlib.sha256(self._key.encode()).hexdigest()}.json"

    def read(self) -> dict[str, Any] | None:
        """Return the document; None when it was not made, or is damaged."""
        if self._path is None or not self._path.is_file():
            return None
        try:
            document: dict[str, Any] = json.loads(self._path.read_text("utf-8"))
            if document["key"] != self._key:
                return None
            os.utime(self._path)
        except (OSError, ValueError, KeyError, TypeError):  # it can be made again
            return None
        return document

    def write(self, values: Mapping[str, Any]) -> None:
        """Write a document; where that cannot be, it is made again next time."""
        if self._path is None:
            return
        document = json.dumps({**values, "key": self._key})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(
                "w", dir=self._path.parent, delete=False, encoding="utf-8"
            ) as file:
                file.write(document)
            os.replace(file.name, self._path)
            for old in _by_age(self._path.parent)[:-MOST_PLANS]:
                old.unlink(missing_ok=True)
        except OSError:
            return


class KeptPlan(KeptDocument):
    """The file of one memory plan."""

    def find(self) -> tuple[MemoryPlan, list[str]] | None:
        """Return the plan and its facts; None when it was not made, or is damaged."""
        if (document := self.read()) is None:
            return None
        try:
            return read_plan(document["plan"]), list(map(str, document["facts"]))
        except (ValueError, KeyError, TypeError):  # it can be made again
            return None

    def keep(self, plan: MemoryPlan, facts: list[str]) -> None:
        """Write a plan and its facts."""
        self.write({"plan": written_plan(plan), "facts": facts})


BOUNDED = (
    "activations and CUDA graphs are upper bounds, by the model file's code;"
    " with --exact the run's own graph is made and tells them"
)


def counted_or_kept(
    checkpoint: Path,
    runtime: RuntimeConfig,
    *,
    gpu: bool,
    root: Path,
    model: str,
    decides: Callable[[MemoryPlan], bool] | None = None,
) -> tuple[MemoryPlan, list[str]]:
    """Return the plan for any memory, and its facts, from the cache if it was made before.

    If there is none, a sketch is made first: it has upper bounds of what only a graph can tell. If
    `decides` says that the bounds do not answer the question, the plan is made from the graph.
    """
    kept = KeptPlan(checkpoint, runtime, gpu=gpu, root=root)
    if (found := kept.find()) is not None:
        return found
    why = []
    if decides is not None:
        drawn = sketched(checkpoint, runtime, gpu=gpu, root=root)
        if isinstance(drawn, MemoryPlan) and decides(drawn):
            return drawn, [*_untested(checkpoint, root), BOUNDED]
        reason = drawn if isinstance(drawn, str) else "bounds leave open whether it fits"
        why = [f"the run's own graph was made for this: {reason}"]
    with _uncollected():
        from onboard.runtime.plan import count_memory

        made, facts = count_memory(checkpoint, runtime, gpu=gpu, root=root, model=model)
    kept.keep(made, facts)
    return made, [*facts, *why]


def _untested(checkpoint: Path, root: Path) -> list[str]:
    """Return the facts about a model file whose tests did not pass."""
    model_type = read_json(checkpoint / "config.json")["model_type"]
    fact = why_untested(content_path("models", f"modeling_{model_type}.py", root=root), root)
    return [] if fact is None else [fact]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Switch garbage collection off meanwhile: imports and traces leave little garbage, and each
    collection takes long.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _by_age(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)


def _key(checkpoint: Path, runtime: RuntimeConfig, *, gpu: bool, root: Path) -> str:
    """Return everything that a plan and its facts depend on, as JSON."""
    files = {
        "config": [checkpoint / "config.json"],
        "models": [*_models(CONTENT_ROOT), *_models(root)],
        "tests": sorted(root.glob(f"{WORK_FOLDER}/*/{TESTS}")),
    }
    parts = {
        "code": code_digest(),
        "extensions": extensions_digest(root),
        "files": {
            name: files_digest(file for file in each if file.is_file())
            for name, each in files.items()
        },
        "root": str(root.resolve()),
        "runtime": runtime.model_dump(mode="json", exclude=_NOT_IN_KEY),
        "said": sorted(runtime.model_fields_set - _NOT_IN_KEY),
        "gpu": gpu,
        **environment(),
    }
    return json.dumps(parts, sort_keys=True, default=str)


def _models(root: Path) -> list[Path]:
    return sorted((root / "models").glob("modeling_*.py"))
