"""The model type of a config.json that names none: its own config class declares it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onboard.untrusted.bounds import CODE_BYTES, read_file


def with_declared_type(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a config.json without `model_type` with that of the class that its `auto_map` names as
    AutoConfig, in a file of the folder, as transformers takes it; else the config as it is.

    The file is parsed, not run.
    """
    classes = config.get("auto_map")
    named = classes.get("AutoConfig") if isinstance(classes, dict) else None
    if "model_type" in config or not isinstance(named, str):
        return dict(config)
    module, _, name = named.partition(".")
    file = folder / f"{module}.py" if module.isidentifier() else None
    declared = next(_declared(file, name), None) if file else None
    return dict(config) if declared is None else {**config, "model_type": declared}


def _declared(file: Path, name: str) -> Iterator[str]:
    """Yield the texts that a class, then its bases in the same file, give `model_type`."""
    try:
        body = ast.parse(read_file(file, CODE_BYTES)).body
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):  # not there, no Python
        return
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    while (found := classes.pop(name, None)) is not None:
        for statement in found.body:
            match statement:
                case (
                    ast.Assign(targets=[ast.Name("model_type")], value=ast.Constant(str(said)))
                    | ast.AnnAssign(target=ast.Name("model_type"), value=ast.Constant(str(said)))
                ):
                    yield said
        name = next((base.id for base in found.bases if isinstance(base, ast.Name)), "")
