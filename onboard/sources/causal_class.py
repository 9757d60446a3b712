"""Which class of a repository's own code is the language model, by the names in its `auto_map`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

CAUSAL = "AutoModelForCausalLM"
_GENERATES = re.compile(r".*(ForCausalLM|ForConditionalGeneration|LMHeadModel)")

_PART = re.compile(r"(?!quantization_).*_config")


def with_causal_class(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config whose `auto_map` names its language model for sequences from sequences alone,
    or for whatever is asked for, as ChatGLM's first releases do, with that as the causal one, which a
    decoder's is.
    """
    classes = config.get("auto_map")
    if not isinstance(classes, dict) or config.get("is_encoder_decoder"):
        return config
    named = classes.get(CAUSAL, classes.get("AutoModelForSeq2SeqLM", _generating(config)))
    return config if named is None else {**config, "auto_map": {**classes, CAUSAL: named}}


def _generating(config: Mapping[str, Any]) -> str | None:
    """Return the class that `auto_map` names for all uses, if by its name it writes texts, and the model
    has no parts with configs of their own, of which it may be one that sees.
    """
    named = str(config["auto_map"].get("AutoModel", ""))
    parts = any(
        isinstance(value, dict) and ("model_type" in value or _PART.fullmatch(key))
        for key, value in config.items()
    )
    return named if _GENERATES.fullmatch(named) and not parts else None
