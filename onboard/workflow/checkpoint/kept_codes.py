"""What a GPU's memory is spared by weights that stay quantised: by the headers that are here, or else
by what the config says.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onboard.errors import OnboardError
from onboard.hub import has_weights
from onboard.quantised.said import said_in_config, said_in_files
from onboard.sources.gguf_source import GGUF_FILE
from onboard.untrusted.bounds import read_json

_EXCLUDED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
"""Keys with the modules that are left as they are."""
_IN_LAYERS = re.compile(r"\.\d+\.")
_STACKS = re.compile(r"experts\.\w+_proj$")
BY_CONFIG = "quantised weights are counted by what the config says, as no headers are here"


def spared_bytes(folder: Path) -> tuple[int, list[str]]:
    """Return by how many bytes weights are smaller than with 16 bits an element, and facts.

    Only codes that there are kernels for count: others are decoded.
    """
    config = read_json(folder / "config.json")
    is_gguf = (folder / GGUF_FILE).is_file()
    if said_in_config(config) is None and not any(said_in_files(folder)) or is_gguf:
        return 0, []
    if has_weights(folder):
        return _by_headers(folder), []
    bits = _bits(said_in_config(config) or {})
    if bits is None:
        return 0, []
    try:
        elements = _quantised_elements(folder, config)
    except OnboardError as error:  # code of its own, which is not run here
        return 0, [f"weights are counted as if they were decoded ({error.message})"]
    return int(elements * (2 - bits / 8)), [BY_CONFIG]


def _by_headers(folder: Path) -> int:
    from onboard.graph.weight_load.quantised_folder import quantised_checkpoint

    checkpoint = quantised_checkpoint(folder)
    assert checkpoint is not None, "a config says how it is quantised"
    kept = checkpoint.kept_bytes()
    shapes = checkpoint.names()
    return sum(math.prod(shapes[name].shape) * 2 - size for name, size in kept.items())


def _bits(said: Mapping[str, Any]) -> float | None:
    """Return the bits of an element with its share of the scales; None: not known, or decoded."""
    method = str(said.get("quant_method", "")).lower()
    groups = said.get("config_groups")
    first: Any = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    own: Any = first.get("weights") if isinstance(first, Mapping) else None
    weights: Mapping[str, Any] = own if isinstance(own, Mapping) else {}
    algorithm = str(said.get("quant_algo", "")).upper()
    if method in ("fp8", "fbgemm_fp8") or algorithm.startswith("FP8"):
        return 8.0
    if method == "mxfp4" or algorithm == "MXFP4":
        return 4 + 8 / 32
    if algorithm.startswith("NVFP4"):
        return 4 + 8 / 16
    if method in ("gptq", "awq") and said.get("bits") == 4:
        return 4 + 16 / _group(said)
    if weights.get("type") == "float" and weights.get("num_bits") == 8:
        return 8.0
    if weights.get("num_bits") == 4:
        return 4 + 16 / _group(weights)
    return None


def _group(values: Mapping[str, Any]) -> int:
    size = values.get("group_size")
    return size if type(size) is int and size > 0 else 128


def _quantised_elements(folder: Path, config: Mapping[str, Any]) -> int:
    """Return how many elements of the config's model are quantised: matrices in layers that it does
    not leave out; of mxfp4 the stacks of experts.
    """
    from onboard.workflow.checkpoint.parameter_count import build_on_meta

    said = said_in_config(config) or {}
    excluded = [str(each) for each in _names(said)]
    only_stacks = said.get("quant_method") == "mxfp4"
    return sum(
        parameter.numel()
        for name, parameter in build_on_meta(folder).named_parameters()
        if parameter.dim() > 1 and _IN_LAYERS.search(name) and parameter.is_floating_point()
        if not only_stacks or _STACKS.search(name)
        if not any(_is_meant(pattern, name.removesuffix(".weight")) for pattern in excluded)
    )


def _names(said: Mapping[str, Any]) -> Iterator[Any]:
    for key in _EXCLUDED:
        value = said.get(key)
        yield from value if isinstance(value, list) else []


def _is_meant(pattern: str, module: str) -> bool:
    """Tell whether a module is one of those that a list of a config names: by a pattern, with "*", or
    as a part of its path.
    """
    if pattern.startswith("re:"):
        from onboard.quantised.methods.settings import pattern_of

        return pattern_of("its config", pattern.removeprefix("re:")).match(module) is not None
    if "*" in pattern:
        return fnmatch.fnmatchcase(module, pattern)
    return f".{pattern}." in f".{module}."
