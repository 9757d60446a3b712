"""`auto-round` with floats as codes: it writes what compressed-tensors and transformers' `fp8` have, with
settings of its own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onboard.quantised.methods.compressed_tensors import CompressedTensors
from onboard.quantised.methods.fp8 import Fp8
from onboard.quantised.methods.settings import one_of, refusal
from onboard.quantised.weight import Method

_NAME = "auto-round"
_FORMATS = {4: "mxfp4-pack-quantized", 8: "mxfp8-quantized"}
"""Formats of compressed-tensors by the bits of a microscaling float."""
_WHOLE_BITS = 16


def read_floats(values: Mapping[str, Any]) -> Method | None:
    """Read a `quantization_config` of floats; None: codes are integers."""
    packing = str(values.get("packing_format", ""))
    if packing == "auto_round:fp8" and values.get("data_type") == "fp":
        if values.get("extra_config"):
            raise refusal(_NAME, "extra_config of float8")
        keys = ("fmt", "weight_block_size", "activation_scheme")
        return Fp8.of({key: values[key] for key in keys if key in values})
    if packing == "auto_round:llm_compressor" and values.get("data_type") == "mx_fp":
        return _microscaling(values)
    return None


def _microscaling(values: Mapping[str, Any]) -> CompressedTensors:
    extra = values.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(v, Mapping) for v in extra.values()):
        raise refusal(_NAME, f"extra_config = {str(extra)[:60]}")
    layers = {str(layer): {**values, **own} for layer, own in extra.items()}
    own = {layer: said for layer, said in layers.items() if said.get("bits") != _WHOLE_BITS}
    groups = {layer: _group(said, _target(layer)) for layer, said in own.items()}
    return CompressedTensors.of({"config_groups": groups | {"": _group(values, "Linear")}})


def _target(layer: str) -> str:
    """Return what compressed-tensors calls a layer, or layers, of a key of `extra_config`."""
    if layer.replace(".", "").replace("_", "").isalnum():
        return layer
    return f"re:{layer}" if layer.startswith((".*", "^")) else f"re:.*(?:{layer})"


def _group(said: Mapping[str, Any], target: str) -> dict[str, Any]:
    one_of(_NAME, said, "data_type", ("mx_fp",))
    one_of(_NAME, said, "group_size", (32,))
    bits = one_of(_NAME, said, "bits", tuple(_FORMATS))
    floats = {"type": "float", "strategy": "group", "group_size": 32}
    inputs = one_of(_NAME, {"act_bits": _WHOLE_BITS} | dict(said), "act_bits", (4, 8, 16))
    return {
        "targets": [target],
        "format": _FORMATS[bits],
        "weights": {**floats, "num_bits": bits},
        "input_activations": None if inputs == _WHOLE_BITS else {**floats, "num_bits": inputs},
    }
