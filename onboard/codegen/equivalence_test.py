"""`ModelSpec` -> `tests/equivalence/test_<family>_modeling.py`."""

from __future__ import annotations

import copy
import importlib
import keyword
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from onboard import __version__
from onboard.analysis.blocks.spec_mixtures import Mixture
from onboard.analysis.multimodal import is_under
from onboard.analysis.recognise.compressors import COMPRESSOR, INDEXER
from onboard.analysis.source import gives_its_input, multiplies
from onboard.analysis.spec import ModelSpec, unrun_in
from onboard.analysis.spec_blocks import Mask
from onboard.analysis.tiny.loaded_config import load_config
from onboard.analysis.tiny.tiny_config import arguments_of, tiny_config
from onboard.codegen.format import format_python
from onboard.codegen.measured import Measured
from onboard.codegen.model_file import first_position_expression
from onboard.errors import OnboardError
from onboard.hf.codebooks import codebooks_of
from onboard.hf.hf_model import without_missing_towers
from onboard.hf.parameters_on import without_memory
from onboard.modeling import Codebooks
from onboard.render import TEST_TEMPLATE, render

_KINDS = {
    "embedding": "embedding",
    "rotary": "rotary",
    "rmsnorm": "norm",
    "layernorm": "norm",
    "l2norm": "norm",
    "mlp": "mlp",
    "other": "other",
    "attention": "attention",
}
"""Kinds of the spec, in the order in which their tests come (what others are made of first) -> kind
in the test.
"""
_NO_BLOCKS = {"decoder_layer", "model", "causal_lm", "scan_module"}
_NOT_ARCHITECTURE = {
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "gradient_checkpointing",
    "model_type",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def generate_test_file(spec: ModelSpec, root: Path | None = None, code: str | None = None) -> str:
    """Return the text of the equivalence tests of `spec`'s model file, formatted; a template under
    `root` comes first.

    `code` is the folder, relative to the root, with a copy of the repository's code, for a model
    that brings code. The tests need neither the checkpoint nor the spec: the small config and the
    module paths are written into them. Raises `OnboardError` for a spec whose names are not
    identifiers or whose layers the small model does not have.
    """
    return write_test_file(spec, measure_model(spec), root, code)


def measure_model(spec: ModelSpec) -> Measured:
    """Build the small model without memory; return what the tests need of it."""
    config = tiny_config(load_config(spec.config))
    model = _meta_model(spec, copy.deepcopy(config))  # constructors may change theirs
    layers, codebooks = _layers(spec, model), codebooks_of(model)
    return Measured(
        config=_arguments(config, spec.config),
        config_module="transformers"
        if spec.repository is None and hasattr(transformers, spec.config_class)
        else type(config).__module__,
        layers=layers,
        blocks=_blocks(spec, model, [kind.path for kind in spec.layer_kinds]),
        codebooks=(codebooks.count, codebooks.size) if codebooks.count > 1 else None,
    )


def write_test_file(
    spec: ModelSpec, measured: Measured, root: Path | None = None, code: str | None = None
) -> str:
    """Return the text that `generate_test_file` does, of what was measured elsewhere."""
    first_position = first_position_expression(spec, "config")
    source = render(
        TEST_TEMPLATE,
        root,
        version=__version__,
        model=re.sub(r"[^\w./-]", "_", _shown_name(spec.model)),
        spec=spec,
        model_file=f"modeling_{spec.family}.py",
        code=code,
        config=measured.config,
        config_module=measured.config_module,
        counted="positions" in spec.traits,
        suite="FirstPositionSuite" if first_position else "EquivalenceSuite",
        first_position=first_position,
        distinct="repeated_tokens" in spec.traits,
        codebooks=Codebooks(*measured.codebooks) if measured.codebooks else None,
        hides_padding=any(
            "ones" in block.parameters.returns for block in spec.blocks if isinstance(block, Mask)
        ),
        layers=measured.layers,
        blocks=measured.blocks,
        eager=spec.eager,
    )
    return format_python(source)


def _shown_name(model: str) -> str:
    """Return an id as it is, and of a folder, whose path says nothing to others, the name alone."""
    return model.rsplit("/", 1)[-1] if model.startswith("/") else model


def _arguments(config: Any, written: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that make `config`: those that differ from the defaults, or all where these do
    not make it.

    What a constructor changes anew each time, so that no argument makes it, is as it is `written`
    in config.json.
    """
    different: set[str] = set()
    for values in (arguments_of(config, different=True), arguments_of(config)):
        arguments = _of_architecture(values)
        if not (different := _different(config, arguments)):
            return arguments
    settled = {key: value for key, value in arguments.items() if key not in different}
    settled |= {key: written[key] for key in different & written.keys()}
    if _different(config, settled) <= different:
        return settled
    raise OnboardError(
        f"{type(config).__name__} cannot be made again from its own values",
        hint="Report this config",
    )


def _different(config: Any, arguments: Mapping[str, Any]) -> set[str]:
    """The fields in which the config that these arguments make is another one."""
    made, wanted = _architecture(type(config)(**arguments)), _architecture(config)
    missing = object()
    return {key for key in made | wanted if made.get(key, missing) != wanted.get(key, missing)}


def _architecture(config: Any) -> dict[str, Any]:
    return _of_architecture(config.to_dict())


def _of_architecture(values: dict[str, Any]) -> dict[str, Any]:
    """What can be an argument and says something of the architecture; a config.json may have any
    keys at all.
    """
    return {
        key: value
        for key, value in values.items()
        if key not in _NOT_ARCHITECTURE and key.isidentifier() and not keyword.iskeyword(key)
    }


def _meta_model(spec: ModelSpec, config: Any) -> nn.Module:
    """Hugging Face's model for the small config, without memory: its module tree has the paths to
    test. As in the tests its attention is the eager one: code may have a table of it without the
    usual one.
    """
    model_class = getattr(importlib.import_module(spec.hf_module), spec.architecture)
    own_code = spec.repository is not None
    if own_code:
        config._attn_implementation = "eager"
    with without_memory(computing=own_code), without_missing_towers():
        model: nn.Module = model_class(config)
    return model


def _layers(spec: ModelSpec, model: nn.Module) -> dict[str, str]:
    """Path -> kind of the decoder layers to test: the first of each kind. Those that are written out
    in what runs them are not called here.
    """
    paths = dict(model.named_modules())
    for kind in spec.layer_kinds:
        if kind.path not in paths:
            raise OnboardError(
                f"the small model has no layer {kind.path} ({kind.name})", hint="Correct spec.yaml"
            )
    return {kind.path: kind.name for kind in spec.layer_kinds if not kind.written_out}


def _blocks(spec: ModelSpec, model: nn.Module, layers: list[str]) -> dict[str, str]:
    """Path -> kind of each block in those layers and outside of layers, what others are made of
    first.

    A module that transformers itself does not call when it runs as a causal language model has
    nothing to compare, nor has a part of experts, which run together in one op, nor a module that
    is an op of the block it lies in, nor a compressor, whose keys lie with the tokens here, and its
    indexer.
    """
    kinds = {block.class_name: block.kind for block in spec.blocks if block.kind not in _NO_BLOCKS}
    named = [
        (path, name)
        for path, name in _class_names(model, layers, spec.eager)
        if path not in spec.never_called
    ]
    whole = tuple(f"{path}." for path, name in named if kinds.get(name) in ("experts", INDEXER))
    lists = {b.class_name: unrun_in(b) for b in spec.blocks if isinstance(b, Mixture)}
    unrun = {f"{path}.{part}" for path, name in named for part in lists.get(name, ())}
    whole += tuple(f"{path}." for path in unrun)
    kinds = {name: kind for name, kind in kinds.items() if kind not in (COMPRESSOR, INDEXER)}
    found = {
        path: kinds[name]
        for path, name in named
        if name in kinds and path not in unrun and not path.startswith(whole)
    }
    known = {path: kind if kind in _KINDS else "other" for path, kind in found.items()}
    order = list(_KINDS)
    return {
        path: _KINDS[known[path]]
        for path in sorted(known, key=lambda path: order.index(known[path]))
    }


def _class_names(
    model: nn.Module, layers: list[str], eager: list[str]
) -> Iterator[tuple[str, str]]:
    """Path and class name of the modules in `layers` or in no layer; not torch's own ones, nor places
    to watch, which are left out, nor what only multiplies, which is a part of attention.
    """
    for path, module in model.named_modules():
        in_layer = re.search(r"^(.*?\.\d+)\.", path)
        own = not type(module).__module__.startswith("torch.") and not is_under(path, eager)
        if (
            own
            and not gives_its_input(type(module))
            and not multiplies(type(module))
            and (in_layer is None or in_layer[1] in layers)
        ):
            yield path, type(module).__name__
