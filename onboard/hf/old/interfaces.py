"""Methods that classes of transformers had, and that older modeling code calls."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Never

import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoTokenizer,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
    masking_utils,
)
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.utils import ModelOutput

from onboard.hf.old.gone import Gone
from onboard.hf.old.rotary_forms import keep_tables
from onboard.plain_config import default_rope

_LENGTH = "get_max_length" if hasattr(Cache, "get_max_length") else "get_max_cache_shape"
"""What transformers calls it: versions have one of the two."""
_KIND = "attention_type"
_BY_NAME = re.compile(r"""(\bdevice\s*(:[^=,()]*)?=|\.(to|device)\()\s*f?["']cuda\b""")
"""Where code puts something on a GPU by its name: `device="cuda"`, `.to("cuda:0")`."""


def restore_old_interfaces() -> list[str]:
    """Give transformers' classes back the methods that older modeling code calls; return what was
    missing.
    """
    facts = []
    for owner, members in _MEMBERS.items():
        for name, member in members.items():
            if name not in dir(owner):
                setattr(owner, name, member)
                facts.append(f"{owner.__name__}.{name} is gone; a stand-in takes its place")
    if "default" not in ROPE_INIT_FUNCTIONS:
        ROPE_INIT_FUNCTIONS["default"] = default_rope
        facts.append('ROPE_INIT_FUNCTIONS["default"] is gone; a stand-in takes its place')
    facts += _masks_by_old_names() + _plain_outputs() + _without_listed_ties()
    return facts + keep_tables() + _without_cuda()


@contextmanager
def without_registering() -> Iterator[None]:
    """Let modules be imported that register their classes for their model type: it may be taken
    today.
    """
    owners = (AutoConfig, AutoTokenizer, _BaseAutoModelClass)
    kept = [(owner, vars(owner)["register"]) for owner in owners]
    for owner in owners:
        owner.register = _nothing
    try:
        yield
    finally:
        for owner, register in kept:
            owner.register = register


def _masks_by_old_names() -> list[str]:
    """Have what makes masks take its embedded text as `input_embeds`, too, as it was called, and
    positions, which it no longer asks for.
    """
    new, old = "inputs_embeds", "input_embeds"
    made = vars(masking_utils).items()
    makers = [
        (name, maker)
        for name, maker in made
        if inspect.isfunction(maker) and new in inspect.signature(maker).parameters
    ]
    without = [
        (name, maker)
        for name, maker in makers
        if not ({old, "kwargs"} & inspect.signature(maker, follow_wrapped=False).parameters.keys())
    ]
    for name, maker in without:
        setattr(masking_utils, name, _renaming(maker, old, new))
    return [f"{len(without)} makers of masks take {old} as {new}"] if without else []


def _renaming(function: Any, old: str, new: str) -> Any:
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def renaming(*args: Any, **kwargs: Any) -> Any:
        if old in kwargs:
            kwargs[new] = kwargs.pop(old)
        if "cache_position" not in parameters:
            kwargs.pop("cache_position", None)
        return function(*args, **kwargs)

    return renaming


def _plain_outputs() -> list[str]:
    """Have classes of outputs make objects that are no dataclasses, as they did: dicts of what they
    are given.
    """
    made = ModelOutput.__init__
    if hasattr(made, "__wrapped__"):
        return []

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            made(self, *args, **kwargs)
        except TypeError:
            if dataclasses.is_dataclass(self) or not self:
                raise

    ModelOutput.__init__ = init
    return ["outputs that are no dataclasses are made as they were"]


def _without_listed_ties() -> list[str]:
    """Have models whose constructor lists what transformers 4 ties go by what their class says of
    that.
    """
    made = PreTrainedModel.post_init
    if hasattr(made, "__wrapped__"):
        return []

    @functools.wraps(made)
    def post_init(self: Any) -> None:
        if isinstance(vars(self).get("_tied_weights_keys"), list | tuple):
            del self._tied_weights_keys
        made(self)

    PreTrainedModel.post_init = post_init
    return ["lists of tied weights that constructors make are left out"]


def _without_cuda() -> list[str]:
    """Where there is no GPU, have code that says `.cuda()` stay on the CPU, which has no streams
    and no profiler of a GPU that wants to know where code is.
    """
    if torch.cuda.is_available():
        return []
    torch.Tensor.cuda = _itself  # type: ignore[method-assign]
    torch.nn.Module.cuda = _itself  # type: ignore[method-assign]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.get_device_capability = _capability
    torch.cuda.stream = contextlib.nullcontext  # type: ignore[assignment]
    for name in ("current_stream", "default_stream"):
        setattr(torch.cuda, name, _no_stream)
    for name in ("mark", "range_pop", "range_push"):
        setattr(torch.cuda.nvtx, name, _no_stream)
    return ["there is no GPU; what is put on one stays on the CPU"]


class _OnCpu(TorchFunctionMode):
    """Has functions of torch that are told the name of a GPU make their tensors on the CPU."""

    entered = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if _is_gpu(given.get("device")):
            given["device"] = torch.device("cpu")
        if func is torch.Tensor.to:
            args = tuple(torch.device("cpu") if _is_gpu(item) else item for item in args)
        return func(*args, **given)


def _is_gpu(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def stay_on_cpu(text: str) -> list[str]:
    """Where there is no GPU, have code that puts tensors on one by its name leave them on the CPU,
    from here on.
    """
    if torch.cuda.is_available() or not _BY_NAME.search(text) or _OnCpu.entered:
        return []
    _OnCpu.entered = True
    _OnCpu().__enter__()  # type: ignore[no-untyped-call]
    return ["there is no GPU; what is put on one by its name stays on the CPU"]


def _itself(self: Any, *_: Any, **__: Any) -> Any:
    return self


def _capability(device: Any = None) -> tuple[int, int]:
    """Return that of the oldest GPU that flash_attn runs on: its functions are stood in for."""
    return 8, 0


def _no_stream(*_: Any, **__: Any) -> None:
    return None


def _head_mask(self: Any, head_mask: Any, num_hidden_layers: int, *_: Any) -> list[None]:
    if head_mask is not None:
        _refuse("a mask of heads")
    return [None] * num_hidden_layers


def _head_mask_of_layers(self: Any, head_mask: Any, num_hidden_layers: int) -> Never:
    _refuse("a mask of heads")


def _causal_mask(
    self: Any, attention_mask: Any, input_tensor: Any, cache_position: Any = None,
    past_key_values: Any = None, output_attentions: bool = False,
) -> Any:  # fmt: skip
    """Return the mask of all layers, with the window that transformers' models had in theirs; where
    layers are of several kinds, each made its own of it.
    """
    kinds = set(getattr(self.config, "layer_types", None) or ())
    if len(kinds) > 1:
        Gone(
            f"{type(self).__name__}._update_causal_mask", "Make masks as transformers 5 does"
        ).refuse()
    windowed = kinds == {"sliding_attention"} if kinds else bool(_window(self.config))
    make = "create_sliding_window_causal_mask" if windowed else "create_causal_mask"
    return vars(masking_utils)[make](
        self.config, input_tensor, attention_mask, past_key_values=past_key_values
    )


def _window(config: Any) -> int | None:
    given: int | None = getattr(config, "sliding_window", None)
    return given if getattr(config, "use_sliding_window", True) else None


def _pruned(self: Any, heads_to_prune: Any) -> None:
    if heads_to_prune:
        _refuse("prune_heads()")


def _refuse(what: str) -> Never:
    Gone(f"transformers' {what}", "Use a checkpoint that keeps all its heads").refuse()


def _from_legacy_cache(cls: Any, past_key_values: Any = None, *_: Any) -> Any:
    cache = cls()
    for index, (key, value) in enumerate(past_key_values or ()):
        cache.update(key, value, index)
    return cache


def _to_legacy_cache(self: Any) -> Any:
    return tuple((layer.keys, layer.values) for layer in self.layers)


def _usable_length(self: Any, new: int, layer: int = 0) -> int:
    return int(self.get_seq_length(layer))


def _max_length(self: Any, layer: int = 0) -> int | None:
    """Return how many tokens a cache takes; None for as many as there come."""
    most = int(getattr(self, _LENGTH)(layer))
    return most if most >= 0 else None


def _kind_of_layer(self: Any) -> str:
    """Return which kind of attention a layer has: what it was told, or what the config says of it."""
    if _KIND in vars(self):
        return str(vars(self)[_KIND])
    for part in self.modules():
        kinds = getattr(getattr(part, "config", None), "layer_types", None)
        if kinds and getattr(part, "layer_idx", None) is not None:
            return str(kinds[part.layer_idx])
    raise AttributeError(_KIND)


def _tell_kind(self: Any, kind: Any) -> None:
    vars(self)[_KIND] = kind


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _enabling_sdpa(cls: Any, config: Any, hard_check_only: bool = False) -> Any:
    config._attn_implementation = "sdpa"
    return config


def _device_map(self: Any, *_: Any, **__: Any) -> Any:
    return self


_MEMBERS: dict[type, dict[str, Any]] = {
    PretrainedConfig: {
        "dict_torch_dtype_to_str": PretrainedConfig.dict_dtype_to_str,
        "is_composition": False,
    },
    PreTrainedModel: {
        "get_head_mask": _head_mask,
        "_convert_head_mask_to_5d": _head_mask_of_layers,
        "_check_and_enable_sdpa": classmethod(_enabling_sdpa),
        "_backward_compatibility_gradient_checkpointing": _nothing,
        "_set_gradient_checkpointing": _nothing,
        "_init_weights": _nothing,
        "prune_heads": _pruned,
        "_update_causal_mask": _causal_mask,
        "parallelize": _device_map,
        "deparallelize": _device_map,
        "all_tied_weights_keys": {},
        "is_parallelizable": False,
        "model_parallel": False,
    },
    GradientCheckpointingLayer: {_KIND: property(_kind_of_layer, _tell_kind)},
    Cache: {
        "get_max_length": _max_length,
        "get_max_cache_shape": _max_length,
        "get_usable_length": _usable_length,
    },
    DynamicCache: {
        "from_legacy_cache": classmethod(_from_legacy_cache),
        "to_legacy_cache": _to_legacy_cache,
        "seen_tokens": property(lambda self: self.get_seq_length()),
        "_seen_tokens": property(lambda self: self.get_seq_length()),
        "key_cache": property(lambda self: [layer.keys for layer in self.layers]),
        "value_cache": property(lambda self: [layer.values for layer in self.layers]),
    },
}
