"""The config object of a config.json whose architecture is a causal language model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from onboard.analysis import repository
from onboard.analysis.tiny.tiny_config import one_line
from onboard.errors import ConsentRequiredError, OnboardError
from onboard.hf.architecture import causal_lm_class, decoder_config, language_model_types
from onboard.hf.json_floats import json_floats
from onboard.hub import with_own_type

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def load_config(config: Mapping[str, Any], *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return the transformers config object of a parsed config.json whose architecture is a causal
    language model.

    Raises:
        ConsentRequiredError: the model needs code from its repository.
        OnboardError: unknown or non-causal architecture, or values that transformers refuses.
    """
    config = with_own_type(config)
    model_type = config.get("model_type")
    own_code = repository.is_installed(model_type)
    if config.get("auto_map") and not own_code and model_type not in language_model_types():
        _refuse_remote_code(trust_remote_code)
    _check_names(model_type, config.get("architectures"))
    if model_type not in CONFIG_MAPPING_NAMES and not own_code:
        raise OnboardError(
            f"transformers has no architecture {model_type!r}", hint="Upgrade transformers"
        )
    values = {key: json_floats(value) for key, value in config.items() if key != "model_type"}
    try:
        made = AutoConfig.for_model(model_type, **values)
    except Exception as error:
        raise OnboardError(
            f"transformers refuses this {model_type} config: {one_line(error)}"
        ) from error
    causal_lm_class(made)
    return decoder_config(made)


def _refuse_remote_code(trust_remote_code: bool) -> None:
    if not trust_remote_code:
        raise ConsentRequiredError(
            "this model runs code from its repository",
            hint="Read that code, then pass --trust-remote-code",
        )
    raise OnboardError(
        "the model's own code was not imported",
        hint="Onboard it with the command, which does so apart",
    )


def _check_names(model_type: object, architectures: object) -> None:
    names = architectures if isinstance(architectures, list) else []
    for name in (model_type, *names):
        if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name.replace("-", "_")):
            raise OnboardError(
                f"config.json names an architecture {name!r}, which is not an identifier"
            )
