"""Where a pipeline's model comes from: the config, the module, and the inputs with which it is
exported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from onboard.config import Mode, deep_merge, suggest
from onboard.content import content_path
from onboard.errors import OnboardError, UsageError
from onboard.graph.export.config_windows import windowless_layer
from onboard.graph.undocumented import undocumented_classes
from onboard.graph.weight_load.computed_tables import saved_tables
from onboard.hf.architecture import decoder_config, is_own, refuse_own_code, text_config
from onboard.hf.codebooks import codebooks_of
from onboard.hf.config_layers import cut_layers, read_layers
from onboard.hf.json_floats import json_floats
from onboard.hf.parameters_on import parameters_on
from onboard.hub import with_own_type
from onboard.modeling import (
    ONE_CODEBOOK,
    CausalLMOutput,
    Codebooks,
    first_position,
    load_model_file,
    registered_config,
    registered_model,
)
from onboard.sources.declared_type import with_declared_type
from onboard.untrusted.bounds import check_config, check_folder, read_json

# Sizes that are neither 1 (which export would specialise on) nor equal (which it would take for one
# dimension).
_EXAMPLE_BATCH, _EXAMPLE_SEQUENCE = 3, 11


def read_config(checkpoint: Path, root: Path | None) -> Any:
    """Return the config of a checkpoint; of a model that brings its own code, as its generated file
    reads it.

    Raises:
        OnboardError: transformers does not know the model type, and no generated file does.
    """
    path = checkpoint / "config.json"
    values = read_json(path) if path.is_file() else {}
    check_config(values, path)
    check_folder(checkpoint)
    values = (
        with_own_type(with_declared_type(values, checkpoint)) if isinstance(values, dict) else {}
    )
    model_type = values.get("model_type", "")
    if not re.fullmatch(r"\w[\w-]*", str(model_type)) or model_type in CONFIG_MAPPING_NAMES:
        with undocumented_classes(), _values_of(path):
            return AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
    model_file = content_path("models", f"modeling_{model_type}.py", root=root)
    if model_file.is_file():
        load_model_file(model_file)
    config_class = registered_config(model_type)
    if config_class is None:
        raise OnboardError(
            f"there is no model file for the model type {model_type}",
            hint="Onboard the model first",
        )
    with _values_of(path):
        return config_class.from_dict(json_floats(values))


_OF_VALUES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What values raise that a config's class or a model's constructors cannot do with."""


@contextmanager
def _values_of(config: Path) -> Iterator[None]:
    """Turn what a config's class raises into an `OnboardError` that names the file."""
    try:
        yield
    except _OF_VALUES as error:
        raise OnboardError(
            f"transformers cannot read {config} ({_reason(error)})",
            hint="Check the config's values and the transformers version",
        ) from error


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


class ModelFactory:
    """Builds the model of one checkpoint: from its generated file ("graph"), or transformers' own
    module.

    That one has the generated models' signature in mode "hf" and its own in mode "transformers".
    `model_kwargs` overrides fields of the Hugging Face config; `attn_implementation` is one of them
    for transformers' modules.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        root: Path | None,
        dtype: torch.dtype,
        model_kwargs: Mapping[str, Any],
        mode: Mode = "graph",
    ) -> None:
        self.checkpoint = checkpoint
        self.root = root
        self.dtype = dtype
        self.model_kwargs = dict(model_kwargs)
        self.mode = mode

    @property
    def replaces_attention(self) -> bool:
        """Whether the attention of transformers' module is to be exported as the canonical op, not
        as it is written.
        """
        return self.mode == "hf" and "attn_implementation" not in self.model_kwargs

    @cached_property
    def config(self) -> Any:
        """The Hugging Face config with `model_kwargs` applied; an unknown key is a `UsageError`."""
        config = decoder_config(read_config(self.checkpoint, self.root))
        check_config(self.model_kwargs, "model_kwargs")
        try:
            return overridden(config, self.model_kwargs) if self.model_kwargs else config
        except OnboardError:
            raise
        except Exception as error:  # values run through whatever a config's class does with them
            raise UsageError(
                f"the model's config does not take model_kwargs ({_reason(error)})"
            ) from error

    @property
    def text_config(self) -> Any:
        """The part of the config that describes the text model."""
        return text_config(self.config)

    @property
    def eager_modules(self) -> tuple[str, ...]:
        """Paths of transformers' own modules that the generated model leaves out: towers for images
        or sound.
        """
        if self.mode != "graph":
            return ()
        return tuple(getattr(self._generated_class(), "eager_modules", ()))

    @property
    def towers(self) -> tuple[str, ...]:
        """Those of `eager_modules` that run here: code of repositories, which the model file's config
        class stands for, does not.
        """
        return () if is_own(self.config) else self.eager_modules

    @cached_property
    def first_position(self) -> int:
        """The position of a text's first token, as the generated file registers it; transformers'
        own modules: 0.

        Where that is wrong for one of these, the check that each has to pass before it serves says
        so.
        """
        if self.mode != "graph":
            return 0
        load_model_file(self.model_file())
        return first_position(self.config)

    @cached_property
    def codebooks(self) -> Codebooks:
        """What a token stands for, as the generated model says; `_hf_model` takes one codebook
        alone.
        """
        several = self.mode == "graph" and hasattr(self._generated_class(), "codebooks")
        found: Any = self.build_model() if several else None
        return ONE_CODEBOOK if found is None else found.codebooks

    def build_model(self, device: str = "meta") -> nn.Module:
        """Build the model in evaluation mode: parameters on `device` in `dtype`, buffers with their
        real values.

        Parameters are not initialised on "meta"; elsewhere they have their module's own random
        initialisation.
        """
        with parameters_on(torch.device(device), self.dtype):
            model = self._generated_model() if self.mode == "graph" else self._hf_model()
        return model.eval().requires_grad_(False)

    @cached_property
    def computed_tables(self) -> dict[str, torch.Tensor]:
        """The buffers that checkpoints have, too, as the generated model computes them of the
        checkpoint's own config: with all its layers, where the run has fewer.
        """
        kwargs = {
            key: value for key, value in self.model_kwargs.items() if key != "num_hidden_layers"
        }
        whole = ModelFactory(
            self.checkpoint, root=self.root, dtype=self.dtype, model_kwargs=kwargs, mode="graph"
        )
        return saved_tables(whole.build_model())

    def example_inputs(self) -> dict[str, torch.Tensor]:
        """Return `input_ids` and `position_ids` [3, 11] int64 on the CPU, keyed by argument
        name.
        """
        shape = (_EXAMPLE_BATCH, _EXAMPLE_SEQUENCE)
        positions = torch.arange(_EXAMPLE_SEQUENCE).expand(shape).contiguous()
        return {"input_ids": torch.arange(positions.numel()).view(shape), "position_ids": positions}

    def dynamic_shapes(self) -> dict[str, dict[int, Any]]:
        """Return which dimensions of the example inputs are dynamic: batch and sequence."""
        from torch.export import Dim

        return {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in self.example_inputs()}

    def _generated_class(self) -> type[nn.Module]:
        load_model_file(self.model_file())
        return registered_model(type(self.config).__name__)

    def _generated_model(self) -> nn.Module:
        try:
            with default_dtype(self.dtype):  # as transformers does: some tables are made in it
                model = self._generated_class()(self.config)
            layer = windowless_layer(model, self.text_config)
            assert layer is None, (
                f"the attention of layer {layer} has no window, and the layer's type has one"
            )
            return model
        except AssertionError as error:  # the file says what it does not cover
            raise OnboardError(
                f"{self.model_file().name} does not serve this model: {error}",
                hint="Onboard the model, which makes a file that does",
            ) from error
        except _OF_VALUES as error:
            raise self._unfit(error) from error

    def _unfit(self, error: Exception) -> OnboardError:
        """Return the error of a config that has no field which the model file reads, or values of
        which it makes no model.

        Classes of configs gain fields from one release of transformers to the next.
        """
        name = self.model_file().name
        if isinstance(error, AttributeError) and isinstance(
            error.obj, transformers.PreTrainedConfig
        ):
            return OnboardError(
                f"{name} reads {error.name}, which the config of this checkpoint does not have, nor"
                f" its class in transformers {transformers.__version__}",
                hint="Install a newer transformers, or onboard the model with this one",
            )
        return OnboardError(
            f"{name} makes no model of {self.checkpoint / 'config.json'} ({_reason(error)})",
            hint="Check the config's values; where they are right, onboard the model again",
        )

    def hf_model(self) -> nn.Module:
        """Return transformers' own model on the meta device: its module tree and names, no
        weights.
        """
        with torch.device("meta"):
            model: nn.Module = _build_reference(self.config)
        return model

    def multimodal_model(self) -> Any:
        """Return transformers' own model, parameters on the meta device in the run's dtype, buffers
        with values.

        Its towers attend by torch's function where they can: written out, the scores of a large
        image take memory by the square of its size. The text model shows its masks.
        """
        towers = [name for name in self.config.sub_configs if not self._is_text(name)]
        fused = {"": "eager", **dict.fromkeys(towers, "sdpa")}
        with parameters_on(torch.device("meta"), self.dtype):
            try:
                model = _build_reference(self.config, dtype=self.dtype, attn_implementation=fused)
            except ValueError:  # a tower whose code has no such form
                model = _build_reference(self.config, dtype=self.dtype, attn_implementation="eager")
        return model.eval().requires_grad_(False)

    def _is_text(self, part: str) -> bool:
        return getattr(self.config, part, None) is self.text_config

    def model_file(self) -> Path:
        """Return the generated file that serves the config's model type."""
        path = content_path("models", f"modeling_{self.config.model_type}.py", root=self.root)
        if not path.is_file():
            raise OnboardError(
                f"there is no model file {path.name}", hint="Onboard the model first"
            )
        return path

    def _hf_model(self) -> nn.Module:
        attention = self.model_kwargs.get("attn_implementation", "eager")
        try:
            model = _build_reference(self.config, dtype=self.dtype, attn_implementation=attention)
        except (
            ValueError,
            ImportError,
        ) as error:  # no class for this config, or a library that it needs
            reason = " ".join(str(error).split())[:200]
            raise OnboardError(
                f"transformers cannot build {self.config.model_type}: {reason}"
            ) from error
        if (count := codebooks_of(model).count) > 1:
            raise OnboardError(
                f"mode {self.mode} runs texts of one code a position, {type(model).__name__} has {count} codebooks",
                hint="Onboard the model, and use mode graph",
            )
        if self.mode == "hf":
            # A subclass, not a wrapper module: parameter names stay the checkpoint's.
            model.__class__ = type(f"Export{type(model).__name__}", (_HFForward, type(model)), {})
        else:
            model.config.use_cache = False
        return model  # type: ignore[no-any-return]


def _build_reference(config: Any, **kwargs: Any) -> Any:
    """Build transformers' own model; the tables of its classes take long to import, and a generated
    one needs none.
    """
    from onboard.hf.hf_model import build_reference

    refuse_own_code(config)
    return build_reference(config, **kwargs)


class _HFForward:
    """Narrows the forward signature of a transformers model to the generated models' contract."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> CausalLMOutput:
        output = super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=False)  # type: ignore[misc]
        return CausalLMOutput(output.logits)


def overridden(config: Any, overrides: Mapping[str, Any]) -> Any:
    """Return a config with other values; a multimodal model's are those of its text model, where
    that has the field.
    """
    parts = getattr(config, "sub_configs", {})
    holder = next(
        (name for name in parts if getattr(config, name, None) is text_config(config)), None
    )
    if holder is not None:
        text = {
            key: value for key, value in overrides.items() if hasattr(getattr(config, holder), key)
        }
        own = {key: value for key, value in overrides.items() if key not in text}
        part = overridden(getattr(config, holder), text).to_dict()
        return type(config).from_dict(_own(config, own).to_dict() | {holder: part})
    return _own(config, overrides)


def _own(config: Any, overrides: Mapping[str, Any]) -> Any:
    for key in overrides:
        if key != "attn_implementation" and not hasattr(config, key):
            raise UsageError(
                f"{type(config).__name__} has no field {key!r}", hint=suggest(key, config.to_dict())
            )
    full = config.to_dict()
    values = deep_merge(
        full, {config.attribute_map.get(key, key): overrides[key] for key in overrides}
    )
    fewer, layers = overrides.get("num_hidden_layers"), read_layers(config, full)
    if isinstance(fewer, int) and fewer < 1:
        raise UsageError(f"model_kwargs has num_hidden_layers {fewer}", hint="A model has one")
    if layers is not None and isinstance(fewer, int) and fewer < layers.count:
        cut_layers(layers, values, list(range(fewer)))
        if layers.key not in full:  # the config counts a list's entries instead
            values.pop(layers.key)
    return type(config).from_dict(values)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make floating-point tensors for which no dtype is given in this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
