"""What the exports have in common: the package's files, its project file and what its README
tells.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onboard.codegen.format import format_python
from onboard.errors import UsageError
from onboard.render import render
from onboard.standalone import loader
from onboard.standalone.bundle import Bundle, foreign_packages
from onboard.standalone.proven_model import Subject

_NOT_DEPENDENCIES = {"vllm"}
"""What is there already, in one of many builds of other names."""


def package_name(subject: Subject, suffix: str = "") -> str:
    """Return the name of a subject's package."""
    return re.sub(r"\W", "_", f"onboarded_{subject.family}{suffix}".lower())


def bundled(model_text: str) -> Bundle:
    """Return the model file, the loader and what both need, to which more can be added."""
    bundle = Bundle()
    bundle.add("model.py", model_text)
    bundle.add("loader.py", Path(loader.__file__).read_text(encoding="utf-8"), name=loader.__name__)
    return bundle


def project(
    subject: Subject, kind: str, name: str, files: Mapping[str, str], **values: Any
) -> dict[str, str]:
    """Return all files of an export by path: `files` of the package, and those around it from the
    kind's templates.
    """
    packages = foreign_packages(
        {path: text for path, text in files.items() if path.endswith(".py")}
    )
    values |= {"package": name, "subject": subject, "provenance": subject.provenance()}
    values["dependencies"] = sorted(packages - sys.stdlib_module_names - _NOT_DEPENDENCIES)
    weights = json.dumps(subject.renamed_weights(), indent=1) + "\n"
    around = {
        "README.md": render(f"export/{kind}/README.md.j2", **values),
        "pyproject.toml": render("export/pyproject.toml.j2", **values),
        f"{name}/__init__.py": format_python(render(f"export/{kind}/init.py.j2", **values)),
        f"{name}/weights.json": weights,
    }
    return around | {f"{name}/{path}": text for path, text in files.items()}


def write(files: Mapping[str, str], folder: Path, *, force: bool) -> None:
    """Write an export; a folder that holds something is left alone unless `force`, which replaces
    equal names.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", hint="Choose another --out")
    if not force and folder.is_dir() and any(folder.iterdir()):
        raise UsageError(
            f"{folder} is there already",
            hint="Choose another --out, or replace its files with --force",
        )
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
