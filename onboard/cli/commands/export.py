"""`onboard export`: a proven model file as a package that is used without onboard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from onboard.cli import options
from onboard.cli.model_argument import check_config, registered_names
from onboard.cli.options import Device, DTypeName
from onboard.cli.result import Result
from onboard.errors import UsageError


class Target(StrEnum):
    """What the package is for."""

    PLAIN = "plain"
    VLLM_PLUGIN = "vllm-plugin"
    EXPORTED_PROGRAM = "exported-program"


class StaticForm(StrEnum):
    """How keys and values are inputs and outputs of a program."""

    STATIC_V1 = "static_v1"
    STATIC_V2 = "static_v2"


_Cache = Annotated[
    StaticForm | None,
    typer.Option(help="Of a program: how it takes its caches.", show_default="static_v2"),
]
_MaxSeqLen = Annotated[
    int | None,
    typer.Option(help="Of a program: places of its caches.", show_default="the model's, to 512"),
]
_Device = Annotated[
    Device | None, typer.Option(help="Of a program: its device.", show_default="cpu")
]
_DType = Annotated[
    DTypeName | None, typer.Option(help="Of a program: its dtype.", show_default="float32")
]


def export(
    model: options.Model,
    to: Annotated[
        Target,
        typer.Option(
            "--to",
            help="plain: PyTorch and safetensors; vllm-plugin: vLLM's registry, one device; "
            "exported-program: torch.export, with caches as inputs and outputs.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write to.", show_default="exported/<package> below the root"),
    ] = None,
    root: options.Root = Path(),
    revision: options.Revision = None,
    cache: _Cache = None,
    max_seq_len: _MaxSeqLen = None,
    device: _Device = None,
    dtype: _DType = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite files in an existing folder.")
    ] = False,
    offline: options.Offline = False,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> Result | None:
    """Write a proven model file as a package of its own.

    Only a file whose tests passed is exported; the package's README lists what was proven.
    """
    given = {"form": cache, "length": max_seq_len, "device": device, "dtype": dtype}
    program = _program_options(to, given)
    with registered_names(model, root):
        check_config(model, root, None, {"revision": revision})
        from onboard.standalone.export import export_model
        from onboard.standalone.exported_program import ProgramOptions

        where: dict[str, Any] = {
            "root": root.expanduser(),
            "out": out,
            "revision": revision,
            "force": force,
        }
        done = export_model(model, to.value, program=ProgramOptions(**program), **where)
    if as_json:
        return Result({"model": model, "to": to.value, **asdict(done), "folder": str(done.folder)})
    print(f"{done.folder}: package {done.package}, {len(done.files)} files")
    print(f"tests against transformers: {done.provenance['tests against transformers']}")
    return None


def _program_options(to: Target, given: Mapping[str, Any]) -> dict[str, Any]:
    said = {name: getattr(value, "value", value) for name, value in given.items() if value}
    if said and to is not Target.EXPORTED_PROGRAM:
        raise UsageError(
            f"--to {to.value} takes no cache, length, device or dtype",
            hint="They are for --to exported-program",
        )
    return said
