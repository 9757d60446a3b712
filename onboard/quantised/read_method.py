"""Which method a checkpoint is quantised by: as its config says, or a file beside that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onboard.errors import OnboardError
from onboard.quantised.methods.compressed_tensors import CompressedTensors
from onboard.quantised.methods.fp8 import Fp8
from onboard.quantised.methods.gptq import read_auto_round, read_awq, read_gptq
from onboard.quantised.methods.modelopt import ModelOpt
from onboard.quantised.methods.others import BitsAndBytes, FbgemmFp8, Mxfp4
from onboard.quantised.methods.torchao import TorchAo
from onboard.quantised.said import describe_config, describe_tensors, said_in_config, said_in_files
from onboard.quantised.weight import Method

if TYPE_CHECKING:
    from onboard.graph.weight_load.safetensors_folder import TensorMeta

METHODS: dict[str, Callable[[Mapping[str, Any]], Method]] = {
    "fp8": Fp8.of,
    "mxfp8": Fp8.of,
    "torchao": TorchAo.of,
    "compressed-tensors": CompressedTensors.of,
    "modelopt": ModelOpt.of,
    "modelopt_fp4": ModelOpt.of,
    "modelopt_mixed": ModelOpt.of,
    "modelopt_mxfp8": ModelOpt.of,
    "mxfp4": Mxfp4.of,
    "gptq": read_gptq,
    "awq": read_awq,
    "auto-round": read_auto_round,
    "intel/auto-round": read_auto_round,
    "bitsandbytes": BitsAndBytes.of,
    "fbgemm_fp8": FbgemmFp8.of,
}
_BESIDE = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files that say it without a name."""


def read_method(config: Mapping[str, Any], folder: Path) -> Method | None:
    """Return the method of a checkpoint, None where nothing says that it is quantised.

    `config` is the parsed config.json. Raises `OnboardError` for a method, a scheme or a key that
    is not read.
    """
    if (values := said_in_config(config)) is not None:
        return _read(values, "")
    for name, values in said_in_files(folder):
        return _read(values, _BESIDE[name])
    return None


def describe_unread(config: Mapping[str, Any]) -> str | None:
    """Return how a config says that weights are quantised, where that is not read; None: it is, or
    they are not.
    """
    values = said_in_config(config)
    try:
        if values is not None:
            _read(values, "")
    except OnboardError:
        return describe_config(config)
    return None


def refuse_unsaid(tensors: Mapping[str, TensorMeta]) -> None:
    """Raise `OnboardError` for tensors that are quantised though nothing says how."""
    if (found := describe_tensors(tensors)) is not None:
        raise OnboardError(
            f"the checkpoint is quantised ({found}), and neither config.json nor a file beside it says how",
            hint="Fetch it again with its quantization_config, or use another release of the model",
        )


def _read(values: Mapping[str, Any], default: str) -> Method:
    producer = values.get("producer")
    named = producer.get("name") if isinstance(producer, Mapping) else None
    name = str(values.get("quant_method") or named or default).lower()
    if name not in METHODS:
        name = name.replace("_", "-") or ("compressed-tensors" if "config_groups" in values else "")
    if name not in METHODS:
        raise OnboardError(
            f"the checkpoint is quantised by {name[:60] or 'a method that is not named'}, which onboard cannot read",
            hint=f"Read are {', '.join(METHODS)}",
        )
    return METHODS[name](values)
