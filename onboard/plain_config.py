"""Configs of models whose config class is code of their repository: what generated files define in
its place.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers import modeling_rope_utils as rope_utils

_ELSEWHERE = ("rope_type", "rope_theta", "partial_rotary_factor")
"""What `rope_parameters` has beside a kind's own fields."""


_BESIDE = "original_max_position_embeddings"
"""What transformers 5 puts into `rope_parameters`, too, where a config has it beside them."""


class OldRopeScaling(dict[str, Any]):
    """`rope_scaling` as old code counts its fields: "type" and what belongs to that kind. Newer
    code finds in it the kind under "rope_type", too, and what lies beside it; the kind that code
    sets is that of `parameters`, the table of transformers 5.
    """

    def __init__(self, fields: dict[str, Any], parameters: dict[str, Any]) -> None:
        super().__init__(fields)
        self.parameters = parameters

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key == "rope_type" or self._lies_beside(key)

    def __missing__(self, key: str) -> Any:
        if self._lies_beside(key):
            return self.parameters[key]
        if key != "rope_type":
            raise KeyError(key)
        return self["type"]

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key == "type":
            self.parameters |= {name: value for name in ("type", "rope_type")}

    def get(self, key: str, default: Any = None) -> Any:
        """Return `self[key]`, or the default."""
        try:
            return self[key]
        except KeyError:
            return default

    def _lies_beside(self, key: object) -> bool:
        return key == _BESIDE and key in self.parameters


def old_rope_scaling(config: PretrainedConfig) -> Any:
    """Return `rope_scaling` as it was before `rope_parameters`: None without scaling, its kind
    under "type" too, the base elsewhere. A number or a name is what the code has set it to.
    """
    if "rope_scaling" in vars(config):
        return vars(config)["rope_scaling"]
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return None
    kind = parameters.get("rope_type", parameters.get("type", "default"))  # until the base has it
    if kind == "default":
        return None
    elsewhere = (*_ELSEWHERE, _BESIDE) if _BESIDE in vars(config) else _ELSEWHERE
    own = {key: value for key, value in parameters.items() if key not in elsewhere}
    return OldRopeScaling({"type": kind} | own, parameters)


def _set_rope_scaling(config: PretrainedConfig, value: Any) -> None:
    """Keep what is no table of RoPE's parameters: such a field is the code's own."""
    vars(config).pop("rope_scaling", None)
    if value is None or isinstance(value, dict):
        before = vars(config).get("rope_parameters")
        before = before if isinstance(before, dict) else {}
        if value is None and _was_given_none() and before.get("rope_type", "default") != "default":
            return
        plain = dict(value) if isinstance(value, OldRopeScaling) else value
        PretrainedConfig.rope_scaling.fset(config, plain)
        _keep_elsewhere(config, before)
    else:
        vars(config)["rope_scaling"] = value


def _was_given_none() -> bool:
    """Whether who sets a field is a constructor that was given none: that of its base has read a
    table.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and "setattr" in frame.f_code.co_name:
        frame = frame.f_back
    return "rope_scaling" in frame.f_locals and frame.f_locals["rope_scaling"] is None


def _keep_elsewhere(config: Any, before: dict[str, Any]) -> None:
    """Keep what lay beside `rope_scaling` once, where a constructor sets that behind its base's, which
    has put all of it in one table.
    """
    now = config.rope_parameters or {"rope_type": "default"}
    own = before.keys() & {*_ELSEWHERE[1:]}
    lost = {key: before[key] for key in own if before[key] is not None and now.get(key) is None}
    if lost:
        config.rope_parameters = {**now, **lost}


OLD_ROPE_SCALING = property(old_rope_scaling, _set_rope_scaling)


OLD_DEFAULTS: dict[str, Any] = {
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "sep_token_id": None,
    "decoder_start_token_id": None,
    "use_cache": True,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "tie_encoder_decoder": False,
    "torchscript": False,
    "use_bfloat16": False,
    "tf_legacy_loss": False,
    "pruned_heads": {},
    "chunk_size_feed_forward": 0,
    "finetuning_task": None,
    "tokenizer_class": None,
    "prefix": None,
    "task_specific_params": None,
    "problem_type": None,
    "_attn_implementation_autoset": False,
    "max_length": 20,
    "min_length": 0,
    "do_sample": False,
    "early_stopping": False,
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "num_return_sequences": 1,
    "output_scores": False,
    "return_dict_in_generate": False,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "remove_invalid_values": False,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
"""What every config of transformers 4 had; code of its time counts on it."""


def _none_of_its_own(config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields that are a generation config's: the class has these, no config.json."""
    return {}


def _unchecked(config: PretrainedConfig) -> None:
    """Take any value."""


def _where_set(check: Callable[[PretrainedConfig], None]) -> Callable[[PretrainedConfig], None]:
    """Have a check pass over what is not set yet: a constructor may set its fields behind that of
    its base, which checks.
    """

    def checked(config: PretrainedConfig) -> None:
        with suppress(AttributeError):
            check(config)

    return checked


_CHECKS = ("validate_architecture", "validate_layer_type")
"""What transformers 5 asks of every config: sizes that divide one another, layers of kinds that it
knows.
"""
_CLASS_CHECKS = "__class_validators__"
"""Where it keeps what its constructor asks of all of them."""
_TYPES = "__validators__"
"""Where a config class of transformers 5 keeps the checks of its fields' types."""


def _as_its_class_has_it(check: Any) -> Any:
    """Have a check of every config be that of the config's class, which may have another one."""

    @functools.wraps(check)
    def checked(config: PretrainedConfig) -> None:
        getattr(config, check.__name__)()

    return checked


def _ask_its_class(base: Any) -> None:
    """Have the checks of a base's constructor be those of the config's class."""
    checks = vars(base).get(_CLASS_CHECKS, [])
    if not all(hasattr(check, "__wrapped__") for check in checks):
        setattr(base, _CLASS_CHECKS, [*map(_as_its_class_has_it, checks)])


_ask_its_class(PretrainedConfig)
_MOVED = {
    "rope_theta": "rope_theta",
    "rotary_emb_base": "rope_theta",
    "partial_rotary_factor": "partial_rotary_factor",
    "rotary_pct": "partial_rotary_factor",
}
"""Fields that configs of transformers 4 had -> what `rope_parameters` calls them."""


def moved_field(config: Any, name: str) -> Any:
    """Return a field that a config of transformers 4 had and that lies in `rope_parameters` now:
    the `__getattr__` of config classes.
    """
    given = vars(config).get("rope_parameters")
    if name in _MOVED and isinstance(given, dict) and _MOVED[name] in given:
        return given[_MOVED[name]]
    raise AttributeError(f"{type(config).__name__!r} object has no attribute {name!r}")


class OldFields:
    """What older code reads of any config, for classes whose other base is a config class of
    transformers: `rope_scaling` with its old meaning, fields that have moved, and those that every
    config had.
    """

    rope_scaling = OLD_ROPE_SCALING
    __getattr__ = moved_field
    validate_architecture = validate_layer_type = _unchecked

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        add_old_defaults(cls)


def add_old_defaults(config_class: Any) -> None:
    """Give a config class what every config had, and it has not; take away what newer ones check."""
    for name, value in OLD_DEFAULTS.items():
        if not hasattr(config_class, name):
            setattr(config_class, name, value)
    config_class._get_generation_parameters = _none_of_its_own
    for name in _CHECKS:
        setattr(config_class, name, _unchecked)
    setattr(config_class, _TYPES, {})
    for base in config_class.__mro__:
        _ask_its_class(base)
    if hasattr(config_class, "validate_rope"):
        config_class.validate_rope = _where_set(config_class.validate_rope)


class PlainConfig(OldFields, PretrainedConfig):  # type: ignore[misc]
    """A config that a generated file defines by itself."""


def default_rope(
    config: PretrainedConfig, device: Any = None, seq_len: int | None = None, **_: Any
) -> tuple[torch.Tensor, float]:
    """Return plain RoPE's inverse frequencies [rotary_dim / 2] and its factor (Su et al. 2021,
    RoFormer).
    """
    own: Any = config
    given = getattr(own, "rope_parameters", None) or {}
    head_dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
    part = given.get("partial_rotary_factor") or getattr(own, "partial_rotary_factor", None)
    size = int(head_dim * (part or 1.0))
    exponents = (
        torch.arange(0, size, 2, dtype=torch.int64).to(device=device, dtype=torch.float) / size
    )
    theta = getattr(own, "rope_theta", None) or given["rope_theta"]
    return 1.0 / theta**exponents, 1.0


ROPE_INIT_FUNCTIONS = {"default": default_rope, **rope_utils.ROPE_INIT_FUNCTIONS}
"""Kind of RoPE -> its frequencies, with the plain kind, which code of transformers 4 looks up, too."""
