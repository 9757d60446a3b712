"""Arguments and options that several commands have."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from onboard.sources.hub_errors import go_offline


class Device(StrEnum):
    """Device to run the model on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class DTypeName(StrEnum):
    """Dtype of weights and activations."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Precision(StrEnum):
    """The dtypes, as other tools call them."""

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"

    @property
    def dtype(self) -> DTypeName:
        """The dtype that it stands for."""
        names = {"FP32": DTypeName.FLOAT32, "FP16": DTypeName.FLOAT16, "BF16": DTypeName.BFLOAT16}
        return names[self.value]


class CacheForm(StrEnum):
    """How keys and values are kept."""

    PAGED = "paged"
    STATIC_V1 = "static_v1"
    STATIC_V2 = "static_v2"


class ModeName(StrEnum):
    """Whether the generated model runs, or transformers' own."""

    GRAPH = "graph"
    HF = "hf"
    TRANSFORMERS = "transformers"


class CacheDTypeName(StrEnum):
    """Dtype of the KV cache."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8 = "float8_e4m3fn"


class AttnBackendName(StrEnum):
    """Back end of attention."""

    AUTO = "auto"
    TORCH = "torch"
    TRITON = "triton"


class CompileBackendName(StrEnum):
    """How the graph is compiled."""

    AUTO = "auto"
    SIMPLE = "torch-simple"
    COMPILE = "torch-compile"
    CUDAGRAPH = "torch-cudagraph"
    OPT = "torch-opt"
    TENSORRT = "torch-tensorrt"


def _stay_offline(asked: bool) -> bool:
    if asked:
        go_offline()
    return asked


Draft = Annotated[
    str | None,
    typer.Option(
        metavar="ngram|mtp|MODEL",
        help="Who proposes tokens that a step checks together: the text itself, the checkpoint's own heads for that, "
        "or a small model.",
        show_default="nobody",
    ),
]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Checkpoint folder, Hugging Face id, or name in the registry."
    ),
]
Root = Annotated[
    Path,
    typer.Option(
        help="Root folder that the model was onboarded under.", file_okay=False, show_default="here"
    ),
]
Config = Annotated[
    Path | None, typer.Option(help="Configuration file that replaces the registered one.")
]
OnDevice = Annotated[Device, typer.Option(help="Device to run the model on.")]
InDType = Annotated[DTypeName, typer.Option(help="Dtype of weights and activations.")]
Mode = Annotated[
    ModeName,
    typer.Option(help="graph: the generated model; hf, transformers: transformers' own model."),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Set one field of the configuration, as kv_cache_config.dtype=float16; repeatable.",
    ),
]
WorldSize = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Number of ranks, each with a GPU and its share of the weights.",
        show_default="as configured",
    ),
]
MaxSeqLen = Annotated[
    int | None,
    typer.Option(
        help="Maximum tokens of a sequence, prompt included.", show_default="as configured"
    ),
]
MaxBatchSize = Annotated[
    int | None,
    typer.Option(help="Maximum number of sequences in a batch.", show_default="as configured"),
]
KVCacheDType = Annotated[
    CacheDTypeName | None,
    typer.Option(help="Dtype of the KV cache.", show_default="as configured"),
]
AttnBackend = Annotated[
    AttnBackendName | None,
    typer.Option(help="Back end of attention.", show_default="as configured"),
]
AnyCompileBackend = Annotated[
    CompileBackendName | None,
    typer.Option(help="How the graph is compiled.", show_default="as configured"),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and warnings of libraries.")]
CompileBackend = Annotated[CompileBackendName, typer.Option(help="How the graph is compiled.")]
RandomWeights = Annotated[
    bool,
    typer.Option(
        "--random-weights", help="Use random weights, made on the device, and download none."
    ),
]
Offline = Annotated[
    bool,
    typer.Option(
        "--offline",
        callback=_stay_offline,
        help="Use the local Hugging Face cache only; no network.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
