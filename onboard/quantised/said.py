"""How a checkpoint is quantised, in words: by its config, and by its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onboard.untrusted.bounds import read_json

if TYPE_CHECKING:
    from onboard.graph.weight_load.safetensors_folder import TensorMeta

_KEYS = ("quantization_config", "compression_config", "quantization")
"""Where a config.json says it; the last is MLX's."""
_BESIDE = ("expert_dtype",)
"""What a config may say of it beside the key."""
_LEVELS = 2
"""How deep a text model's config may lie: thinker_config.text_config."""
_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files beside config.json that say it: ModelOpt's, and those of older GPTQ and AWQ."""
_TRAITS = (
    "quant_algo",
    "format",
    "bits",
    "w_bit",
    "group_size",
    "q_group_size",
    "weight_block_size",
)
_ENDINGS = {
    "weight_scale_inv": "fp8",
    "weight_packed": "compressed-tensors",
    "qweight": "packed integers, as GPTQ and AWQ have them",
    "_blocks": "mxfp4",
    "SCB": "bitsandbytes",
    "weight.absmax": "bitsandbytes",
    "_weight_qdata": "torchao",
    "weight._data": "optimum-quanto",
    "W_q": "hqq",
}
"""Endings of names that no unquantised checkpoint has; some count with their scales only."""
_WITH_SCALES = {"_blocks": "_scales", "W_q": "scale"}


def said_in_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what a parsed config.json, or the text model's part of it, says of quantisation."""
    parts = [config]
    for _ in range(_LEVELS):
        inner = (each for part in parts for key, each in part.items() if key not in _KEYS)
        parts += [each for each in inner if isinstance(each, Mapping) and each not in parts]
    found = (
        {each: part[each] for each in _BESIDE if each in part} | part[key]
        for part in parts
        for key in _KEYS
        if isinstance(part.get(key), Mapping) and part[key]
    )
    return next(found, None)


def said_in_files(folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the names of files beside config.json that say it, and what they say."""
    for path in (folder / name for name in _FILES):
        if path.is_file():
            values = read_json(path)
            yield path.name, values if isinstance(values, Mapping) else {}


def describe_config(config: Mapping[str, Any]) -> str | None:
    """Return how a parsed config.json, or the text model's part of it, says that weights are
    quantised.
    """
    values = said_in_config(config)
    return None if values is None else _describe(values)


def describe_tensors(tensors: Mapping[str, TensorMeta]) -> str | None:
    """Return how names and dtypes say it."""
    for name, meta in tensors.items():
        if (dtype := str(meta.dtype).removeprefix("torch.")).startswith("float8"):
            return f"{name} is {dtype}"
        for ending, method in _ENDINGS.items():
            beside = name.removesuffix(ending) + _WITH_SCALES.get(ending, ending)
            if name.endswith(ending) and beside in tensors:
                return f"{method}: {name}"
    return None


def says_float8_cache(config: Mapping[str, Any], folder: Path) -> bool:
    """Tell whether a checkpoint asks for keys and values to be cached in float8_e4m3fn: `config` is
    its parsed config.json.
    """
    values = said_in_config(config)
    beside = (each for _, each in said_in_files(folder))
    return any(map(_has_float8_cache, beside if values is None else [values, *beside]))


def _has_float8_cache(values: Mapping[str, Any]) -> bool:
    inner = values.get("quantization")
    values = inner if isinstance(inner, Mapping) else values
    scheme = values.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
    return str(values.get("kv_cache_quant_algo")).upper() == "FP8"


def _describe(values: Mapping[str, Any]) -> str:
    """Return a method's name and what tells its variants apart: "fp8, 128 x 128 blocks"."""
    inner = values.get("quantization")
    values = inner if isinstance(inner, Mapping) else values
    producer = values.get("producer")
    method = values.get("quant_method") or (
        producer.get("name") if isinstance(producer, Mapping) else None
    )
    return (
        ", ".join([str(method)] * bool(method) + list(_details(values)))
        or "by a method that it does not name"
    )


def _details(values: Mapping[str, Any]) -> Iterator[str]:
    for key in _TRAITS:
        value = values.get(key)
        if key == "weight_block_size" and isinstance(value, list):
            yield f"{' x '.join(map(str, value))} blocks"
        elif key in ("bits", "w_bit") and value:
            yield f"{value} bits"
        elif key in ("group_size", "q_group_size") and value:
            yield f"groups of {value}"
        elif value:
            yield str(value)
