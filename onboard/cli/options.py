"""Arguments and options that several commands have."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Device(StrEnum):
    """Where the model runs."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class DTypeName(StrEnum):
    """What the model computes in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class ModeName(StrEnum):
    """Which road the model takes."""

    GRAPH = "graph"
    HF = "hf"
    TRANSFORMERS = "transformers"


class CacheDTypeName(StrEnum):
    """What keys and values are kept in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8 = "float8_e4m3fn"


class AttnBackendName(StrEnum):
    """Whose attention kernels run."""

    AUTO = "auto"
    TORCH = "torch"
    TRITON = "triton"


class CompileBackendName(StrEnum):
    """What compiles the graph."""

    AUTO = "auto"
    SIMPLE = "torch-simple"
    COMPILE = "torch-compile"
    CUDAGRAPH = "torch-cudagraph"
    OPT = "torch-opt"


Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder, an id, or a name in the registry.")
]
Root = Annotated[
    Path, typer.Option(help="Folder that the model was onboarded under.", show_default="here")
]
Config = Annotated[
    Path | None, typer.Option(help="Configuration to use instead of the registered one.")
]
OnDevice = Annotated[Device, typer.Option(help="Where the model runs.")]
InDType = Annotated[DTypeName, typer.Option(help="What the model computes in.")]
Mode = Annotated[
    ModeName,
    typer.Option(help="graph: the onboarded model; hf, transformers: transformers' own, as it is."),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any setting of a configuration: kv_cache_config.dtype=float16; repeatable.",
    ),
]
MaxSeqLen = Annotated[
    int | None, typer.Option(help="Most tokens of a sequence.", show_default="as configured")
]
MaxBatchSize = Annotated[
    int | None, typer.Option(help="Most sequences at a time.", show_default="as configured")
]
KVCacheDType = Annotated[
    CacheDTypeName | None,
    typer.Option(help="What keys and values are kept in.", show_default="as configured"),
]
AttnBackend = Annotated[
    AttnBackendName | None,
    typer.Option(help="Whose attention kernels run.", show_default="as configured"),
]
AnyCompileBackend = Annotated[
    CompileBackendName | None,
    typer.Option(help="What compiles the graph.", show_default="as configured"),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the id.")]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show tracebacks and the libraries' warnings.")
]
CompileBackend = Annotated[CompileBackendName, typer.Option(help="What compiles the graph.")]
RandomWeights = Annotated[
    bool,
    typer.Option(
        "--random-weights", help="Random weights, made on the device: true shapes, no download."
    ),
]
Offline = Annotated[bool, typer.Option("--offline", help="Use the local cache only.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
