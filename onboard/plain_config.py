"""Configs of models whose config class is code of their repository: what generated files define in
its place.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


def old_rope_scaling(config: PretrainedConfig) -> dict[str, Any] | None:
    """Return `rope_scaling` as it was before `rope_parameters`: None without scaling, its kind
    under "type" too.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict) or parameters.get("rope_type", "default") == "default":
        return None
    return {"type": parameters["rope_type"], **parameters}


OLD_ROPE_SCALING = property(old_rope_scaling, PretrainedConfig.rope_scaling.fset)


OLD_DEFAULTS: dict[str, Any] = {
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "use_cache": True,
    "is_decoder": False,
    "add_cross_attention": False,
    "torchscript": False,
}
"""What every config of older transformers had; code of its time counts on it."""


class PlainConfig(PretrainedConfig):  # type: ignore[misc]
    """A config that a generated file defines by itself; older code's `rope_scaling` keeps its
    meaning.
    """

    rope_scaling = OLD_ROPE_SCALING
    pad_token_id = OLD_DEFAULTS["pad_token_id"]
    bos_token_id = OLD_DEFAULTS["bos_token_id"]
    eos_token_id = OLD_DEFAULTS["eos_token_id"]
    use_cache = OLD_DEFAULTS["use_cache"]
    is_decoder = OLD_DEFAULTS["is_decoder"]
    add_cross_attention = OLD_DEFAULTS["add_cross_attention"]
    torchscript = OLD_DEFAULTS["torchscript"]
