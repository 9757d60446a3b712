"""`onboard export --to exported-program`: the model with its weights as a program of torch.export,
its caches inputs and outputs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from onboard.codegen.format import format_python
from onboard.config import RuntimeConfig
from onboard.errors import UsageError
from onboard.graph.cache_init.static_cache import cache_shapes
from onboard.graph.export.static_program import SHORTEST, to_program
from onboard.graph.fx import placeholders
from onboard.render import render
from onboard.runtime.build import eos_token_ids
from onboard.runtime.limits import PROOF
from onboard.runtime.static.static_graph import static_graph
from onboard.standalone.package import package_name
from onboard.standalone.proven_model import Subject


@dataclass(frozen=True)
class ProgramOptions:
    """What a program is made for; each is fixed in it."""

    form: str = "static_v2"
    length: int | None = None
    """Places of the caches; None: as many as the model reads, at most 512."""
    device: str = "cpu"
    dtype: str = "float32"


@dataclass(frozen=True)
class ProgramExport:
    """The files of a package, and the program that lies beside them."""

    package: str
    files: dict[str, str]
    program: ExportedProgram

    def save(self, folder: Path) -> str:
        """Write the program; return its path in the folder."""
        path = f"{self.package}/model.pt2"
        torch.export.save(self.program, folder / path)
        return path


def program_export(subject: Subject, options: ProgramOptions) -> ProgramExport:
    """Return the package of a model's program.

    Raises:
        OnboardError: tokens of the model meet by more than causal attention, or torch.export cannot
            trace it.
    """
    checkpoint = subject.factory.checkpoint
    runtime = RuntimeConfig.model_validate(
        {
            "model": str(checkpoint),
            "device": options.device,
            "dtype": options.dtype,
            "max_seq_len": options.length,
        }
    )
    gm, context = static_graph(checkpoint, runtime, options.form, root=subject.root, defaults=PROOF)
    length = context.runtime.max_seq_len
    if length < SHORTEST:
        raise UsageError(
            f"caches of {length} places are too short to be traced", hint=f"Give {SHORTEST} or more"
        )
    program = to_program(gm, length, context.device)
    ends = sorted(eos_token_ids(checkpoint, context.factory.text_config))
    description = {
        "model": subject.name,
        "form": options.form,
        "inputs": [str(node.target) for node in placeholders(gm)],
        "caches": [
            {"kv_heads": heads, "head_dim": size, "dtype": _name(dtype)}
            for heads, size, dtype in cache_shapes(gm)
        ],
        "cache_length": length,
        "device": str(context.device),
        "first_position": context.first_position,
        "eos_token_ids": ends,
    }
    name = package_name(subject, "_program")
    values = {"length": length, "dtype": _name(context.dtype), "device": context.device}
    return ProgramExport(name, _files(subject, name, description, **values), program)


def _files(
    subject: Subject, name: str, description: dict[str, Any], **values: Any
) -> dict[str, str]:
    values |= {"package": name, "subject": subject, "provenance": subject.provenance()}
    values |= {"form": description["form"], "dependencies": ["torch"]}
    values["package_data"] = ["program.json", "model.pt2"]
    kind = "export/exported-program"
    return {
        "README.md": render(f"{kind}/README.md.j2", **values),
        "pyproject.toml": render("export/pyproject.toml.j2", **values),
        f"{name}/__init__.py": format_python(render(f"{kind}/init.py.j2", **values)),
        f"{name}/program.json": json.dumps(description, indent=1) + "\n",
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
