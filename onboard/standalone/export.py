"""`onboard export`: a proven model file as a package of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from onboard.standalone.exported_program import ProgramOptions, program_export
from onboard.standalone.package import write
from onboard.standalone.plain import plain_export
from onboard.standalone.proven_model import Subject, open_subject
from onboard.standalone.vllm_plugin import vllm_export

_PROGRAM = "exported-program"
_KINDS: dict[str, Callable[[Subject], dict[str, str]]] = {
    "plain": plain_export,
    "vllm-plugin": vllm_export,
}


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: Path
    package: str
    """The name that it is imported by."""
    files: list[str]
    """Paths in the folder, sorted."""
    provenance: dict[str, str]


def export_model(
    model: str,
    to: str,
    *,
    root: Path,
    out: Path | None = None,
    revision: str | None = None,
    force: bool = False,
    program: ProgramOptions | None = None,
) -> Exported:
    """Write a model's package of kind `to` ("plain", "vllm-plugin" or "exported-program") to `out`,
    else `exported/<package>` of the root. `program` is for the last of them.

    Raises:
        OnboardError: the model's file is not one whose tests passed, or has something that this
            kind cannot hold.
        UsageError: the folder is there and not empty, unless `force`.
    """
    subject = open_subject(model, root, revision)
    made = program_export(subject, program or ProgramOptions()) if to == _PROGRAM else None
    files = _KINDS[to](subject) if made is None else made.files
    package = next(path for path in sorted(files) if path.endswith("/__init__.py")).partition("/")[
        0
    ]
    folder = (out or root / "exported" / package).expanduser().resolve()
    write(files, folder, force=force)
    paths = [*files, *([] if made is None else [made.save(folder)])]
    return Exported(folder, package, sorted(paths), subject.provenance())
