"""`onboard export`: a proven model file as a package that is used without onboard."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from onboard.cli import options
from onboard.cli.model_argument import check_config, registered_names
from onboard.cli.result import Result
from onboard.sources.hub_errors import go_offline


class Target(StrEnum):
    """What the package is for."""

    PLAIN = "plain"
    VLLM_PLUGIN = "vllm-plugin"


def export(
    model: options.Model,
    to: Annotated[
        Target,
        typer.Option(
            "--to", help="plain: PyTorch and safetensors; vllm-plugin: vLLM's registry, one device."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write to.", show_default="exported/<package> below the root"),
    ] = None,
    root: options.Root = Path(),
    revision: options.Revision = None,
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
    if offline:
        go_offline()
    with registered_names(model, root):
        check_config(model, root, None, {"revision": revision})
        from onboard.standalone.export import export_model

        done = export_model(
            model, to.value, root=root.expanduser(), out=out, revision=revision, force=force
        )
    if as_json:
        return Result({"model": model, "to": to.value, **asdict(done), "folder": str(done.folder)})
    print(f"{done.folder}: package {done.package}, {len(done.files)} files")
    print(f"tests against transformers: {done.provenance['tests against transformers']}")
    return None
