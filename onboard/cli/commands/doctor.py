"""`onboard doctor`: what this system has, and what is missing."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Annotated

import typer

from onboard.cli.options import AsJson
from onboard.cli.result import Result
from onboard.gpu import version

_PACKAGES = (
    "onboard",
    "torch",
    "transformers",
    "huggingface_hub",
    "safetensors",
    "tokenizers",
    "triton",
    "ruff",
)


def doctor(
    root: Annotated[
        Path,
        typer.Option(
            help="Root folder whose extensions are listed.", file_okay=False, show_default="here"
        ),
    ] = Path(),
    as_json: AsJson = False,
) -> Result | None:
    """Show versions, GPUs, caches, extensions and what is missing."""
    if as_json:
        return Result({"facts": dict(_facts()), "extensions": dict(_extensions(root))})
    for name, value in _facts():
        print(f"{name:<16} {value}")
    for source, value in _extensions(root):
        print(f"{'extension':<16} {source}: {value}")
    return None


def _extensions(root: Path) -> Iterator[tuple[str, str]]:
    from onboard.graph.assembly.outside import listing

    return listing(root)


def _facts() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for package in _PACKAGES:
        yield package, _version(package)
    yield (
        "git",
        shutil.which("git")
        or "missing: branches are not prepared, pull_request writes its text only",
    )
    yield from _hardware()
    yield from _transforms()
    yield from _hub()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return f"missing: pip install {package}"


def _hardware() -> Iterator[tuple[str, str]]:
    import torch

    from onboard.gpu import gigabytes, list_gpus, system_memory

    memory = system_memory()
    yield "memory", f"{gigabytes(memory.total)} GB, {gigabytes(memory.free)} GB free"
    gpus = list_gpus()
    for index, gpu in enumerate(gpus):
        yield (
            f"gpu {index}",
            f"{gpu.name}, {gigabytes(gpu.total)} GB, {gigabytes(gpu.free)} GB free",
        )
    if not gpus:
        yield "gpu", "none: models run on the CPU, with reference operators"
    elif not torch.cuda.is_available():
        yield "cuda", f"missing: this torch ({torch.__version__}) cannot use the GPUs"
    else:
        yield "cuda", str(torch.version.cuda)


def _transforms() -> Iterator[tuple[str, str]]:
    from onboard.graph.transform import transform_keys

    yield "transforms", f"{len(transform_keys())}, see transforms/default.yaml"


def _hub() -> Iterator[tuple[str, str]]:
    from huggingface_hub import constants, get_token

    yield "hub", constants.ENDPOINT
    yield "hub token", "set" if get_token() else "none: gated and private models are out of reach"
    yield "hub cache", constants.HF_HUB_CACHE
