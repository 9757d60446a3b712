"""Is a model file the one whose tests passed? What the test phase wrote of it is compared with the file as it is."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from onboard.content import CONTENT_ROOT

WORK_FOLDER = ".onboard"
TESTS = "tests.json"


def why_untested(model_file: Path, root: Path | None) -> str | None:
    """Return a sentence when a root's model file is not one whose tests passed; None for one that is.

    A file that came with this package was tested before it was released, unless the root's own tests know another one.
    """
    folder = (root or Path.cwd()).resolve()
    if not model_file.resolve().is_relative_to(folder):
        return None
    name = model_file.resolve().relative_to(folder).as_posix()
    tested = [record for record in _records(folder) if record["model_file"]["path"] == name and _passed(record)]
    if not tested:
        shipped = model_file.resolve().is_relative_to(CONTENT_ROOT / "models")
        return None if shipped else f"{name} has passed no tests here"
    digest = hashlib.sha256(model_file.read_bytes()).hexdigest()
    if any(record["model_file"]["sha256"] == digest for record in tested):
        return None
    return f"{name} is not the file whose tests passed: it was edited since"


def _records(root: Path) -> list[dict[str, Any]]:
    """Return what the test phases of all models wrote; earlier releases did not write which file it was."""
    texts = (path.read_text(encoding="utf-8") for path in sorted(root.glob(f"{WORK_FOLDER}/*/{TESTS}")))
    return [record for record in map(json.loads, texts) if "model_file" in record]


def _passed(record: dict[str, Any]) -> bool:
    statuses = [test["status"] for test in record["tests"]]
    return "failed" not in statuses and "passed" in statuses
