"""Results that are kept: a target that ended under the same code, versions and limits is not run
again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from onboard.content import CONTENT_ROOT
from onboard.workflow.files import write_atomically
from onboard.workflow.lock import WORK
from onboard.workflow.run_state import current_versions, hash_inputs
from onboard.workflow.sweep.job import Job
from onboard.workflow.sweep.target_record import TargetRecord

_PACKAGE = Path(__file__).resolve().parents[2]
_CONTENT = ("transforms", "templates/model", "templates/tests")
KEY, RECORD = "key", "record.json"


def sweep_folder(root: Path) -> Path:
    """Return where a root keeps what sweeps leave, a folder for each target."""
    return root / WORK / "sweep"


def source_hash() -> str:
    """Return the sha256 of all code and templates that a target's result depends on."""
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _sources() -> Iterator[Path]:
    for folder in (_PACKAGE, *(CONTENT_ROOT / name for name in _CONTENT)):
        paths = (path for pattern in ("*.py", "*.j2", "*.yaml") for path in folder.rglob(pattern))
        yield from sorted(path for path in paths if _PACKAGE / "content" not in path.parents)


def job_key(job: Job, source: str) -> str:
    """Return the digest of everything that a job's result depends on; `source` is the
    `source_hash`.
    """
    inputs = job.model_dump(mode="json", exclude={"folder"}) | {"source": source}
    return hash_inputs(inputs, current_versions())


def load_record(job: Job, key: str) -> TargetRecord | None:
    """Return what a target left the last time; None when that was under another key, or nothing."""
    try:
        if (job.folder / KEY).read_text(encoding="utf-8") != key:
            return None
        return TargetRecord.model_validate_json((job.folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # never ended, or by another version of this program
        return None


def save_record(job: Job, key: str, record: TargetRecord) -> None:
    """Keep a record; its key is written last, so that half a record is none."""
    write_atomically(job.folder / RECORD, record.model_dump_json(indent=2) + "\n")
    write_atomically(job.folder / KEY, key)
