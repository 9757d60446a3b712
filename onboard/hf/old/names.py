"""Names that older transformers had and modeling code of its time imports.

Those that a forward pass may call have a meaning here. Any other can be imported all the same, and
refuses when it is called: of a repository's code most is for training and generation.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypedDict

import torch
from transformers.cache_utils import Cache
from transformers.utils.generic import merge_with_config_defaults

from onboard.hf.old.gone import Gone
from onboard.hf.old.rotary_forms import take_device


class _Keywords(TypedDict, total=False):
    """Stands for typed keywords, which only annotations mention."""


def _no_cache(name: str) -> type:
    """Return what stands for a cache class: nothing is one, and none can be made."""

    def refuse(*_: Any, **__: Any) -> None:
        Gone(f"transformers' {name}", "Pass another cache, or none").refuse()

    return type(name, (Cache,), {"__init__": refuse})


def _unchanged(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda decorated: decorated


def _renamed(
    old_name: str, *_: Any, new_name: str | None = None, **__: Any
) -> Callable[[Any], Any]:
    """Stand for the decorator that takes an argument by its old name, too."""

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if new_name is not None and old_name in kwargs:
                kwargs.setdefault(new_name, kwargs.pop(old_name))
            return function(*args, **kwargs)

        return called

    return decorate


def _with_defaults(function: Any = None, **_: Any) -> Any:
    """Stand for `check_model_inputs`, which 4.57 calls before it decorates: the fields of the
    config stand where a forward is given None.
    """
    return merge_with_config_defaults if function is None else merge_with_config_defaults(function)


def _false(*_: Any, **__: Any) -> bool:
    return False


def _true(*_: Any, **__: Any) -> bool:
    return True


def _nothing(*_: Any, **__: Any) -> None:
    return None


STAND_INS: dict[str, Any] = {
    "is_torch_sdpa_available": _true,
    "is_torch_compile_available": _true,
    "is_torchdynamo_available": _true,
    "is_torch_bf16_available": _true,
    "is_torch_bf16_cpu_available": _true,
    "is_safetensors_available": _true,
    "is_torch_fx_available": _false,
    "is_torch_fx_proxy": _false,
    "is_tf_available": _false,
    "is_flax_available": _false,
    "is_ipex_available": _false,
    "is_tf_tensor": _false,
    "is_jax_tensor": _false,
    "is_flash_attn_available": _false,
    "is_deepspeed_zero3_enabled": _false,
    "is_torch_greater_or_equal_than_1_11": True,
    "is_torch_greater_or_equal_than_1_13": True,
    "is_torch_greater_or_equal_than_2_0": True,
    "LossKwargs": _Keywords,
    "KwargsForCausalLM": _Keywords,
    "FlashAttentionKwargs": _Keywords,
    "SinkCache": _no_cache("SinkCache"),
    "HybridCache": _no_cache("HybridCache"),
    "SlidingWindowCache": _no_cache("SlidingWindowCache"),
    "OffloadedCache": _no_cache("OffloadedCache"),
    "add_start_docstrings": _unchanged,
    "add_start_docstrings_to_model_forward": _unchanged,
    "add_code_sample_docstrings": _unchanged,
    "replace_return_docstrings": _unchanged,
    "check_model_inputs": _with_defaults,
    "deprecate_kwarg": _renamed,
    "rope_config_validation": _nothing,
    "ALL_LAYERNORM_LAYERS": [torch.nn.LayerNorm],
}
"""Name -> what takes its place, wherever under `transformers` it is looked for."""


_WAYS = ("eager", "sdpa", "flash_attention_2")
"""Keys of the tables of attention classes."""


def provide(module: str, names: list[str]) -> list[str]:
    """See to it that `from module import names` works; return what it took."""
    facts = []
    try:
        target = importlib.import_module(module)
    except ModuleNotFoundError:
        target = _new_module(module)
        facts.append(f"{module} is gone; an empty module stands in for it")
    for name in names:
        facts += take_device(vars(target).get(name))
        if name == "*" or _is_there(target, name):
            continue
        moved = getattr(importlib.import_module("transformers.pytorch_utils"), name, None)
        stand_in = STAND_INS.get(name, _attention_of(target, name) if moved is None else moved)
        what = "does something else now" if hasattr(target, name) else "is gone"
        full = f"{module}.{name}"
        if stand_in is None:
            setattr(target, name, Gone(full))
            facts.append(f"{full} is gone; it can be imported, and not called")
        else:
            setattr(target, name, stand_in)
            facts.append(f"{full} {what}; a stand-in takes its place")
    return facts


def provide_by_stars(text: str) -> list[str]:
    """See to it that `from module import *` gives code the names that it has of transformers' modules
    in no other way: these list today what such an import gives. Return what it took.
    """
    tree = ast.parse(text)
    stars: list[Any] = [
        importlib.import_module(str(node.module))
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and str(node.module).split(".")[0] == "transformers"
        and node.names[0].name == "*"
    ]
    facts = []
    for name in _unbound(tree) if stars else ():
        home = next((item for item in reversed(stars) if hasattr(item, name)), stars[-1])
        facts += provide(home.__name__, [name])
        if name not in getattr(home, "__all__", [name]):
            home.__all__ = [*home.__all__, name]
            facts.append(f"{home.__name__} lists its names, and {name} is none; * gives it, too")
    return facts


def _unbound(tree: ast.Module) -> list[str]:
    """Return the names that code reads and binds nowhere, in the order of their first use."""
    bound, read = {*vars(builtins), "__name__", "__file__"}, []
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                read.append(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=str() as name):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.Import(names=taken) | ast.ImportFrom(names=taken):
                bound |= {item.asname or item.name.split(".")[0] for item in taken}
    return [name for name in dict.fromkeys(read) if name not in bound]


def _attention_of(module: ModuleType, name: str) -> Any:
    """Return a model's attention class where a name was one of those that computed the same in
    other ways (`LlamaSdpaAttention`), or the table of all (`LLAMA_ATTENTION_CLASSES`); else None.
    """
    one = re.fullmatch(r"(\w+)(?:Sdpa|Flash)Attention2?", name)
    table = re.fullmatch(r"([A-Z0-9_]+)_ATTENTION_CLASSES", name)
    family = one or table
    if family is None:
        return None
    wanted = f"{family[1].replace('_', '')}attention".lower()
    found = next((item for key, item in vars(module).items() if key.lower() == wanted), None)
    return dict.fromkeys(_WAYS, found) if table is not None and found is not None else found


def _is_there(target: ModuleType, name: str) -> bool:
    """Whether a module has a name that means what it did: a decorator that writes docstrings has
    had other arguments each year, and changes nothing; a check of RoPE's fields moves them today,
    and one that reads the config was called before it decorates for a while.
    """
    stand_in = STAND_INS.get(name)
    if stand_in in (_unchanged, _nothing, _with_defaults):
        return getattr(target, name, None) is stand_in
    return hasattr(target, name) or _is_module(f"{target.__name__}.{name}")


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def _new_module(name: str) -> ModuleType:
    parent, _, leaf = name.rpartition(".")
    within = importlib.import_module(parent) if _is_module(parent) else _new_module(parent)
    module = sys.modules[name] = ModuleType(name)
    module.__path__ = []  # others may be asked for in it
    setattr(within, leaf, module)
    return module
