"""How large a model is: from its safetensors headers, or from its config."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onboard.errors import OnboardError, unfit_package
from onboard.gpu import gigabytes
from onboard.hub import HubSource, ModelSource, has_weights
from onboard.quantised.said import said_in_config

if TYPE_CHECKING:
    from onboard.graph.weight_load.safetensors_folder import TensorMeta

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
    stored: int = 0
    """Bytes of the files' tensors, where these are quantised; else 0."""

    def __str__(self) -> str:
        quantised = f" ({gigabytes(self.stored)} GB in quantised files)" if self.stored else ""
        return f"{self.parameters:,} parameters, {gigabytes(self.bytes)} GB{quantised}"


def estimate_size(
    source: ModelSource,
    dtype: str = "auto",
    built: dict[str, int] | None = None,
    decoded: Mapping[str, TensorMeta] | None = None,
    *,
    gpu: bool = False,
) -> ModelSize:
    """Return the size of the model when run in `dtype` ("auto": as its checkpoint stores it), on a
    GPU or the CPU.

    `built` are the elements by dtype of the model that its config describes, and `decoded` the
    tensors that a checkpoint stands for, if they are known already.
    """
    if has_weights(source.files()):
        if (found := _quantised_size(source.weights(), dtype, gpu=gpu)) is not None:
            return found
        counts, basis = local_counts(source.weights()), "safetensors headers"
    elif isinstance(source, HubSource) and source.tensors and _is_quantised(source):
        return _quantised_size_on_hub(source, dtype, decoded or {}, gpu=gpu)
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


def _quantised_size(folder: Path, dtype: str, *, gpu: bool) -> ModelSize | None:
    """Return the size of a quantised checkpoint: 16-bit runs on a GPU keep the codes that there are
    kernels for, and all else is decoded. None: it is not quantised.
    """
    from onboard.graph.weight_load.quantised_folder import quantised_checkpoint

    if (checkpoint := quantised_checkpoint(folder)) is None:
        return None
    names, stored = checkpoint.names(), checkpoint.files.names()
    kept = checkpoint.kept_bytes() if gpu and dtype != "float32" else {}
    sizes = {name: _decoded_bytes(meta, dtype) for name, meta in names.items()} | kept
    elements = sum(math.prod(meta.shape) for meta in names.values())
    on_disk = sum(meta.nbytes for meta in stored.values())
    return ModelSize(elements, sum(sizes.values()), "headers of quantised files", on_disk)


def _quantised_size_on_hub(
    source: HubSource, dtype: str, decoded: Mapping[str, TensorMeta], *, gpu: bool
) -> ModelSize:
    """Return the same from the headers that the Hub serves; on a GPU it is the least, as if all codes
    were kept.
    """
    basis = "safetensors metadata of the Hub"
    stored = sum(
        _element_bytes(each.dtype) * math.prod(each.shape) for each in source.tensors.values()
    )
    elements = sum(math.prod(meta.shape) for meta in decoded.values())
    whole = sum(_decoded_bytes(meta, dtype) for meta in decoded.values())
    is_kept = not decoded or (gpu and dtype != "float32")
    return ModelSize(elements or stored, stored if is_kept else whole, basis, stored)


def _is_quantised(source: HubSource) -> bool:
    return said_in_config(source.config()) is not None


def _decoded_bytes(meta: TensorMeta, dtype: str) -> int:
    return math.prod(meta.shape) * _bytes(str(meta.dtype).removeprefix("torch."), dtype)


def _element_bytes(stored: str) -> int:
    return _bytes(stored, "auto")


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
        raise unfit_package(error) or OnboardError(
            f"transformers cannot build a causal language model from {folder / 'config.json'} ({reason})",
            hint="Check the config's values and the transformers version",
        ) from error


def _tally(items: Iterable[tuple[str, int]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for dtype, elements in items:
        counts[dtype] = counts.get(dtype, 0) + elements
    return counts
