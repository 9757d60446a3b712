"""Checks whether a model file is the one that passed its tests and its run, by digests that these
have written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from onboard.content import CONTENT_ROOT
from onboard.registry import RegistryEntry

WORK_FOLDER = ".onboard"
TESTS = "tests.json"
_PREFIX = "sha256:"


def why_untested(model_file: Path, root: Path | None) -> str | None:
    """Return a sentence if a root's model file is not the one whose tests passed, else None.

    A file that came with this package was tested before it was released, unless the root's own
    tests know another one.
    """
    folder = (root or Path.cwd()).resolve()
    if not model_file.resolve().is_relative_to(folder):
        return None
    name = model_file.resolve().relative_to(folder).as_posix()
    tested = [
        record
        for record in _records(folder)
        if record["model_file"]["path"] == name and _passed(record)
    ]
    if not tested:
        shipped = model_file.resolve().is_relative_to(CONTENT_ROOT / "models")
        return None if shipped else f"{name} has passed no tests here"
    if _is_one_of(model_file, (record["model_file"]["sha256"] for record in tested)):
        return None
    return f"{name} is not the file whose tests passed: it was edited since"


def passed_tests(model_file: Path, root: Path) -> set[str]:
    """Return the names, without parameters, of the tests that the current file has passed under
    `root`.
    """
    return {test["name"].partition("[")[0] for test in passed_rows(model_file, root)}


def passed_rows(model_file: Path, root: Path) -> list[dict[str, Any]]:
    """Return the records of the tests that the current file has passed under `root`."""
    if not model_file.is_file():
        return []
    found = [
        record
        for record in _records(root)
        if _is_one_of(model_file, [record["model_file"]["sha256"]])
    ]
    return [test for record in found for test in record["tests"] if test["status"] == "passed"]


def why_not_run(entry: RegistryEntry, model_file: Path) -> str | None:
    """Return why a registry entry does not vouch for `model_file`: its run did not pass, or passed
    with another file; None if it does.
    """
    if entry.status == "failed":
        return f"the run of {entry.name} failed on {entry.tested}"
    if entry.status != "passed":
        return f"no run of {entry.name} has passed (its registry entry is {entry.status})"
    if (
        entry.model_file is None
        or not model_file.is_file()
        or _is_one_of(model_file, [entry.model_file])
    ):
        return None
    return f"{model_file.name} is not the file that the run of {entry.name} passed with on {entry.tested}"


def _is_one_of(model_file: Path, digests: Iterable[str]) -> bool:
    """Whether the file has one of these sha256, each whole or its start
    (`onboard.registry.digest`).
    """
    found = hashlib.sha256(model_file.read_bytes()).hexdigest()
    return any(digest and found.startswith(digest.removeprefix(_PREFIX)) for digest in digests)


def _records(root: Path) -> list[dict[str, Any]]:
    """Return what the test phases of all models wrote; earlier releases did not write which file it
    was.
    """
    texts = (
        path.read_text(encoding="utf-8") for path in sorted(root.glob(f"{WORK_FOLDER}/*/{TESTS}"))
    )
    return [record for record in map(json.loads, texts) if "model_file" in record]


def _passed(record: dict[str, Any]) -> bool:
    statuses = [test["status"] for test in record["tests"]]
    return "failed" not in statuses and "passed" in statuses
