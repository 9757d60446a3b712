"""How large a model is: from its safetensors headers, or from its config."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onboard.errors import OnboardError
from onboard.gpu import gigabytes
from onboard.hub import HubSource, ModelSource, has_weights

# Bytes an element, by the names that safetensors and torch use.
_FLOAT_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
}
_OTHER_BYTES = {"I64": 8, "I32": 4, "I16": 2, "int64": 8, "int32": 4, "int16": 2}


@dataclass(frozen=True)
class ModelSize:
    """Parameters, bytes of the weights in the dtype they are run in, and what the numbers come
    from.
    """

    parameters: int
    bytes: int
    basis: str

    def __str__(self) -> str:
        return f"{self.parameters:,} parameters, {gigabytes(self.bytes)} GB"


def estimate_size(
    source: ModelSource, dtype: str = "auto", built: dict[str, int] | None = None
) -> ModelSize:
    """Return the size of the model when run in `dtype` ("auto": as its checkpoint stores it).

    `built` are the elements by dtype of the model that its config describes, if they are known
    already.
    """
    if has_weights(source.files()):
        counts, basis = local_counts(source.weights()), "safetensors headers"
    elif isinstance(source, HubSource) and source.tensors:
        counts = _tally(
            (tensor.dtype, math.prod(tensor.shape)) for tensor in source.tensors.values()
        )
        basis = "safetensors metadata of the Hub"
    else:
        counts = module_counts(build_on_meta(source.files())) if built is None else built
        basis = "the model that its config describes"
    return ModelSize(
        sum(counts.values()), sum(count * _bytes(d, dtype) for d, count in counts.items()), basis
    )


def _bytes(stored: str, run: str) -> int:
    """Return the bytes of an element; what is quantized or an integer keeps its size in any
    dtype.
    """
    if stored in _FLOAT_BYTES:
        return _FLOAT_BYTES[stored if run == "auto" else run]
    return _OTHER_BYTES.get(stored, 1)


def local_counts(folder: Path) -> dict[str, int]:
    """Return elements by dtype over the folder's safetensors files."""
    from onboard.graph.weight_load.quantised_folder import stored_checkpoint

    metas = stored_checkpoint(folder).names().values()
    return _tally((str(meta.dtype).removeprefix("torch."), math.prod(meta.shape)) for meta in metas)


def module_counts(model: Any) -> dict[str, int]:
    """Return elements by dtype of a module's parameters, shared ones once."""
    return _tally(
        (str(parameter.dtype).removeprefix("torch."), parameter.numel())
        for parameter in model.parameters()
    )


def build_on_meta(folder: Path) -> Any:
    """Build the Hugging Face model of a config on the meta device, where tensors have shapes and no
    memory.

    Raises:
        OnboardError: transformers refuses the config; its values are whatever a repository says.
    """
    import torch
    from transformers import AutoConfig

    from onboard.hf.architecture import decoder_config
    from onboard.hf.hf_model import build_reference
    from onboard.hf.quiet import quiet_transformers

    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
            with torch.device("meta"):
                return build_reference(decoder_config(config))
    except OnboardError:
        raise
    # Any type at all: the config's values run through all of the model's constructors.
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise OnboardError(
            f"transformers cannot build a causal language model from {folder / 'config.json'} ({reason})",
            hint="Check the config's values and the transformers version",
        ) from error


def _tally(items: Iterable[tuple[str, int]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for dtype, elements in items:
        counts[dtype] = counts.get(dtype, 0) + elements
    return counts
