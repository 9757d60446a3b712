"""Which class of transformers is the language model of a config, and which part of the config is
its text model's.
"""

from __future__ import annotations

import ast
import inspect
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.configuration_auto import model_type_to_module_name

from onboard.errors import OnboardError, UsageError
from onboard.hf.parsed_code import parsed_code


def is_own(config: PretrainedConfig) -> bool:
    """Whether a config's class is none of transformers': a repository's, or a model file's that stands
    for it.
    """
    return not type(config).__module__.startswith("transformers.")


def refuse_own_code(config: PretrainedConfig) -> None:
    """Raise `UsageError` for a model whose code is its repository's: a class of transformers of the
    same name may be another model.
    """
    if is_own(config):
        raise UsageError(
            f"{config.model_type} is what its repository's code makes of it, which no class of "
            "transformers stands for",
            hint="Use mode graph, and compare it with that code: onboard verify --trust-remote-code",
        )


def causal_lm_class(config: PretrainedConfig) -> Any:
    """Return the class of transformers' language model of a config; raise `OnboardError` when it
    has none.
    """
    found = find_language_model(config)
    if found is None:
        raise OnboardError(
            f"{config.model_type} is not a causal language model", hint="Choose a decoder model"
        )
    if needed := _needed_instead_of_tokens(found):
        raise OnboardError(
            f"{found.__name__} reads no tokens: it ignores input_ids and asks for {' and '.join(needed)}",
            hint="Such states are another model's; choose a model that reads a text by itself",
        )
    return found


@cache
def _needed_instead_of_tokens(model_class: Any) -> tuple[str, ...]:
    """Return the inputs without which a class refuses to run where its forward takes `input_ids`
    and ignores them.
    """
    forward = inspect.unwrap(model_class.forward)
    try:
        function = parsed_code(forward)
    except (OSError, TypeError, SyntaxError):  # no Python source: nothing is known
        return ()
    names = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    ]
    if "input_ids" not in inspect.signature(forward).parameters or any(
        node.id == "input_ids" for node in names
    ):
        return ()
    refusals = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise)
    ]
    asked = {
        node.id
        for refusal in refusals
        for node in ast.walk(refusal.test)
        if isinstance(node, ast.Name)
    }
    return tuple(name for name in inspect.signature(forward).parameters if name in asked)


def find_language_model(config: PretrainedConfig) -> Any | None:
    """Return the class of transformers that predicts the next token, of text alone or of text with
    other inputs.

    A multimodal model may have both: the one that the config names counts, else the one for text. A
    text config has its multimodal model's class when that takes the text config alone.
    """
    auto = _auto_classes()
    tables = (auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_MULTIMODAL_LM_MAPPING)
    with redirect_stdout(StringIO()):  # as it imports a class, transformers prints what docs lack
        own = [_first(table[type(config)]) for table in tables if type(config) in table]
    named = [item for item in own if item.__name__ in (config.architectures or [])]
    if own:
        return (named or own)[0]
    package = type(config).__module__.split(".")[-2]
    multimodal = [
        CONFIG_MAPPING[name]
        for name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if _package(name) == package
    ]
    classes = [auto.MODEL_FOR_CAUSAL_LM_MAPPING[config_class] for config_class in multimodal]
    return next((item for item in classes if item.config_class is type(config)), None)


def language_model_types() -> list[str]:
    """Return the model types that the installed transformers has such a class for, sorted."""
    auto = _auto_classes()
    return sorted(
        {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    )


def _auto_classes() -> Any:
    """Return transformers' tables of model classes, whose import takes seconds: a generated model
    does without.
    """
    from transformers.models.auto import modeling_auto

    return modeling_auto


def _first(classes: Any) -> Any:
    return classes[0] if isinstance(classes, tuple | list) else classes


def _package(model_type: str) -> str:
    return str(model_type_to_module_name(model_type))


def text_config(config: Any) -> Any:
    """Return the part of a config that describes the text model; a config without parts is that
    itself.
    """
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def is_composite(config: Any) -> bool:
    """Whether a config has parts of its own, one of which may be the text model's."""
    parts = getattr(config, "sub_configs", {})
    return any(isinstance(getattr(config, name, None), PretrainedConfig) for name in parts)


def decoder_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the causal language model itself.

    That is a multimodal model's text config where the class takes that alone, as in transformers'
    own auto classes.
    """
    if is_composite(config) and causal_lm_class(config).config_class is type(
        text := text_config(config)
    ):
        config = text
    return config
