"""The cache of what follows from a model's config and a configuration: found once, then read again.

The key has all that it depends on: the model's config, the run's settings, the model files, this
package's code, extensions and the libraries' versions; the device's memory is not part of it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from onboard.config import RuntimeConfig
from onboard.content import CONTENT_ROOT
from onboard.extensions import extensions_digest
from onboard.runtime.tested_file import TESTS, WORK_FOLDER
from onboard.user_cache import code_digest, environment, files_digest, user_cache

MOST_DOCUMENTS = 500
_NOT_IN_KEY = {"model", "revision"}
_CONFIGS = (
    *("config.json", "processor_config.json", "preprocessor_config.json", "tokenizer_config.json"),
    *("chat_template.jinja", "chat_template.json", "video_preprocessor_config.json"),
)
"""Files of a checkpoint that say what it is, and how large the images are that its towers read."""


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
            for old in _by_age(self._path.parent)[:-MOST_DOCUMENTS]:
                old.unlink(missing_ok=True)
        except OSError:
            return


def _by_age(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)


def _key(checkpoint: Path, runtime: RuntimeConfig, *, gpu: bool, root: Path) -> str:
    """Return everything that a plan and its facts depend on, as JSON."""
    files = {
        "config": [checkpoint / name for name in _CONFIGS],
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
