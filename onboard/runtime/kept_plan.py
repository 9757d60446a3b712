"""Plans of memory that were made before, kept under all that they depend on: shown again without
torch.

A plan is a function of the model's config, the run's settings, the model files, this package's
code, extensions and the libraries' versions; the memory of the device is not in it.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from onboard.cache.budget import CachePlan, Limits, MemoryPlan
from onboard.cache.resources import CacheResource, KVPagedResource, StateResource
from onboard.config import RuntimeConfig
from onboard.content import CONTENT_ROOT
from onboard.extensions import extensions_digest
from onboard.runtime.tested_file import TESTS, WORK_FOLDER
from onboard.user_cache import code_digest, environment, files_digest, user_cache

MOST_PLANS = 500
_FORMS: dict[str, type[KVPagedResource] | type[StateResource]] = {
    "pages": KVPagedResource,
    "states": StateResource,
}
_NOT_IN_KEY = {"model", "revision"}


@dataclass(frozen=True)
class DType:
    """What is known of a torch.dtype without torch."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


class KeptPlan:
    """The place of one plan in the user's cache."""

    def __init__(self, checkpoint: Path, runtime: RuntimeConfig, *, gpu: bool, root: Path) -> None:
        self._key = _key(checkpoint, runtime, gpu=gpu, root=root)
        folder = user_cache("plans")
        self._path = folder and folder / f"{hashlib.sha256(self._key.encode()).hexdigest()}.json"

    def find(self) -> tuple[MemoryPlan, list[str]] | None:
        """Return the plan and its facts; None when it was not made, or is damaged."""
        if self._path is None or not self._path.is_file():
            return None
        try:
            document = json.loads(self._path.read_text("utf-8"))
            found = _read(document["plan"]), list(map(str, document["facts"]))
            if document["key"] != self._key:
                return None
            os.utime(self._path)
        except (OSError, ValueError, KeyError, TypeError):  # it can be made again
            return None
        return found

    def keep(self, plan: MemoryPlan, facts: list[str]) -> None:
        """Write a plan and its facts; where that cannot be, it is made again next time."""
        if self._path is None:
            return
        document = json.dumps({"key": self._key, "plan": _written(plan), "facts": facts})
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


def counted_or_kept(
    checkpoint: Path, runtime: RuntimeConfig, *, gpu: bool, root: Path, model: str
) -> tuple[MemoryPlan, list[str]]:
    """Return the plan for any memory, and facts; one that was made before for the same settings is
    found again.
    """
    kept = KeptPlan(checkpoint, runtime, gpu=gpu, root=root)
    if (found := kept.find()) is not None:
        return found
    with _uncollected():
        from onboard.runtime.plan import count_memory

        made, facts = count_memory(checkpoint, runtime, gpu=gpu, root=root, model=model)
    kept.keep(made, facts)
    return made, list(facts)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Look for no garbage meanwhile: imports and traces leave little, and going through what they
    made takes long.
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


def _written(plan: MemoryPlan) -> dict[str, Any]:
    """Return a plan as JSON; resources one after another that are alike are written once."""
    sizes = {
        field.name: getattr(plan, field.name) for field in fields(plan) if field.name != "cache"
    }
    groups = [(resource, len(list(same))) for resource, same in groupby(plan.cache.resources)]
    return {
        "sizes": sizes,
        "limits": asdict(plan.cache.limits),
        "resources": [[*_form(r), n] for r, n in groups],
    }


def _form(resource: CacheResource) -> tuple[str, dict[str, Any]]:
    name = next(name for name, form in _FORMS.items() if type(resource) is form)
    values = {field.name: getattr(resource, field.name) for field in fields(resource)}
    return name, values | {"dtype": [str(resource.dtype), resource.dtype.itemsize]}


def _read(document: dict[str, Any]) -> MemoryPlan:
    """Return the plan that was written; raises `KeyError`, `TypeError` or `ValueError` where it was
    not one.
    """
    cache = CachePlan(Limits(**document["limits"]), tuple(_resources(document["resources"])))
    sizes = document["sizes"]
    return MemoryPlan(cache=cache, **sizes | {"chosen": tuple(sizes["chosen"])})


def _resources(groups: list[Any]) -> Iterator[CacheResource]:
    for name, values, count in groups:
        own: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        own["dtype"] = DType(*values["dtype"])
        yield from [_FORMS[name](**own)] * count
