"""What a GPU's memory is spared by weights that stay quantised: by the headers that are here, or else
by what the config says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onboard.errors import OnboardError
from onboard.hub import has_weights
from onboard.quantised.said import said_in_config, said_in_files
from onboard.sources.gguf_source import GGUF_FILE
from onboard.untrusted.bounds import read_json

_STACKS = re.compile(r"experts\.\w+_proj$")
_FIRST = re.compile(r"experts\.(?=\w+$)")
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
    try:
        spared = _by_config(folder, config)
        return spared, [BY_CONFIG] if spared else []
    except OnboardError as error:  # code of its own, which is not run here
        return 0, [f"weights are counted as if they were decoded ({error.message})"]


def _by_headers(folder: Path) -> int:
    from onboard.graph.weight_load.quantised_folder import quantised_checkpoint

    checkpoint = quantised_checkpoint(folder)
    assert checkpoint is not None, "a config says how it is quantised"
    return checkpoint.spared_bytes()


def _by_config(folder: Path, config: Mapping[str, Any]) -> int:
    """Return the same where each matrix that the config quantises lies as its scheme says."""
    from onboard.graph.quantise.kernel_forms import has_kernels
    from onboard.graph.weight_load.weight_names import module_renaming
    from onboard.quantised.config_layouts import ConfigLayouts
    from onboard.workflow.checkpoint.parameter_count import build_on_meta

    model = build_on_meta(folder)
    layouts = ConfigLayouts.of(config, folder, module_renaming(model))
    assert layouts is not None, "a config says how it is quantised"
    spared = 0
    for matrix in _matrices(model):
        layout = layouts.layout_of(matrix.module, is_stack=matrix.is_stack)
        if layout is not None and has_kernels(layout.kind, layout.block, matrix.inputs):
            decoded = 2 * matrix.outputs * matrix.inputs
            spared += matrix.count * (decoded - layout.size(matrix.outputs, matrix.inputs))
    return spared


@dataclass(frozen=True)
class _Matrix:
    """Weights of one shape, one or as many as experts have."""

    module: str
    count: int
    outputs: int
    inputs: int
    is_stack: bool = False


def _matrices(model: Any) -> Iterator[_Matrix]:
    """Yield the linear layers of a model, and its stacks of experts, of which each token has some;
    gate and up are two. A stack has the name of its first expert's layer, as checkpoints have it.
    """
    from torch import nn

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield _Matrix(name, 1, module.out_features, module.in_features)
    for name, parameter in model.named_parameters():
        if _STACKS.search(name) and parameter.dim() == 3 and _are_chosen(model, name):
            count, outputs, inputs = parameter.shape
            pieces = 2 if "gate_up" in name else 1
            layer = _FIRST.sub("experts.0.", name.replace("gate_up_proj", "gate_proj"))
            yield _Matrix(layer, count * pieces, outputs // pieces, inputs, is_stack=True)


def _are_chosen(model: Any, stack: str) -> bool:
    from onboard.hf.expert_weights import are_chosen

    return are_chosen(model.get_submodule(stack.rpartition(".")[0]))
