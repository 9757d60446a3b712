"""Stand-ins for what older transformers had and modeling code of its time imports, in the child
process only.

Each is small and keeps the meaning that matters for inference. What was put in place is told, for
the report.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypedDict

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from onboard.errors import OnboardError


class _Keywords(TypedDict, total=False):
    """Stands for typed keywords, which only annotations mention."""


class _NoCache(Cache):  # type: ignore[misc]
    """Stands for a cache class that is only asked after with isinstance."""


def _unchanged(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda decorated: decorated


def _false(*_: Any, **__: Any) -> bool:
    return False


def _nothing(*_: Any, **__: Any) -> None:
    return None


STAND_INS: dict[str, Any] = {
    "is_torch_fx_available": _false,
    "is_torch_fx_proxy": _false,
    "is_flash_attn_available": _false,
    "is_deepspeed_zero3_enabled": _false,
    "is_torch_greater_or_equal_than_1_13": True,
    "is_torch_greater_or_equal_than_2_0": True,
    "LossKwargs": _Keywords,
    "KwargsForCausalLM": _Keywords,
    "FlashAttentionKwargs": _Keywords,
    "SinkCache": _NoCache,
    "HybridCache": _NoCache,
    "SlidingWindowCache": _NoCache,
    "OffloadedCache": _NoCache,
    "add_start_docstrings": _unchanged,
    "add_start_docstrings_to_model_forward": _unchanged,
    "add_code_sample_docstrings": _unchanged,
    "replace_return_docstrings": _unchanged,
    "deprecate_kwarg": _unchanged,
    "find_pruneable_heads_and_indices": _nothing,
    "prune_conv1d_layer": _nothing,
    "prune_linear_layer": _nothing,
    "assert_device_map": _nothing,
    "get_device_map": _nothing,
    "rope_config_validation": _nothing,
    "ALL_LAYERNORM_LAYERS": [torch.nn.LayerNorm],
}
"""Name -> what takes its place, wherever under `transformers` it is looked for."""


def provide(module: str, names: list[str]) -> list[str]:
    """See to it that `from module import names` works; return what it took.

    Raises:
        OnboardError: a name is gone and nothing stands in for it.
    """
    facts = []
    try:
        target = importlib.import_module(module)
    except ModuleNotFoundError:
        target = _new_module(module)
        facts.append(f"{module} is gone; an empty module stands in for it")
    for name in names:
        if name == "*" or hasattr(target, name) or _is_module(f"{module}.{name}"):
            continue
        moved = getattr(importlib.import_module("transformers.pytorch_utils"), name, None)
        stand_in = STAND_INS.get(name, moved)
        if stand_in is None:
            raise OnboardError(
                f"the model's code needs {module}.{name}, which this transformers has not",
                hint="Use its own version",
            )
        setattr(target, name, stand_in)
        facts.append(f"{module}.{name} is gone; a stand-in takes its place")
    return facts


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def _new_module(name: str) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)
    parent, _, leaf = name.rpartition(".")
    setattr(importlib.import_module(parent), leaf, module)
    return module


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
        ROPE_INIT_FUNCTIONS["default"] = _default_rope
        facts.append('ROPE_INIT_FUNCTIONS["default"] is gone; a stand-in takes its place')
    return facts


def _default_rope(
    config: PretrainedConfig, device: Any = None, **_: Any
) -> tuple[torch.Tensor, float]:
    """Return plain RoPE's inverse frequencies [rotary_dim / 2] and its factor (Su et al. 2021,
    RoFormer).
    """
    own: Any = config
    head_dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
    size = int(head_dim * getattr(own, "partial_rotary_factor", 1.0))
    exponents = (
        torch.arange(0, size, 2, dtype=torch.int64).to(device=device, dtype=torch.float) / size
    )
    return 1.0 / own.rope_theta**exponents, 1.0


def _head_mask(self: Any, head_mask: Any, layers: int, *_: Any) -> list[None]:
    return [None] * layers


def _from_legacy_cache(cls: Any, past_key_values: Any = None, *_: Any) -> Any:
    cache = cls()
    for index, (key, value) in enumerate(past_key_values or ()):
        cache.update(key, value, index)
    return cache


def _to_legacy_cache(self: Any) -> Any:
    return tuple((layer.keys, layer.values) for layer in self.layers)


def _usable_length(self: Any, new: int, layer: int = 0) -> int:
    return int(self.get_seq_length(layer))


_MEMBERS: dict[type, dict[str, Any]] = {
    PreTrainedModel: {"get_head_mask": _head_mask},
    DynamicCache: {
        "from_legacy_cache": classmethod(_from_legacy_cache),
        "to_legacy_cache": _to_legacy_cache,
        "get_usable_length": _usable_length,
        "get_max_length": _nothing,
        "seen_tokens": property(lambda self: self.get_seq_length()),
        "key_cache": property(lambda self: [layer.keys for layer in self.layers]),
        "value_cache": property(lambda self: [layer.values for layer in self.layers]),
    },
}
