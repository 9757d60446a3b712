"""`ModelSpec` -> `tests/equivalence/test_<family>_modeling.py`."""

from __future__ import annotations

import ast
import importlib
import keyword
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from torch import nn

from onboard import __version__
from onboard.analysis.spec import ModelSpec
from onboard.analysis.tiny import ORIGINAL_POSITIONS, load_config, tiny_config
from onboard.content import content_path
from onboard.errors import OnboardError

TEMPLATE = "tests/test_modeling.py.j2"

_BATCH, _LENGTH = 2, 24
_STARTS = (0, ORIGINAL_POSITIONS + 1)
"""Prompts lie on both sides of the position at which RoPE that scales with length switches."""
_PROMPT_LENGTHS = (3, 17, ORIGINAL_POSITIONS + 6)
_KINDS = {"rotary": "rotary", "rmsnorm": "norm", "layernorm": "norm", "mlp": "mlp", "attention": "attention"}
"""Kinds of the spec, in the order in which their tests come (what others are made of first) -> kind in the test."""
_CONTAINERS = {"decoder_layer", "model", "causal_lm"}
_GPU_LIMITS = {
    "rotary": 0.01,
    "norm": 0.01,
    "mlp": 0.01,
    "attention": 0.10,
    "other": 0.05,
    "layer": 0.05,
    "model": 0.05,
}
_NOT_ARCHITECTURE = {
    "architectures",
    "auto_map",
    "dtype",
    "model_type",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def generate_test_file(spec: ModelSpec, root: Path | None = None) -> str:
    """Return the text of the equivalence tests of `spec`'s model file, formatted.

    The tests need neither the checkpoint nor the spec: the small config and the module paths are written into them.
    A template under `root` comes before the shipped one.
    """
    _check_names(spec)
    config = tiny_config(load_config(spec.config))
    model = _meta_model(spec, config)
    layers = _layers(spec, model)
    blocks = _blocks(spec, model, layers)
    return _render(
        root,
        version=__version__,
        model=re.sub(r"[^\w./-]", "_", spec.model),
        spec=spec,
        model_file=f"modeling_{spec.family}.py",
        config=_arguments(config),
        config_module="transformers" if hasattr(transformers, spec.config_class) else type(config).__module__,
        layers=layers,
        blocks=blocks,
        gpu_limits={kind: limit for kind, limit in _GPU_LIMITS.items() if kind in {*blocks.values(), "layer", "model"}},
        batch=_BATCH,
        length=_LENGTH,
        prompt_lengths=_PROMPT_LENGTHS,
        starts=_STARTS,
    )


def _arguments(config: Any) -> dict[str, Any]:
    """The arguments that make `config`: those that differ from the defaults, or all where these do not make it."""
    for values in (config.to_diff_dict(), config.to_dict()):
        arguments = {key: value for key, value in values.items() if key not in _NOT_ARCHITECTURE}
        if _architecture(type(config)(**arguments)) == _architecture(config):
            return arguments
    raise AssertionError(f"{type(config).__name__} cannot be made again from its own values")


def _architecture(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key not in _NOT_ARCHITECTURE}


def _meta_model(spec: ModelSpec, config: Any) -> nn.Module:
    """Hugging Face's model for the small config, without memory: its module tree has the paths to test."""
    model_class = getattr(importlib.import_module(spec.hf_module), spec.architecture)
    with torch.device("meta"):
        model: nn.Module = model_class(config)
    return model


def _layers(spec: ModelSpec, model: nn.Module) -> dict[str, str]:
    """Path -> kind of the decoder layers to test: the only kind's first one, or, where kinds differ, all."""
    classes = {block.class_name for block in spec.blocks if block.kind == "decoder_layer"}
    paths = [path for path, module in model.named_modules() if type(module).__name__ in classes]
    if len(spec.layer_kinds) == 1:
        return {paths[0]: spec.layer_kinds[0].name}
    types = getattr(model.config, "layer_types", None) or ["layer"] * len(paths)
    return dict(zip(paths, types, strict=True))


def _blocks(spec: ModelSpec, model: nn.Module, layers: dict[str, str]) -> dict[str, str]:
    """Path -> kind of each block in those layers and outside of layers, what others are made of first."""
    kinds = {block.class_name: block.kind for block in spec.blocks if block.kind not in _CONTAINERS}
    found = {path: kinds[name] for path, name in _class_names(model, layers) if name in kinds}
    order = [*_KINDS, *sorted(set(found.values()) - _KINDS.keys())]
    return {path: _KINDS.get(found[path], "other") for path in sorted(found, key=lambda path: order.index(found[path]))}


def _class_names(model: nn.Module, layers: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Path and class name of the modules in `layers` or in no layer; not torch's own ones."""
    for path, module in model.named_modules():
        in_layer = re.search(r"^(.*?\.\d+)\.", path)
        if not type(module).__module__.startswith("torch.") and (in_layer is None or in_layer[1] in layers):
            yield path, type(module).__name__


def _check_names(spec: ModelSpec) -> None:
    """Refuse a spec whose names, which become code, are not names."""
    for name in (spec.family, spec.architecture, spec.config_class, *spec.hf_module.split(".")):
        if not name.isidentifier() or keyword.iskeyword(name):
            raise OnboardError(f"the spec names {name!r}, which is not an identifier", hint="Correct spec.yaml")


def _render(root: Path | None, **values: Any) -> str:
    template = content_path("templates", TEMPLATE, root=root)
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Python, not HTML: every value passes the filter `python`
    )
    environment.filters["python"] = _literal
    return _formatted(environment.get_template(template.name).render(values))


def _literal(value: Any) -> str:
    """Return `value` as a Python literal; the value read back is the same."""
    text = repr(value)
    assert ast.literal_eval(text) == value, f"{value!r} has no literal"
    return text


def _formatted(text: str) -> str:
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", "120", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
